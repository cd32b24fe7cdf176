"""What a prefill worker counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.registry.metrics import BATCH_BUCKETS, REQUEST_BUCKETS, STEP_BUCKETS, WorkerMetrics
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import FirstToken, WorkerStatus

_TOKEN_BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class PrefillMetrics(WorkerMetrics):
    """The status of a prefill worker, its steps and its prompts."""

    def __init__(
        self, page_format: PageFormat, worker: str, read: Callable[[], WorkerStatus]
    ) -> None:
        super().__init__(page_format.model, worker, read)
        self._page_bytes = page_format.page_layer_bytes * page_format.num_layers
        self._prompt_tokens = self.counter("prompt_tokens", "Tokens of computed prompts.")
        self._queries = self.counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self.counter("prefix_cache_hits", "Prompt tokens found, of those looked up.")
        self._pages = self.counter("kv_transfer_pages", "Pages pushed.")
        self._bytes = self.counter("kv_transfer_bytes", "Bytes of the pages pushed.")
        self._failed = self.counter("failed_prompts", "Prompts that a failed step ended.")
        self._step = self.histogram("step_duration_seconds", "Of one step.", STEP_BUCKETS)
        self._batch = self.histogram("step_batch_size", "Prompts in a step.", BATCH_BUCKETS)
        self._tokens = self.histogram("step_tokens", "Tokens computed in a step.", _TOKEN_BUCKETS)
        text = "From a prompt's arrival to its first step."
        self._queue_time = self.histogram("request_queue_time_seconds", text, REQUEST_BUCKETS)
        text = "From a prompt's first step to its first token."
        self._prefill_time = self.histogram("request_prefill_time_seconds", text, REQUEST_BUCKETS)

    def observe(self, facts: PrefillStepFacts) -> None:
        """One step."""
        self._step.observe(facts.duration_s)
        self._batch.observe(facts.num_prompts)
        self._tokens.observe(facts.num_tokens)
        self._failed.inc(facts.failed_prompts)
        for seconds in facts.queue_s:
            self._queue_time.observe(seconds)

    def computed(self, first: FirstToken) -> None:
        """One prompt whose first token is known."""
        tokens = first.cached_tokens + first.computed_tokens
        self._prompt_tokens.inc(tokens)
        self._queries.inc(tokens)
        self._hits.inc(first.cached_tokens)
        self._pages.inc(first.pushed_pages)
        self._bytes.inc(first.pushed_pages * self._page_bytes)
        self._prefill_time.observe(first.compute_ms / 1e3)
