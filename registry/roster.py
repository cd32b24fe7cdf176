"""Who is registered, as the store says it: values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from pdmesh.registry.layout import Layout
from pdmesh.wire.codec import decode
from pdmesh.wire.errors import Incompatible
from pdmesh.wire.messages import PROTOCOL_VERSION, WorkerRecord

WorkerState = Literal["joining", "ready", "draining"]


class Listed(NamedTuple):
    """A worker on the roster. Its pages are published under ``slot`` and ``epoch``."""

    epoch: int
    state: WorkerState
    slot: int = 0


@dataclass(frozen=True)
class Roster:
    """Who holds a lease, at one moment.

    ``seq`` is the last event that it includes, ``epoch`` the last one given. ``dead`` are slots
    (with the last epoch) whose worker left and whose records are not fenced yet.
    """

    incarnation: bytes
    seq: int
    epoch: int
    members: dict[str, Listed]
    layout: Layout = field(default_factory=lambda: Layout(1))
    dead: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One worker as the store knows it."""

    record: WorkerRecord
    epoch: int
    state: WorkerState
    slot: int = 0


def read_roster(answer: list[Any]) -> Roster:
    """Of the answer of the function ``members``."""
    inc, seq, epoch, layout, flat, dead = answer
    members: dict[str, Listed] = {}
    for worker, value in zip(flat[::2], flat[1::2], strict=True):
        number, state, slot = value.decode().split(":")
        members[worker.decode()] = Listed(int(number), cast("WorkerState", state), int(slot))
    return Roster(
        inc,
        int(seq),
        int(epoch),
        members,
        Layout.named(layout),
        {int(slot): int(last) for slot, last in zip(dead[::2], dead[1::2], strict=True)},
    )


def read_record(data: bytes) -> WorkerRecord:
    """A record from the store. Raises InvalidRequest or Incompatible if it is of another version"""
    record = decode(data, WorkerRecord)
    if record.protocol != PROTOCOL_VERSION:
        raise Incompatible(
            f"worker {record.worker_id} speaks protocol {record.protocol}, this process speaks "
            f"{PROTOCOL_VERSION}"
        )
    return record
