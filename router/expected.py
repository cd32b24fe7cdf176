"""Pages that workers are about to own: what this router has sent them and no event tells yet.

Requests of a burst over a new prefix so go where the first one went, although its pages are not
computed. This is for choosing workers only: who really owns a page, the registry says. Kept apart
from it and by instance, so that it outlives whatever happens to the index of a partition or to a
worker's records, and ends with the process that was to own the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pdmesh.registry.index import PrefixIndex
from pdmesh.router.policy import Route
from pdmesh.router.prompt import PromptHashes
from pdmesh.wire.hashes import PageHash
from pdmesh.wire.messages import WorkerRecord

GRACE_S = 2.0
"""From the moment when a worker has the pages to the one when its event must have come."""
MOST_S = 30.0
"""The longest time in which a prompt counts as under way."""
_UNKNOWN_S = 10.0
"""The same where the policy does not say how long the prompt should take."""
_SWEPT = 1 << 20
_SLOWER = 3.0
"""It may take so many times as long as expected."""


@dataclass(eq=False)
class Expected:
    """One expectation: a worker is about to own the leading pages of a prompt."""

    slot: int
    hashes: Sequence[PageHash]
    until: float
    over: bool = False


class Expectations:
    """Which instances are about to own which pages. Not thread-safe; no I/O, no clock.

    Each expectation begins at a prompt's first page, so what is expected of an instance is
    prefix-closed, as what it owns is. Where several expect the same page, it stays until the last
    of them is over.
    """

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._slots: dict[str, int] = {}
        self._instances: dict[int, str] = {}
        self._counts: dict[int, dict[PageHash, int]] = {}
        """Slot -> page -> expectations that hold it."""
        self._live = 0
        self._epochs: dict[int, int] = {}
        self._due: list[tuple[float, int, Expected]] = []
        self._number = 0
        """Rises with everything that begins: entries of ``_due`` and epochs of slots."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return self._live

    def expect(self, instance: str, hashes: Sequence[PageHash], until: float) -> Expected:
        """An instance is about to own these pages of a prompt, all from the first on.

        Args:
            until: when this ends by itself, in seconds of the clock of ``match``'s ``now``.
        """
        slot = self._slot(instance)
        expected = Expected(slot, hashes, until, over=not hashes)
        if expected.over:
            return expected
        counts = self._counts[slot]
        new = [page for page in hashes if page not in counts]
        for page in hashes:
            counts[page] = counts.get(page, 0) + 1
        self._index.apply(slot, self._epochs[slot], True, new)
        self._live += 1
        self._push(expected)
        return expected

    def ends_at(self, expected: Expected, until: float) -> None:
        """Sets another time at which an expectation ends by itself."""
        expected.until = until
        self._push(expected)

    def end(self, expected: Expected) -> None:
        """Ends an expectation now; once is enough."""
        if expected.over:
            return
        expected.over = True
        slot = expected.slot
        counts = self._counts[slot]
        gone = []
        for page in expected.hashes:
            count = counts[page] - 1
            if count:
                counts[page] = count
            else:
                del counts[page]
                gone.append(page)
        self._index.apply(slot, self._epochs[slot], False, gone)
        self._live -= 1

    def match(self, hashes: Sequence[PageHash], now: float) -> dict[str, int]:
        """Instance -> how many leading pages of a prompt it is about to own."""
        while self._due and self._due[0][0] <= now:
            _, _, expected = heappop(self._due)
            if expected.until <= now:
                self.end(expected)
        if not self._live:
            return {}
        return {self._instances[slot]: n for slot, n in self._index.match(hashes).items()}

    def prune(self, alive: Collection[str]) -> None:
        """Forgets instances that are gone and of which nothing is expected any more."""
        for instance, slot in list(self._slots.items()):
            if instance not in alive and not self._counts[slot]:
                del self._slots[instance], self._instances[slot], self._counts[slot]
                self._index.drop(slot)
                self._free.append(slot)
        while not self._index.sweep(_SWEPT):
            pass

    def _slot(self, instance: str) -> int:
        slot = self._slots.get(instance)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[instance], self._instances[slot] = slot, instance
            self._counts[slot] = {}
            self._number += 1
            self._epochs[slot] = self._number
        return slot

    def _push(self, expected: Expected) -> None:
        if not expected.over:
            self._number += 1
            heappush(self._due, (expected.until, self._number, expected))


class Arrivals:
    """What the two workers of one attempt are about to own.

    The prefill worker, from the choice on; the decode worker once the prompt is computed, since
    before the pages have come nobody else can use them there.

    Args:
        hashes: of the attempt's prompt.
        clock: seconds, monotone.
    """

    def __init__(
        self,
        expectations: Expectations,
        route: Route,
        hashes: PromptHashes,
        clock: Callable[[], float],
    ) -> None:
        self._expectations = expectations
        self._route = route
        self._hashes = hashes
        self._clock = clock
        self._owned = {s.candidate.record.instance: s.candidate.owned_pages for s in route.chosen}
        self._prefill = self._expect(route.prefill, under_way_s(route))
        self._decode: Expected | None = None

    def computed(self) -> None:
        """The prefill worker has the pages, and their hand-off is under way."""
        if self._prefill is not None:
            self._expectations.ends_at(self._prefill, self._clock() + GRACE_S)
            self._prefill = None
        self._decode = self._expect(self._route.decode, GRACE_S)

    def failed(self) -> None:
        """The attempt came to nothing: what was still to come does not come."""
        for expected in (self._prefill, self._decode):
            if expected is not None:
                self._expectations.end(expected)

    def _expect(self, worker: WorkerRecord, seconds: float) -> Expected | None:
        """None where the worker has all of the pages."""
        pages = self._hashes.for_format(worker.page_format)
        if self._owned.get(worker.instance, 0) >= len(pages):
            return None
        return self._expectations.expect(worker.instance, pages, self._clock() + seconds)


def under_way_s(route: Route) -> float:
    """Seconds in which a prompt on this route counts as under way."""
    terms = route.chosen[0].terms if route.chosen else {}
    if "compute" not in terms:
        return _UNKNOWN_S
    expected_ms = sum(terms.get(name, 0.0) for name in ("queue", "compute", "fetch"))
    return min(GRACE_S + _SLOWER * expected_ms / 1e3, MOST_S)
