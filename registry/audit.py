"""What the store holds of a mesh, and where it differs from what the workers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdmesh.registry.feed import Position, read_position
from pdmesh.registry.keeping import bury, sweep
from pdmesh.registry.layout import Layout, Row
from pdmesh.registry.roster import Member, Roster
from pdmesh.registry.store import PageCall, Store, StoreUnavailable
from pdmesh.wire.registry import IndexDigests


@dataclass(frozen=True)
class Contents:
    """A mesh's store at about one moment.

    ``parts`` holds slot -> row for each partition.
    """

    roster: Roster
    members: tuple[Member, ...]
    parts: tuple[Mapping[int, Row], ...]
    buckets: int

    @property
    def layout(self) -> Layout:
        """How the pages are spread."""
        return self.roster.layout

    def pages_of(self, slot: int) -> int:
        """Live records of a slot."""
        return sum(rows[slot].pages for rows in self.parts if slot in rows)

    def strays(self) -> dict[int, int]:
        """Slots that no registered worker has -> their live records."""
        held = {member.slot for member in self.members}
        slots = {slot for rows in self.parts for slot in rows} - held
        return {slot: pages for slot in sorted(slots) if (pages := self.pages_of(slot))}


async def read_contents(store: Store) -> Contents:
    """Reads rosters and rows, not the records.

    Raises:
        StoreUnavailable: a part of it does not answer.
    """
    roster = await store.roster()
    found = [await store.member(name) for name in sorted(roster.members)]
    positions = await read_positions(store, roster.layout)
    return Contents(
        roster,
        tuple(member for member in found if member is not None),
        tuple(position.rows for position in positions),
        sum(len(roster.layout.buckets(position.bitmap)) for position in positions),
    )


async def read_positions(store: Store, layout: Layout) -> list[Position]:
    """Of every partition. Raises StoreUnavailable if one does not answer."""
    calls = [PageCall("position", number) for number in range(layout.partitions)]
    positions: list[Position] = []
    for answer in await store.many(calls):
        if isinstance(answer, StoreUnavailable):
            raise answer
        positions.append(read_position(answer))
    return positions


def differences(
    contents: Contents, member: Member, own: IndexDigests
) -> list[tuple[int | None, str]]:
    """(partition, what differs) between a worker's own digests and the store's rows of it.

    The partition is None where all of them are concerned.
    """
    if own.epoch != member.epoch or own.slot != member.slot:
        return [(None, f"it publishes as epoch {own.epoch}, it is registered as {member.epoch}")]
    if len(own.counts) != len(contents.parts):
        return [(None, f"it knows {len(own.counts)} partitions, there are {len(contents.parts)}")]
    found: list[tuple[int | None, str]] = []
    for number, (rows, count, xor) in enumerate(
        zip(contents.parts, own.counts, own.xors, strict=True)
    ):
        row = rows.get(member.slot)
        if row is None or row.epoch != member.epoch:
            found.append((number, "the store has no records of this epoch"))
        elif row.pages != count:
            found.append((number, f"{count} pages at the worker, {row.pages} in the store"))
        elif row.xor != xor:
            found.append((number, f"{count} pages in both, but not the same ones"))
    return found


async def clean(store: Store, contents: Contents) -> int:
    """Fences whoever is not registered, and removes all dead records; returns how many.

    Raises:
        StoreUnavailable: a part of the store does not answer.
    """
    await bury(store, contents.layout, contents.roster.dead)
    strays = contents.strays()
    calls = [
        PageCall("fence", number, (), (slot, rows[slot].epoch + 1))
        for number, rows in enumerate(contents.parts)
        for slot in strays
        if slot in rows
    ]
    _raise_first(await store.many(calls))
    return await sweep(store, contents.layout)


def _raise_first(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, StoreUnavailable):
            raise answer
