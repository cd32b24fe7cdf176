"""What the router knows of the mesh: registered workers, their polled status, its own bookings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from pdmesh.registry.store import end_task
from pdmesh.router.booking import Booking
from pdmesh.router.clients import WorkerClients
from pdmesh.router.expected import Arrivals, Expectations
from pdmesh.router.metrics import Metrics
from pdmesh.router.pairing import Pairing
from pdmesh.router.policy import Candidate, Route, Snapshot
from pdmesh.router.polled import Polled, seen_as
from pdmesh.router.prompt import PromptHashes
from pdmesh.wire.errors import DeadlineExceeded, PdmeshError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.messages import (
    PROTOCOL_VERSION,
    PageSource,
    Role,
    WorkerRecord,
    WorkerStatus,
)

log = logging.getLogger(__name__)

MOST_SOURCES = 3
"""Workers named as sources of a prompt's pages."""


class Registry(Protocol):
    """The part of ``registry.client.RegistryView`` that the router needs."""

    def workers(self) -> list[WorkerRecord]: ...

    def draining(self) -> list[WorkerRecord]: ...

    @property
    def warm(self) -> bool: ...

    def owned_prefixes(self, hashes: Sequence[bytes]) -> Mapping[str, int]: ...

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]: ...

    def mark_lost(self, instance: str) -> None: ...


class MeshView:
    """Snapshots for the policy. ``start`` polls the workers in the background.

    Args:
        registry: membership and page ownership, answered without I/O.
        clients: channels to the workers.
        model: name of the model; workers of other models are left out.
        metrics: gets the in-flight gauges.
        clock: seconds, monotone.
    """

    def __init__(
        self,
        registry: Registry,
        clients: WorkerClients,
        model: str,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._clients = clients
        self._model = model
        self._metrics = metrics
        self._polled: dict[str, Polled] = {}
        self._seen: dict[str, Candidate] = {}
        """What a prompt sees of which a worker owns nothing; left out where that has changed."""
        self._unreachable: set[str] = set()
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._probes: dict[str, asyncio.Task[bool]] = {}
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._ignored: set[str] = set()
        self._clock = clock
        self._expected = Expectations()
        self._pairing = Pairing()
        self._task: asyncio.Task[None] | None = None

    # ---- what the policy sees -------------------------------------------------------------

    def ready(self, role: Role) -> list[WorkerRecord]:
        """Workers of one role that can take a request now."""
        return [r for r in self._registry.workers() if r.role == role and self._usable(r)]

    def draining(self, role: Role) -> list[WorkerRecord]:
        """Workers of one role that take nothing new but still serve what they have."""
        said = [r for r in self._registry.workers() if self._says_draining(r)]
        listed = [*self._registry.draining(), *said]
        return [r for r in listed if r.role == role and self._speaks(r)]

    def known(self, instance: str) -> bool:
        """Whether an instance is registered, and not known to be lost."""
        return any(record.instance == instance for record in self._registered())

    def candidates(self, role: Role, hashes: PromptHashes) -> tuple[Candidate, ...]:
        """The ready workers of one role as seen by a prompt with these page hashes."""
        return tuple(self._seen_by(self.ready(role), hashes))

    async def look_up(self, hashes: PromptHashes) -> None:
        """Asks the store who has the prompt's pages, if the index here is behind; quick or not at
        all, and never an error."""
        if self._registry.warm:
            return
        formats = dict.fromkeys(r.page_format for r in self._registered() if self._speaks(r))
        for page_format in formats:
            found = await self._registry.lookup(hashes.for_format(page_format))
            hashes.looked_up.update(found)

    def snapshot(self, hashes: PromptHashes) -> Snapshot:
        """The ready workers as seen by a prompt with these page hashes."""
        ready = [r for r in self._registry.workers() if self._usable(r)]
        seen = self._seen_by(ready, hashes)
        prefill = tuple(c for c in seen if c.record.role == "prefill")
        decode = tuple(c for c in seen if c.record.role == "decode")
        first = hashes.for_format(prefill[0].record.page_format)[:1] if prefill else ()
        return Snapshot(prefill=prefill, decode=decode, anchor=first[0] if first else b"")

    def sources(
        self, hashes: PromptHashes, chosen: WorkerRecord, besides: Sequence[WorkerRecord] = ()
    ) -> tuple[PageSource, ...]:
        """Who holds more leading pages of a prompt than the chosen worker: hints, best first.

        Of those who have said so: what a worker is only about to own cannot be read there.
        ``besides`` are workers that need not be named.
        """
        owned = self._registry.owned_prefixes(hashes.for_format(chosen.page_format))
        here = owned.get(chosen.worker_id, 0)
        if not any(pages > here for pages in owned.values()):
            return ()
        skip = {chosen.instance, *(record.instance for record in besides)}
        found = [
            PageSource(instance=r.instance, role=r.role, address=r.address, pages=pages)
            for r in self._registered()
            if (pages := owned.get(r.worker_id, 0)) > here
            and r.instance not in skip
            and r.page_format == chosen.page_format
            and self._speaks(r)
        ]
        return tuple(sorted(found, key=lambda s: (-s.pages, s.instance))[:MOST_SOURCES])

    def context_limit(self, configured: int) -> int:
        """Most tokens of prompt and answer that every ready worker takes."""
        records = self.ready("prefill") + self.ready("decode")
        return min([configured, *(record.max_context for record in records)])

    def _seen_by(self, records: Sequence[WorkerRecord], hashes: PromptHashes) -> list[Candidate]:
        page_format: PageFormat | None = None
        owned: Mapping[str, int] = {}
        expected: Mapping[str, int] = {}
        candidates = []
        for record in records:
            if record.page_format != page_format:  # nearly always that of the record before
                page_format = record.page_format
                pages = hashes.for_format(page_format)
                owned = self._registry.owned_prefixes(pages)
                expected = self._expected.match(pages, self._clock())
            name = record.worker_id
            here = max(owned.get(name, 0), hashes.looked_up.get(name, 0))
            candidates.append(self._candidate(record, here, expected.get(record.instance, 0)))
        return candidates

    def _candidate(self, record: WorkerRecord, owned: int, expected: int) -> Candidate:
        """From what was known at the last look, where nothing has changed."""
        known = self._seen.get(record.instance)
        if known is None or known.record is not record:
            known = self._seen[record.instance] = seen_as(
                record,
                self._polled.get(record.instance),
                own_requests=self.in_flight(record.instance),
                own_tokens=self._tokens.get(record.instance, 0),
            )
        if not (owned or expected):
            return known
        return replace(known, owned_pages=owned, expected_pages=expected)

    def _registered(self) -> list[WorkerRecord]:
        return [*self._registry.workers(), *self._registry.draining()]

    def _usable(self, record: WorkerRecord) -> bool:
        polled = self._polled.get(record.instance)
        return self._speaks(record) and (polled is None or polled.status.state == "ready")

    def _says_draining(self, record: WorkerRecord) -> bool:
        polled = self._polled.get(record.instance)
        return polled is not None and polled.status.state == "draining"

    def _speaks(self, record: WorkerRecord) -> bool:
        """Whether it can be talked to."""
        if record.protocol != PROTOCOL_VERSION or record.model != self._model:
            self._ignore(record)
            return False
        return record.instance not in self._unreachable

    def _ignore(self, record: WorkerRecord) -> None:
        if record.instance not in self._ignored:
            self._ignored.add(record.instance)
            event(
                log,
                "worker_ignored",
                logging.WARNING,
                worker=record.worker_id,
                model=record.model,
                protocol=record.protocol,
            )

    # ---- what requests report -------------------------------------------------------------

    @contextmanager
    def book(self, route: Route, hashes: PromptHashes, answers: int = 1) -> Iterator[Booking]:
        """Counts a request, and for later choices its pages, at the two workers of its route."""
        arrivals = Arrivals(self._expected, route, hashes, self._clock)
        booking = Booking(self, route, answers, arrivals)
        try:
            yield booking
        except BaseException:
            booking.failed()
            raise
        finally:
            booking.give_back()

    def add(self, instance: str, role: Role, requests: int, tokens: int) -> None:
        """Changes this router's load at a worker; called by Booking."""
        for counts, change in ((self._requests, requests), (self._tokens, tokens)):
            counts[instance] = counts.get(instance, 0) + change
            if counts[instance] == 0:
                del counts[instance]
        if requests > 0:
            self._sent[instance] = self.sent(instance) + requests
        self._seen.pop(instance, None)
        self._metrics.in_flight.labels(role).inc(requests)

    def in_flight(self, instance: str) -> int:
        """Requests of this router at a worker."""
        return self._requests.get(instance, 0)

    def sent(self, instance: str) -> int:
        """Requests that this router has sent to a worker so far."""
        return self._sent.get(instance, 0)

    def statuses(self) -> list[WorkerStatus]:
        """What workers said last."""
        return [polled.status for polled in self._polled.values()]

    def polled(self) -> int:
        """Instances that have answered a poll."""
        return len(self._polled)

    def note_poll(self, instance: str, polled: Polled) -> None:
        """An instance has answered a poll."""
        self._polled[instance] = polled
        self._seen.pop(instance, None)

    def mark_lost(self, instance: str) -> None:
        """Stops routing to an instance at once."""
        self._registry.mark_lost(instance)

    async def alive(self, record: WorkerRecord, within: float) -> bool:
        """Whether a worker says within so many seconds that it is there. Askers share a call."""
        probe = self._probes.get(record.instance)
        if probe is None:
            probe = asyncio.create_task(self._probe(record, within))
            self._probes[record.instance] = probe
        return await asyncio.shield(probe)

    async def _probe(self, record: WorkerRecord, within: float) -> bool:
        try:
            status = await self._clients.status(record, within)
        except PdmeshError:
            return False
        finally:
            del self._probes[record.instance]
        return status.instance == record.instance

    # ---- polling --------------------------------------------------------------------------

    async def start(self, interval: float, changed: Callable[[], Awaitable[None]]) -> None:
        """Polls all workers every ``interval`` seconds; ``changed`` is awaited after each round."""
        self._task = asyncio.create_task(self._poll_forever(interval, changed))

    async def close(self) -> None:
        """Stops polling."""
        if self._task is not None:  # before what it may still begin
            await end_task(self._task)
        tasks = [*self._polling.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll_forever(self, interval: float, changed: Callable[[], Awaitable[None]]) -> None:
        while True:
            records = {record.instance: record for record in self._registered()}
            self._pairing.look(records.values())
            for instance, record in records.items():
                if instance not in self._polling:
                    self._polling[instance] = asyncio.create_task(self._poll(record))
            for known in (self._polled, self._seen, self._sent, self._unreachable, self._ignored):
                for instance in set(known) - records.keys():
                    self._forget(instance)
            self._expected.prune(records.keys())
            await self._clients.prune(records.keys() | self._polling.keys(), self._busy)
            await changed()
            await asyncio.sleep(interval)

    def _busy(self, instance: str) -> bool:
        return self.in_flight(instance) > 0

    def _forget(self, instance: str) -> None:
        for known in (self._polled, self._seen, self._sent):
            known.pop(instance, None)
        self._unreachable.discard(instance)
        self._ignored.discard(instance)

    async def _poll(self, record: WorkerRecord) -> None:
        own = self.in_flight(record.instance)
        try:
            status = await self._clients.status(record)
        except DeadlineExceeded:
            pass  # busy or stuck: calls to it have their own limits
        except PdmeshError as error:
            self._set_unreachable(record, error.message)
        else:
            if status.instance != record.instance:
                self._set_unreachable(record, "another process answers at its address")
            else:
                self._unreachable.discard(record.instance)
                self.note_poll(record.instance, Polled(status, own))
        finally:
            self._polling.pop(record.instance, None)

    def _set_unreachable(self, record: WorkerRecord, reason: str) -> None:
        if record.instance not in self._unreachable:
            self._unreachable.add(record.instance)
            event(log, "worker_unreachable", logging.WARNING, worker=record.worker_id, error=reason)
