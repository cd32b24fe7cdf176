"""``pdmesh registry``: what the store says about the workers' pages, and whether it is true."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pdmesh.launch.runtime import find_mesh
from pdmesh.registry.audit import Contents, clean, differences, read_contents
from pdmesh.registry.roster import Member
from pdmesh.registry.store import Store
from pdmesh.wire.errors import ConfigError, PdmeshError, Unavailable
from pdmesh.wire.messages import Empty
from pdmesh.wire.registry import IndexDigests
from pdmesh.wire.rpc import Client

OK, DRIFT, UNREACHABLE = 0, 1, 2
_CALL_S = 5.0
_TRIES = 4
_AGAIN_S = 1.0
"""Changes are always under way in a busy mesh: only what differs each time is drift."""


def registry(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code."""
    actions: dict[str, Callable[[Store], Awaitable[tuple[dict[str, Any], int]]]] = {
        "inspect": inspect,
        "check": check,
        "gc": collect_garbage,
    }
    try:
        url, mesh = _store_of(arguments)
        found, code = asyncio.run(_with_store(url, mesh, actions[arguments.action]))
    except (ConfigError, Unavailable) as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return UNREACHABLE
    found = {"mesh": mesh, **found}
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(_TABLES[arguments.action](found))
    return code


async def inspect(store: Store) -> tuple[dict[str, Any], int]:
    """Workers and how much the store has of each."""
    contents = await read_contents(store)
    workers = [
        {
            "worker": member.record.worker_id,
            "instance": member.record.instance,
            "state": member.state,
            "slot": member.slot,
            "epoch": member.epoch,
            "pages": contents.pages_of(member.slot),
            "partitions": sum(
                member.slot in rows and rows[member.slot].pages > 0 for rows in contents.parts
            ),
        }
        for member in contents.members
    ]
    return {**_facts(contents), "workers": workers}, OK


async def check(store: Store) -> tuple[dict[str, Any], int]:
    """Compares until nothing differs, a few times at most."""
    for again in reversed(range(_TRIES)):
        contents = await read_contents(store)
        asked = await asyncio.gather(*(_digests(member) for member in contents.members))
        workers = [
            _compared(contents, member, own)
            for member, own in zip(contents.members, asked, strict=True)
        ]
        facts = _facts(contents)
        well = not facts["strays"] and all(worker["ok"] for worker in workers)
        if well or not again:
            break
        await asyncio.sleep(_AGAIN_S)
    return {**facts, "ok": well, "workers": workers}, OK if well else DRIFT


async def collect_garbage(store: Store) -> tuple[dict[str, Any], int]:
    """Removes what belongs to nobody."""
    contents = await read_contents(store)
    removed = await clean(store, contents)
    return {**_facts(contents), "removed": removed}, OK


def _store_of(arguments: argparse.Namespace) -> tuple[str, str]:
    if arguments.redis:
        return arguments.redis, arguments.mesh or "default"
    info = find_mesh(arguments.mesh)
    return info.redis_url, info.name


async def _with_store(
    url: str, mesh: str, action: Callable[[Store], Awaitable[tuple[dict[str, Any], int]]]
) -> tuple[dict[str, Any], int]:
    store = Store(url, mesh)
    try:
        return await action(store)
    finally:
        await store.close()


async def _digests(member: Member) -> IndexDigests | str:
    client = Client(member.record.address, member.record.role)
    try:
        return await client.unary("Digests", Empty(), IndexDigests, timeout=_CALL_S)
    except PdmeshError as error:
        return error.message
    finally:
        await client.close()


def _facts(contents: Contents) -> dict[str, Any]:
    return {
        "partitions": contents.layout.partitions,
        "buckets": contents.buckets,
        "strays": [{"slot": s, "pages": pages} for s, pages in contents.strays().items()],
    }


def _compared(contents: Contents, member: Member, own: IndexDigests | str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "worker": member.record.worker_id,
        "pages_in_store": contents.pages_of(member.slot),
    }
    if isinstance(own, str):
        return {**found, "ok": False, "pages": None, "problems": [f"no answer: {own}"]}
    problems = [
        what if partition is None else f"partition {partition}: {what}"
        for partition, what in differences(contents, member, own)
    ]
    return {**found, "ok": not problems, "pages": sum(own.counts), "problems": problems}


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    words = [tuple(str(cell) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[i]) for row in words) for i in range(len(head))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in words]


def _about(found: dict[str, Any]) -> list[str]:
    lines = [f"mesh {found['mesh']}: {found['partitions']} partitions, {found['buckets']} buckets"]
    lines += [
        f"slot {s['slot']} of no worker has {s['pages']} pages (pdmesh registry gc)"
        for s in found["strays"]
    ]
    return lines


def _inspected(found: dict[str, Any]) -> str:
    head = ("worker", "state", "slot", "epoch", "pages", "partitions")
    rows = [tuple(worker[name] for name in head) for worker in found["workers"]]
    return "\n".join([*_about(found), *_table(head, rows)])


def _checked(found: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [
        (
            worker["worker"],
            "-" if worker["pages"] is None else worker["pages"],
            worker["pages_in_store"],
            "equal" if worker["ok"] else worker["problems"][0],
        )
        for worker in found["workers"]
    ]
    return "\n".join([*_about(found), *_table(("worker", "pages", "in store", "digests"), rows)])


def _collected(found: dict[str, Any]) -> str:
    return f"mesh {found['mesh']}: {found['removed']} dead records removed"


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "inspect": _inspected,
    "check": _checked,
    "gc": _collected,
}
