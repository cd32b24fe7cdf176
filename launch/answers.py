"""``pdmesh answers`` and ``pdmesh migrate``: what the routers are answering, and moving it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from pdmesh.launch.operate import running_mesh
from pdmesh.wire.admin import AnswerList, MoveOrder, MoveReport, RunningAnswer
from pdmesh.wire.errors import ConfigError, Unavailable, WorkerLost
from pdmesh.wire.messages import Empty
from pdmesh.wire.rpc import Client

_CALL_S = 10.0
_INTERRUPTED = 130
_HEAD = ("request", "answer", "worker", "phase", "prompt", "tokens", "moved")


def answers(arguments: argparse.Namespace) -> int:
    """Prints the running answers. Returns the exit code."""
    found = asyncio.run(_all_answers(admin_addresses(arguments)))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode({"answers": found})).decode())
    else:
        print(as_table(found))
    return 0


def migrate(arguments: argparse.Namespace) -> int:
    """Moves the answers of a request. Returns the exit code: 1 if one could not be moved."""
    try:
        moved = asyncio.run(
            _migrate(admin_addresses(arguments), arguments.request, arguments.to, arguments.index)
        )
    except KeyboardInterrupt:
        print("(no longer watching; the answer goes on, moved or not: see pdmesh answers)")
        return _INTERRUPTED
    return 0 if moved else 1


def as_table(found: Sequence[RunningAnswer]) -> str:
    """The answers as a table for people."""
    if not found:
        return "nothing is being answered"
    rows = [_HEAD, *(_row(answer) for answer in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def choose(found: Sequence[RunningAnswer], beginning: str) -> str:
    """The one request whose id begins so.

    Raises:
        ConfigError: there is none, or several.
    """
    ids = sorted({a.request_id for a in found if a.request_id.startswith(beginning)})
    if beginning in ids:
        return beginning
    if len(ids) == 1:
        return ids[0]
    if ids:
        raise ConfigError(f"several requests begin with {beginning!r}: {', '.join(ids)}; say more")
    known = ", ".join(sorted({a.request_id for a in found})) or "none"
    raise ConfigError(f"no request {beginning!r} is being answered; running now: {known}")


def described(report: MoveReport) -> str:
    """A report in words."""
    where = f"answer {report.index}: {report.source} -> {report.target or '?'}"
    if report.state == "moved":
        return f"{where}, moved; paused for {report.pause_ms:.0f} ms"
    if report.state == "failed":
        return f"{where}, not moved, it goes on where it is: {report.reason}"
    return f"answer {report.index} ended first" if report.state == "ended" else f"{where} ..."


async def _all_answers(addresses: Sequence[str]) -> tuple[RunningAnswer, ...]:
    by_router = await _by_router(addresses)
    return tuple(answer for answers in by_router.values() for answer in answers)


async def _by_router(addresses: Sequence[str]) -> dict[str, tuple[RunningAnswer, ...]]:
    """What each router is answering; one that is gone answers nothing, as long as another lives.

    Raises:
        WorkerLost: none of them can be reached.
    """
    found = await asyncio.gather(*map(_answers, addresses), return_exceptions=True)
    told = {a: f for a, f in zip(addresses, found, strict=True) if not isinstance(f, BaseException)}
    for error in found:
        if isinstance(error, BaseException) and (not told or not isinstance(error, WorkerLost)):
            raise error
    return told


async def _answers(address: str) -> tuple[RunningAnswer, ...]:
    client = Client(address, "router")
    try:
        return (await client.unary("Answers", Empty(), AnswerList, timeout=_CALL_S)).answers
    finally:
        await client.close()


async def _migrate(
    addresses: Sequence[str], beginning: str, target: str, index: int | None
) -> bool:
    by_router = await _by_router(addresses)
    every = [answer for answers in by_router.values() for answer in answers]
    request_id = choose(every, beginning)
    address = next(
        where
        for where, answers in by_router.items()
        if any(answer.request_id == request_id for answer in answers)
    )
    order = MoveOrder(request_id=request_id, index=index, target=target)
    client = Client(address, "router")
    failed = False
    try:
        reports: AsyncGenerator[MoveReport, None] = client.stream(
            "MigrateAnswer", order, MoveReport
        )
        async for report in reports:
            print(described(report), flush=True)
            failed |= report.state == "failed"
    finally:
        await client.close()
    return not failed


def admin_addresses(arguments: argparse.Namespace) -> list[str]:
    """Of the internal services of all routers."""
    if arguments.admin:
        return [str(arguments.admin)]
    info = running_mesh(arguments.mesh)
    if not info.router_admins:
        raise Unavailable(f"no router of the mesh {info.name!r} is ready; try again")
    return list(info.router_admins)


def _row(answer: RunningAnswer) -> tuple[str, ...]:
    counts = (answer.prompt_tokens, answer.tokens, answer.migrations)
    who = (answer.request_id, str(answer.index), answer.worker_id, answer.phase)
    return *who, *(str(count) for count in counts)
