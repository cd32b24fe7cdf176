"""``pdmesh scale``, ``restart`` and ``drain``: changes to a running mesh."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from pdmesh.launch.control import SERVICE
from pdmesh.launch.runtime import MeshInfo, find_mesh
from pdmesh.launch.scaling import check_target, unknown_worker
from pdmesh.registry.roster import Member
from pdmesh.registry.store import read_members
from pdmesh.wire.control import Progress, RestartRequest, ScaleRequest
from pdmesh.wire.errors import ConfigError, Unavailable
from pdmesh.wire.handoff import DrainRequest
from pdmesh.wire.messages import Empty, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Client

_CALL_S = 10.0
_LOOK_S = 0.2
_INTERRUPTED = 130


def operate(arguments: argparse.Namespace) -> int:
    """Runs one of the commands. Returns the exit code."""
    a = arguments
    try:
        if a.command == "scale":
            request = parse_targets(a.targets)
            asyncio.run(_change(running_mesh(a.mesh), "Scale", request))
        elif a.command == "restart":
            restart = RestartRequest(workers=tuple(a.workers))
            asyncio.run(_change(running_mesh(a.mesh), "Restart", restart))
        else:
            url, mesh = _store_of(a.redis, a.mesh)
            asyncio.run(_drain(url, mesh, a.worker, a.undo))
    except KeyboardInterrupt:
        print(_AFTERWARDS[a.command])
        return _INTERRUPTED
    return 0


_AFTERWARDS = {
    "scale": "(no longer watching; the change goes on in the mesh: see pdmesh status)",
    "restart": "(no longer watching; the change goes on in the mesh: see pdmesh status)",
    "drain": "(no longer watching; the worker goes on draining: --undo takes it back)",
}


def parse_targets(words: Sequence[str]) -> ScaleRequest:
    """Of ``ROLE=N`` words.

    Raises:
        ConfigError: one is wrong, or says a role twice.
    """
    targets: dict[str, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        if role not in ("prefill", "decode") or not number.lstrip("-").isdigit():
            raise ConfigError(f"{word!r} is no target; give prefill=N or decode=N, e.g. decode=3")
        if role in targets:
            raise ConfigError(f"{word!r}: {role} is given twice; give it once")
        targets[role] = int(number)
        check_target(role, targets[role])
    return ScaleRequest(**targets)


def running_mesh(name: str | None) -> MeshInfo:
    """As ``find_mesh``, but a mesh that does not run is wrong input. Raises ConfigError."""
    try:
        return find_mesh(name)
    except Unavailable as error:
        raise ConfigError(error.message) from error


def _store_of(redis: str | None, mesh: str | None) -> tuple[str, str]:
    if redis:
        return redis, mesh or "default"
    info = running_mesh(mesh)
    return info.redis_url, info.name


async def _change(info: MeshInfo, method: str, request: msgspec.Struct) -> None:
    if not info.control:
        raise ConfigError(f"the mesh {info.name!r} was started by an older version; start it again")
    client = Client(f"unix:{info.control}", SERVICE)
    try:
        lines: AsyncGenerator[Progress, None] = client.stream(method, request, Progress)
        async for line in lines:
            print(line.text, flush=True)
    finally:
        await client.close()


async def _drain(url: str, mesh: str, worker: str, undo: bool) -> None:
    members = await read_members(url, mesh)
    record = _named(members, worker)
    client = Client(record.address, record.role)
    try:
        if undo:
            await client.unary("Undrain", Empty(), WorkerStatus, timeout=_CALL_S)
            print(f"{worker} takes new requests again")
            return
        if len(_ready(members, record)) == 0:
            print(f"no other {record.role} worker is ready: new requests fail until one is")
        status = await client.unary(
            "Drain", DrainRequest(reason="pdmesh drain"), WorkerStatus, timeout=_CALL_S
        )
        await _until_empty(client, status)
    finally:
        await client.close()
    print(
        f"{worker} is empty and takes nothing new; it stays up until it is told to end"
        f" (take it back: pdmesh drain {worker} --undo)"
    )


async def _until_empty(client: Client, status: WorkerStatus) -> None:
    told = 0
    while left := load(status):
        if left != told:
            what = "answer" if status.role == "decode" else "prompt"
            print(f"draining: {left} {what}{'' if left == 1 else 's'} left", flush=True)
            told = left
        await asyncio.sleep(_LOOK_S)
        status = await client.unary("Status", Empty(), WorkerStatus, timeout=_CALL_S)
        if status.state != "draining":
            raise Unavailable(
                f"{status.worker_id} is {status.state} again; nothing drains any more"
            )


def load(status: WorkerStatus) -> int:
    """Answers (decode) or prompts (prefill) that are not over."""
    others = status.queued + status.running if status.role == "prefill" else 0
    return status.leases + others


def _named(members: Sequence[Member], worker: str) -> WorkerRecord:
    for member in members:
        if member.record.worker_id == worker:
            return member.record
    raise ConfigError(unknown_worker(worker, [m.record.worker_id for m in members]))


def _ready(members: Sequence[Member], besides: WorkerRecord) -> list[Member]:
    return [
        member
        for member in members
        if member.state == "ready"
        and member.record.role == besides.role
        and member.record.worker_id != besides.worker_id
    ]
