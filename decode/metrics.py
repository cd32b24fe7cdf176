"""What a decode worker counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.decode.facts import DecodeStepFacts
from pdmesh.registry.metrics import BATCH_BUCKETS, REQUEST_BUCKETS, STEP_BUCKETS, WorkerMetrics
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import Lease, ReserveRequest, WorkerStatus

_OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


class DecodeMetrics(WorkerMetrics):
    """The status of a decode worker, its steps and its reservations.

    Args:
        parked_bytes: host memory that pages of preempted sequences take now; called on the thread
            of a scrape.
    """

    def __init__(
        self,
        page_format: PageFormat,
        worker: str,
        read: Callable[[], WorkerStatus],
        parked_bytes: Callable[[], int],
    ) -> None:
        super().__init__(page_format.model, worker, read)
        self._page_size = page_format.page_size
        self._queries = self.counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self.counter("prefix_cache_hits", "Prompt tokens found, of those looked up.")
        self._step = self.histogram("step_duration_seconds", "Of one step.", STEP_BUCKETS)
        self._batch = self.histogram("step_batch_size", "Sequences in a step.", BATCH_BUCKETS)
        text = "Of a step, the time outside model and sampler."
        self._overhead = self.histogram("engine_overhead_seconds", text, _OVERHEAD_BUCKETS)
        text = "From a reservation's arrival to its lease."
        self._queue_time = self.histogram("request_queue_time_seconds", text, REQUEST_BUCKETS)
        text = "For which an answer that moved to another worker stood still."
        self._frozen = self.histogram("migration_frozen_seconds", text, REQUEST_BUCKETS)
        self.gauge("parked_bytes", "Host memory of the pages set aside.", parked_bytes)

    def observe(self, facts: DecodeStepFacts) -> None:
        """One step."""
        self._step.observe(facts.duration_s)
        self._batch.observe(facts.num_sequences)
        self._overhead.observe(max(0.0, facts.duration_s - facts.model_s))

    def moved_out(self, frozen_s: float) -> None:
        """One answer that moved out, and stood still for ``frozen_s`` seconds."""
        self._frozen.observe(frozen_s)

    def reserved(self, request: ReserveRequest, lease: Lease, waited_s: float) -> None:
        """One reservation that was granted after ``waited_s`` seconds."""
        tokens = request.num_prompt_tokens
        self._queries.inc(tokens)
        self._hits.inc(min(tokens, lease.cached_pages * self._page_size))
        self._queue_time.observe(waited_s)
