"""``pdmesh status``: what runs, in words or as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from pdmesh.launch.runtime import HolderInfo
from pdmesh.registry.roster import Member
from pdmesh.registry.store import read_members
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.messages import Empty, RankStatus, WorkerRecord, WorkerStatus
from pdmesh.wire.rpc import Client

_TIMEOUT_S = 2.0
_HEAD = (
    *("worker", "state", "address", "pages free/cached/used/all", "pages over"),
    *(
        "step, at most",
        "queued",
        "running",
        "parked",
        "preempted",
        "moved in/out",
        "drafts accepted",
        "metrics",
    ),
)


@dataclass(frozen=True)
class WorkerLine:
    """One worker: what the registry says, and what the worker says itself."""

    worker: str
    role: str
    state: str
    address: str
    instance: str
    epoch: int
    model: str
    metrics: str
    """host:port of the Prometheus endpoint; empty: none."""
    status: WorkerStatus | None
    """None if the worker did not answer."""


async def collect(
    redis_url: str, mesh: str, not_ready: Mapping[str, str] | None = None
) -> list[WorkerLine]:
    """Every worker with a lease, asked for its status, and those of ``not_ready`` without one.

    Args:
        not_ready: what a supervisor says of its workers that are not ready, by name.

    Raises:
        ConfigError, StoreUnavailable: the store cannot be read.
    """
    members = await read_members(redis_url, mesh)
    lines = list(await asyncio.gather(*(_line(member) for member in members)))
    return with_not_ready(lines, not_ready or {})


def with_not_ready(lines: Sequence[WorkerLine], not_ready: Mapping[str, str]) -> list[WorkerLine]:
    """The lines, and one for each worker that is not ready and has none.

    A lease outlives its process for a while: of one that does not answer the supervisor knows more.
    """
    known = {
        line.worker: replace(line, state=not_ready[line.worker])
        if line.status is None and line.worker in not_ready
        else line
        for line in lines
    }
    for name, state in not_ready.items():
        if name not in known:
            role = name.rpartition("-")[0]
            known[name] = WorkerLine(name, role, state, "-", "", 0, "", "", None)
    return sorted(known.values(), key=lambda line: line.worker)


async def _line(member: Member) -> WorkerLine:
    record = member.record
    client = Client(record.address, record.role)
    status: WorkerStatus | None = None
    try:
        status = await client.unary("Status", Empty(), WorkerStatus, timeout=_TIMEOUT_S)
    except PdmeshError:
        pass  # shown as "no answer"
    finally:
        await client.close()
    return WorkerLine(
        worker=record.worker_id,
        role=record.role,
        state=member.state,
        address=record.address,
        instance=record.instance,
        epoch=member.epoch,
        model=record.model,
        metrics=_metrics(record),
        status=status,
    )


@dataclass(frozen=True)
class Besides:
    """What there is besides the workers, as the mesh's own machine knows it."""

    routers: Sequence[str] = ()
    """host:port of each."""
    metrics: Sequence[str] = ()
    """host:port of the routers' Prometheus endpoints."""
    holders: Sequence[HolderInfo] = ()
    """Processes that hold weights."""


def as_json(mesh: str, besides: Besides, lines: list[WorkerLine]) -> str:
    """The status as one JSON object."""
    whole = {
        "mesh": mesh,
        "routers": besides.routers,
        "router_metrics": besides.metrics,
        "weights": besides.holders,
        "workers": lines,
    }
    return msgspec.json.format(msgspec.json.encode(whole)).decode()


def as_table(mesh: str, besides: Besides, lines: list[WorkerLine]) -> str:
    """The status as a table for people; where workers share experts, with their ranks."""
    where = f" at {', '.join(besides.routers)}" if besides.routers else ""
    where += f" (metrics at {', '.join(besides.metrics)})" if besides.metrics else ""
    title = f"mesh {mesh}{where}: {len(lines)} worker{'' if len(lines) == 1 else 's'}"
    rows = [_HEAD, *(_row(line) for line in lines)]
    if any(_ranks(line) for line in lines):
        places = ["rank", *(_place(_ranks(line)) for line in lines)]
        rows = [(*row[:2], place, *row[2:]) for row, place in zip(rows, places, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    problems = [
        f"{line.worker}: {problem}"
        for line in lines
        if line.status is not None
        for problem in (*_missing(line.status.ranks), *line.status.problems)
    ]
    weights = [
        f"  {holder.name}: {holder.state}, one copy for the workers on {holder.device}"
        for holder in besides.holders
    ]
    table = ["  " + row.rstrip() for row in table] if lines else []
    return "\n".join([title, *table, *weights, *problems])


def _row(line: WorkerLine) -> tuple[str, ...]:
    start, status = (line.worker, line.state, line.address), line.status
    end = line.metrics or "-"
    if status is None:
        return *start, "no answer", *("",) * 8, end
    pool = status.pool
    pages = f"{pool.free}/{pool.cached}/{pool.used + pool.reserved}/{pool.total}"
    if pool.quarantined:
        pages += f" ({pool.quarantined} quarantined)"
    unit = "tokens" if status.role == "prefill" else "seqs"
    step = f"{status.step_limit} {unit}" if status.step_limit else "-"
    counts = (",".join(status.transports) or "-", step, str(status.queued), str(status.running))
    if status.role == "prefill":
        return *start, pages, *counts, *("-",) * 4, end
    drafts = f"{status.accepted / status.drafted:.0%}" if status.drafted else "-"
    moved = f"{status.moved_in}/{status.moved_out}"
    return *start, pages, *counts, str(status.parked), str(status.preempted), moved, drafts, end


def _ranks(line: WorkerLine) -> RankStatus | None:
    return None if line.status is None else line.status.ranks


def _place(ranks: RankStatus | None) -> str:
    """A worker's place among those that share its experts, and whom it computes with."""
    if ranks is None:
        return "-"
    others = ", ".join(str(rank) for rank in ranks.members if rank != ranks.rank)
    followed = ", ".join(str(rank) for rank in ranks.heads if rank != ranks.rank)
    heads = f"; heads with {followed}" if followed else ""
    return f"{ranks.rank} of {ranks.size}, " + (f"with {others}{heads}" if others else "alone")


def _missing(ranks: RankStatus | None) -> tuple[str, ...]:
    """A sentence, if ranks of the group do not compute with this one."""
    if ranks is None:
        return ()
    absent = sorted(set(range(ranks.size)) - {*ranks.members, ranks.rank})
    if not absent:
        return ()
    named = f"rank{'' if len(absent) == 1 else 's'} {', '.join(map(str, absent))}"
    return (f"computes without {named} of its group of {ranks.size}",)


def _metrics(record: WorkerRecord) -> str:
    host = record.address.rpartition(":")[0]
    return f"{host}:{record.metrics_port}" if record.metrics_port else ""
