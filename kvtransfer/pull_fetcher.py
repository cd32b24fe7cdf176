"""The reader's side of pulls: brings leading pages of a prompt into the prefix cache.

What is fetched is found afterwards by the ordinary match. Whatever goes wrong means fewer cached
pages, and the prompt is computed; a pull never makes a request fail and never holds it up for long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvtransfer.pull_attempt import Failure, Owner, PullAttempt, PullResult
from pdmesh.kvtransfer.pull_costs import PullCosts
from pdmesh.kvtransfer.pull_reader import PageReader
from pdmesh.wire.hashes import PageFormat, PageHash
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.logs import event
from pdmesh.wire.messages import PageSource
from pdmesh.wire.pulls import LoanRequest

log = logging.getLogger(__name__)

PULL_S = 2.0
"""Longest wait for a pull, seconds."""
_SOURCES = 2
"""Owners asked for one prompt."""
_AVOID_S = 5.0
"""How long an owner that could not be reached is not asked again."""
_READING_THREADS = 16
_LAST_WORDS_S = 1.0
"""How long the end of the worker waits for loans to be given back."""


@dataclass(frozen=True)
class Pulled:
    """What one attempt came to, for whoever counts. ``seconds`` from asking to the outcome."""

    pages: int
    num_bytes: int
    seconds: float
    failure: Failure | None


@dataclass(eq=False)
class _Flight:
    """An attempt under way, and how many callers wait for it."""

    attempt: PullAttempt
    hashes: tuple[PageHash, ...]
    """That it may bring."""
    source: PageSource
    began: float
    waiting: int = 0


class PrefixFetcher:
    """Fetches prefixes for one worker. Use it on one event loop.

    Args:
        instance: of this worker; it does not read from itself.
        owner_at: how a source is asked.
        readers: the transports, best first.
        timeout_s: longest wait of a caller; 0 fetches nothing.
        clock: seconds, monotone.

    Attributes:
        costs: decides whether a pull is worth its time.
        observe: told of every attempt that is over.
        on_room: called when pages that an attempt held are free or cached.
    """

    def __init__(
        self,
        kv: KvManager,
        instance: str,
        page_format: PageFormat,
        owner_at: Callable[[PageSource], Owner],
        readers: Sequence[PageReader],
        *,
        timeout_s: float = PULL_S,
        costs: PullCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._instance = instance
        self._page_format = page_format
        self._page_bytes = page_format.page_layer_bytes * page_format.num_layers
        self._owner_at = owner_at
        self._readers = tuple(readers)
        self._timeout_s = timeout_s
        self.costs = costs or PullCosts()
        self._clock = clock
        self._executor = ThreadPoolExecutor(_READING_THREADS, "pull-read")
        self._coming: dict[PageHash, _Flight] = {}
        self._attempts: set[PullAttempt] = set()
        self._avoid: dict[str, float] = {}
        self._closed = False
        self.observe: Callable[[Pulled], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.pages = 0
        """Brought so far."""
        self.failures: Counter[Failure] = Counter()

    # ---- fetching -------------------------------------------------------------------------

    async def fetch(
        self,
        hashes: Sequence[PageHash],
        sources: Sequence[PageSource],
        *,
        within_s: float = math.inf,
    ) -> int:
        """Brings pages of a prefix into the cache, from owners that claim more than is cached.

        Where another fetch is bringing the same page, it is waited for instead.

        Args:
            hashes: of the prompt's full pages.
            sources: hints, best first.
            within_s: seconds that the caller has; the wait ends then, or after ``timeout_s``.

        Returns:
            How many more leading pages are cached now; 0 whatever went wrong.
        """
        until = self._clock() + min(within_s, self._timeout_s)
        wanted = tuple(hashes[: self._kv.num_pages])
        before = have = self._kv.match(wanted)
        tried: set[str] = set()
        while have < len(wanted) and self._clock() < until and not self._closed:
            flight = self._coming.get(wanted[have])
            mine = flight is None
            if flight is None:
                flight = self._start(wanted, have, sources, tried)
            if flight is None:
                break
            result = await self._wait(flight, until)
            if result is None or (result.failure is not None and not mine):
                break
            have = self._kv.match(wanted)
        return max(0, self._kv.match(wanted) - before)

    async def _wait(self, flight: _Flight, until: float) -> PullResult | None:
        """The outcome; None if it did not come in time."""
        outcome = flight.attempt.outcome
        flight.waiting += 1
        late = False
        try:
            late = not (await asyncio.wait({outcome}, timeout=max(0.0, until - self._clock())))[0]
        finally:
            flight.waiting -= 1
            if not (flight.waiting or outcome.done()):
                if late:
                    flight.attempt.abort("it took too long", "timeout")
                else:
                    flight.attempt.abort("nobody waits for it any more", "cancelled")
        return outcome.result() if outcome.done() else None

    def _start(
        self,
        wanted: tuple[PageHash, ...],
        have: int,
        sources: Sequence[PageSource],
        tried: set[str],
    ) -> _Flight | None:
        """Asks the best source that is worth it; None if there is none, or no room."""
        source = self._choose(have, len(wanted), sources, tried)
        if source is None:
            return None
        tried.add(source.instance)
        reservation = self._kv.reserve(wanted, len(wanted), len(wanted))
        if reservation is None:
            self._count(Pulled(0, 0, 0.0, "no_room"))
            return None
        if not reservation.remaining:
            reservation.release()
            return None
        request = LoanRequest(
            loan_id=new_request_id(),
            page_format=self._page_format,
            hashes=wanted,
            first_page=reservation.matched,
        )
        attempt = PullAttempt(
            self._owner_at(source),
            request,
            reservation,
            self._readers,
            self._executor,
            self._freed,
        )
        flight = _Flight(attempt, wanted[reservation.matched :], source, self._clock())
        self._take_off(flight)
        return flight

    def _choose(
        self, have: int, wanted: int, sources: Sequence[PageSource], tried: set[str]
    ) -> PageSource | None:
        if len(tried) >= _SOURCES:
            return None
        now = self._clock()
        better = [
            source
            for source in sources
            if source.pages > have
            and source.instance not in tried
            and source.instance != self._instance
            and self._avoid.get(source.instance, now) <= now
        ]
        if not better:
            return None
        best = max(better, key=lambda source: source.pages)
        missing = min(best.pages, wanted) - have
        size = self._page_format.page_size
        return best if self.costs.worth(missing, self._page_bytes, size, now) else None

    # ---- attempts -------------------------------------------------------------------------

    def _take_off(self, flight: _Flight) -> None:
        self._attempts.add(flight.attempt)
        self._coming.update(dict.fromkeys(flight.hashes, flight))
        flight.attempt.on_outcome = lambda result: self._land(flight, result)
        flight.attempt.start()

    def _land(self, flight: _Flight, result: PullResult) -> None:
        for page_hash in flight.hashes:
            if self._coming.get(page_hash) is flight:
                del self._coming[page_hash]
        now, source = self._clock(), flight.source
        num_bytes = result.pages * self._page_bytes
        if result.failure is None:
            self.costs = self.costs.after_read(num_bytes, result.read_s, now)
        elif result.failure == "lost":
            self._avoid = {one: end for one, end in self._avoid.items() if end > now}
            self._avoid[source.instance] = now + _AVOID_S
        self._count(Pulled(result.pages, num_bytes, now - flight.began, result.failure))
        event(
            log,
            "pulled" if result.failure is None else "pull failed",
            owner=source.instance,
            pages=result.pages,
            ms=round((now - flight.began) * 1e3, 1),
            reason=result.reason,
        )

    def _count(self, pulled: Pulled) -> None:
        self.pages += pulled.pages
        if pulled.failure is not None:
            self.failures[pulled.failure] += 1
        if self.observe is not None:
            self.observe(pulled)

    def _freed(self) -> None:
        self._attempts = {one for one in self._attempts if not one.resting}
        if self.on_room is not None:
            self.on_room()

    def computed(self, tokens: int, seconds: float) -> None:
        """Tells of a step that computed prompt positions."""
        self.costs = self.costs.after_step(tokens, seconds)

    # ---- end ------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Attempts that may still touch pages of this worker."""
        return sum(not attempt.ended.is_set() for attempt in self._attempts)

    async def close(self) -> None:
        """Gives up what is under way and waits until no read is. No more is fetched. Idempotent."""
        self._closed = True
        for attempt in list(self._attempts):
            attempt.abort("this worker is ending", "cancelled")
        for attempt in list(self._attempts):
            await attempt.rest(_LAST_WORDS_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for reader in self._readers:
            reader.close()
