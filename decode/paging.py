"""Pages of running sequences: promises that grow, and sequences that give way to others.

A sequence that gives way is copied to host memory, waits first in line for room, and goes on bit
for bit: from pages that still hold what they held, and from its copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.park import Parked, ParkingLot
from pdmesh.decode.preempt import choose_victims
from pdmesh.decode.queue import Rank
from pdmesh.decode.room import Room, Waiter
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.wire.errors import Preempted
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Aside:
    """A sequence whose pages are set aside, and its place in the line."""

    parked: Parked
    waiter: Waiter


class Paging:
    """Gives the sequences of a step their pages. Call it on the event loop, between steps.

    Args:
        compute: the thread that steps run on.
        end: ends a sequence for good, with the error that its stream gets.
        wake: makes the loop look again.
    """

    def __init__(
        self,
        kv: KvManager,
        store: LatentStore,
        limits: DecodeLimits,
        room: Room,
        scheduler: DecodeScheduler[DecodeSequence],
        compute: Executor,
        end: Callable[[DecodeSequence, Preempted], None],
        wake: Callable[[], None],
    ) -> None:
        self._kv = kv
        self._limits = limits
        self._room = room
        self._scheduler = scheduler
        self._compute = compute
        self._end = end
        self._wake = wake
        self._lot = ParkingLot(store, limits.park_bytes)
        self._aside: dict[DecodeSequence, _Aside] = {}
        self._returning: list[DecodeSequence] = []
        self._leaving: set[DecodeSequence] = set()
        self.preempted = 0

    @property
    def parked(self) -> int:
        """Sequences whose pages are set aside now."""
        return len(self._aside)

    @property
    def parked_bytes(self) -> int:
        """Host memory in use."""
        return self._lot.used_bytes

    def is_aside(self, sequence: DecodeSequence) -> bool:
        """Whether its pages are set aside, or about to be."""
        return sequence in self._aside or sequence in self._leaving

    # ---- growth ---------------------------------------------------------------------------

    async def next_batch(self) -> list[DecodeSequence]:
        """The sequences of the next step, their pages in place.

        One that has to wait for room makes its place in the batch free: a higher-ranked one that
        waited for it may hold the very pages.
        """
        stalled: set[DecodeSequence] = set()
        while True:
            batch = self._scheduler.next_batch(stalled)
            ready = await self._prepare(batch)
            if len(ready) == len(batch):
                return batch
            stalled.update(s for s in batch if s not in ready)
            for sequence in stalled:
                self._scheduler.put_back(sequence)

    async def _prepare(self, batch: Sequence[DecodeSequence]) -> set[DecodeSequence]:
        """Makes the pages of the next step physical; the higher-ranked sequences come first.

        Returns:
            Those of ``batch`` that can run. The others wait for room, or had to give way.
        """
        ready: set[DecodeSequence] = set()
        size = self._limits.page_format.page_size
        for sequence in sorted(batch, key=_rank):
            if sequence in self._aside or sequence.cancelled:
                continue
            there = sequence.pages_needed(size) <= sequence.entry.reservation.num_pages
            if there or await self._provide(sequence):
                ready.add(sequence)
        return ready

    async def _provide(self, sequence: DecodeSequence) -> bool:
        size = self._limits.page_format.page_size
        reservation = sequence.entry.reservation
        needed = sequence.pages_needed(size, 0) - reservation.num_pages
        short = needed - reservation.remaining
        if short > 0 and not (
            self._extend(sequence, short) or await self._take_from_others(sequence, short)
        ):
            return False
        wanted = sequence.pages_needed(size) - reservation.num_pages
        reservation.grow(max(0, min(wanted, reservation.remaining)))
        return True

    def _extend(self, sequence: DecodeSequence, short: int) -> bool:
        """Promises as much as a sequence is promised ahead; ``short`` pages if that is too much."""
        reservation = sequence.entry.reservation
        ahead = self._pages_ahead(sequence) - reservation.num_pages - reservation.remaining
        return (ahead > short and reservation.extend(ahead)) or reservation.extend(short)

    def _pages_ahead(self, sequence: DecodeSequence) -> int:
        known = sequence.computed + 1
        return self._limits.pages(known + self._limits.ahead(sequence.room))

    def trim(self, sequence: DecodeSequence) -> None:
        """Gives back what is promised beyond that, to one that came with more."""
        reservation = sequence.entry.reservation
        over = reservation.num_pages + reservation.remaining - self._pages_ahead(sequence)
        reservation.shrink(max(0, min(over, reservation.remaining)))

    # ---- giving way -----------------------------------------------------------------------

    async def _take_from_others(self, sequence: DecodeSequence, short: int) -> bool:
        others = [
            s
            for s in self._scheduler.members()
            if s is not sequence and not s.cancelled and not s.pinned
        ]
        victims = choose_victims(
            short - self._kv.available, _rank(sequence), others, _rank, self._releasable
        )
        if victims is None:
            return False
        claims = [self._claim(victim) for victim in victims]
        filled = [parked for parked in claims if parked is not None]
        loop = asyncio.get_running_loop()
        self._leaving.update(victims)
        await loop.run_in_executor(self._compute, self._lot.fill, filled)
        self._leaving.clear()
        for victim in victims:
            self._scheduler.remove(victim)
            victim.entry.reservation.release()
        done = self._extend(sequence, short)
        for victim, parked in zip(victims, claims, strict=True):
            self._set_aside(victim, parked)
        self._room.serve()
        return done

    def _releasable(self, victims: Sequence[DecodeSequence]) -> int:
        return self._kv.releasable([victim.entry.reservation for victim in victims])

    def _claim(self, victim: DecodeSequence) -> Parked | None:
        table = victim.entry.reservation.page_table
        pages = table[: self._limits.pages(victim.computed)]
        return self._lot.claim(pages, self._kv.stamps(pages[: len(victim.hashes)]))

    def _set_aside(self, victim: DecodeSequence, parked: Parked | None) -> None:
        self.preempted += 1
        request = victim.request.request_id
        event(
            log, "preempted", request=request, lease=victim.entry.lease_id, kept=parked is not None
        )
        if parked is None:
            self._end(victim, Preempted("its pages were needed, and no memory was left to keep it"))
            return
        place = victim.entry.rank.returning()
        waiter = Waiter(place, lambda: self._try_return(victim))
        self._aside[victim] = _Aside(parked, waiter)
        self._room.add(waiter)

    # ---- coming back ----------------------------------------------------------------------

    def _try_return(self, sequence: DecodeSequence) -> bool:
        if sequence.cancelled:
            return False  # ``drop_cancelled`` takes it out of the line
        stamps = self._aside[sequence].parked.stamps
        total = self._pages_ahead(sequence)
        count = self._kv.unchanged(sequence.hashes, stamps)
        reservation = self._kv.reserve(sequence.hashes[:count], count, total)
        if reservation is None:
            return False
        sequence.entry.reservation = reservation
        self._returning.append(sequence)
        self._wake()
        return True

    async def bring_back(self) -> None:
        """Fills the pages of sequences that have been given room, and lets them run again."""
        while self._returning:
            sequence = self._returning.pop(0)
            parked = self._aside[sequence].parked
            reservation = sequence.entry.reservation
            first = reservation.matched
            pages = reservation.grow(len(parked.pages) - first)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compute, self._lot.restore, parked, first, pages)
            reservation.publish(first, sequence.hashes[first:])
            self._forget(sequence)
            self._scheduler.add(sequence)
            request, lease = sequence.request.request_id, sequence.entry.lease_id
            event(log, "resumed", request=request, lease=lease, pages=len(pages), kept_pages=first)

    def drop_cancelled(self) -> list[DecodeSequence]:
        """Forgets and returns the sequences that were ended while their pages were set aside."""
        gone = [s for s in self._aside if s.cancelled]
        for sequence in gone:
            waiter = self._aside[sequence].waiter
            self._forget(sequence)
            if sequence in self._returning:
                self._returning.remove(sequence)
            self._room.remove(waiter)
        return gone

    def _forget(self, sequence: DecodeSequence) -> None:
        self._lot.drop(self._aside.pop(sequence).parked)


def _rank(sequence: DecodeSequence) -> Rank:
    return sequence.entry.rank
