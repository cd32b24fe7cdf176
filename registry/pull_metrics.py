"""What a worker counts of its pulls, for Prometheus."""

from __future__ import annotations

from typing import Protocol

from pdmesh.registry.metrics import REQUEST_BUCKETS, WorkerMetrics


class PullFacts(Protocol):
    """One attempt to read cached pages of another worker."""

    @property
    def pages(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def failure(self) -> str | None: ...


class PullMetrics:
    """Counters of pulls in the registry of ``metrics``."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._pages = metrics.counter("pulled_pages", "Cached pages read from other workers.")
        self._bytes = metrics.counter("pulled_bytes", "Bytes of the pages pulled.")
        text = "Of a pull that brought pages, from asking their owner."
        self._seconds = metrics.histogram("pull_duration_seconds", text, REQUEST_BUCKETS)
        text = "Pulls that brought nothing, by reason; the pages were computed."
        self._failures = metrics.counter_by("pull_failures", text, "reason")

    def observe(self, facts: PullFacts) -> None:
        """One attempt that is over."""
        if facts.failure is not None:
            self._failures(facts.failure).inc()
            return
        self._pages.inc(facts.pages)
        self._bytes.inc(facts.num_bytes)
        self._seconds.observe(facts.seconds)
