"""What of a batch goes together: layers of a prompt in one write, what waits for the same alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from pdmesh.kvtransfer.transport import Write


class Said(Protocol):
    """A message of a transfer."""

    @property
    def lease_id(self) -> str: ...

    @property
    def generation(self) -> int: ...


T = TypeVar("T")
M = TypeVar("M", bound=Said)
MOST_UNITS = 16384
"""Of a block of several writes: its notice fits a message also if each unit has a checksum."""


def joined(messages: Sequence[T]) -> list[T | Write]:
    """The messages, in order, with writes made one that follow each other in it and have layer
    after layer of the same pages of a device's memory.

    The one write waits for whatever any of its parts waits for.
    """
    groups: list[list[T]] = []
    units = 0
    for message in messages:
        more = message.pages * message.layers if isinstance(message, Write) else 0
        if groups and units + more <= MOST_UNITS and _goes_on(groups[-1][-1], message):
            groups[-1].append(message)
            units += more
        else:
            groups.append([message])
            units = more
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def parted(messages: Sequence[T]) -> list[list[T]]:
    """The messages, in order, cut before each write that waits for what none before it waits for.

    So what is copied for a step that is over, and its end, is not announced with what a step still
    computes that was begun meanwhile.
    """
    parts: list[list[T]] = []
    waiting: tuple[int, ...] = ()
    for message in messages:
        device = message.device if isinstance(message, Write) else None
        ready = () if device is None else tuple(map(id, device.ready))
        if not parts or (ready and ready != waiting):
            parts.append([])
            waiting = ready
        parts[-1].append(message)
    return parts


def freed(messages: Sequence[M]) -> tuple[list[M], list[M]]:
    """What is said of transfers none of whose writes are before it, and the rest; each in order.

    So an end whose writes went with an earlier batch does not wait for what another prompt still
    computes.
    """
    free: list[M] = []
    rest: list[M] = []
    written: set[tuple[str, int]] = set()
    for message in messages:
        transfer = message.lease_id, message.generation
        if isinstance(message, Write):
            written.add(transfer)
        (rest if transfer in written else free).append(message)
    return free, rest


def _goes_on(write: object, later: object) -> bool:
    if not isinstance(write, Write) or not isinstance(later, Write):
        return False
    mine, other = write.device, later.device
    if mine is None or other is None:
        return False
    lease = write.lease_id, write.generation
    block = write.page, write.pages, write.layer + write.layers
    return (
        (later.lease_id, later.generation) == lease
        and (later.page, later.pages, later.layer) == block
        and other.tensor is mine.tensor
        and other.layer == mine.layer + mine.layers
        and other.page_ids == mine.page_ids
    )


def _one(group: Sequence[object]) -> Write:
    writes = [write for write in group if isinstance(write, Write)]
    parts = [write.device for write in writes if write.device is not None]
    layers = sum(write.layers for write in writes)
    ready = tuple(event for part in parts for event in part.ready)
    device = replace(parts[0], layers=layers, ready=ready)
    return replace(writes[0], layers=layers, device=device)
