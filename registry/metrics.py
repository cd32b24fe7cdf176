"""What every worker tells Prometheus: its status as gauges and counters, on a port of its own.

Names follow vLLM's and SGLang's, with the prefix ``pdmesh_``. What changes by itself is read when
a scrape asks for it, from the same status that the Status call answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.wire.errors import ConfigError
from pdmesh.wire.messages import RankStatus, WorkerStatus

LABELS = ("model_name", "worker")
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""Seconds."""
REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCRAPE_S = 5.0
_PAGE_STATES = ("free", "reserved", "used", "cached", "quarantined")


class WorkerMetrics:
    """A registry with the status of one worker; a role adds its own counters and histograms.

    Args:
        model_name: the name that clients ask for.
        worker: the worker's id.
        read: the worker's status now; called on the thread of a scrape.
    """

    def __init__(self, model_name: str, worker: str, read: Callable[[], WorkerStatus]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "worker": worker}
        self.registry.register(_StatusCollector(self._labels, read))

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram ``pdmesh_<name>`` with the worker's labels."""
        whole = Histogram(f"pdmesh_{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return whole.labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        """A counter ``pdmesh_<name>_total`` with the worker's labels."""
        whole = Counter(f"pdmesh_{name}", text, LABELS, registry=self.registry)
        return whole.labels(**self._labels)

    def counter_by(self, name: str, text: str, label: str) -> Callable[[str], Counter]:
        """Counters ``pdmesh_<name>_total``, one for each value of a further label."""
        names = (*LABELS, label)
        whole = Counter(f"pdmesh_{name}", text, names, registry=self.registry)
        return lambda value: whole.labels(**self._labels, **{label: value})

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge ``pdmesh_<name>`` with the worker's labels; ``read`` is called by a scrape."""
        whole = Gauge(f"pdmesh_{name}", text, LABELS, registry=self.registry)
        whole.labels(**self._labels).set_function(read)

    def value(self, name: str, **labels: str) -> float | None:
        """One sample by its full name and further labels; None if there is none."""
        return self.registry.get_sample_value(name, {**self._labels, **labels})


class _StatusCollector(Collector):
    """Turns a status into samples."""

    def __init__(self, labels: dict[str, str], read: Callable[[], WorkerStatus]) -> None:
        self._labels = labels
        self._read = read

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        pool = status.pool
        usage = 1.0 - (pool.free + pool.cached) / pool.total if pool.total else 0.0
        yield self._gauge("num_requests_running", "Requests in the batch.", status.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", status.queued)
        yield self._gauge("kv_cache_usage_perc", "Pages promised or in use, 0 to 1.", usage)
        yield self._pages(status)
        yield self._gauge("num_leases", "Leases, or pushes that are ending.", status.leases)
        yield self._counter("requests_cancelled", "Requests ended early.", status.cancelled)
        yield from self._ranks(status.ranks)
        if status.role == "prefill":
            text = "Prompt tokens computed, those of a prefix hit not counted."
            yield self._counter("prompt_tokens_computed", text, status.tokens_computed)
        else:
            yield from self._decode(status)

    def _ranks(self, ranks: RankStatus | None) -> Iterator[Metric]:
        if ranks is None:
            return
        text = "Ranks that compute together."
        yield self._gauge("ep_members", text, len(ranks.members))
        yield self._counter("ep_steps", "Steps of all ranks taken part in.", ranks.steps)
        text = "Steps computed again after the loss of a rank."
        yield self._counter("ep_steps_repeated", text, ranks.repeated)
        yield self._counter("ep_sent_bytes", "Bytes sent to other ranks.", ranks.sent_bytes)

    def _decode(self, status: WorkerStatus) -> Iterator[Metric]:
        yield self._gauge("num_requests_parked", "Sequences set aside.", status.parked)
        yield self._counter("generation_tokens", "Tokens generated.", status.tokens_generated)
        yield self._counter("num_preemptions", "Sequences set aside so far.", status.preempted)
        yield self._counter("answers_moved_in", "Answers taken over.", status.moved_in)
        yield self._counter("answers_moved_out", "Answers handed over.", status.moved_out)
        text = "MTP drafts verified."
        yield self._counter("spec_decode_num_draft_tokens", text, status.drafted)
        text = "MTP drafts accepted."
        yield self._counter("spec_decode_num_accepted_tokens", text, status.accepted)

    def _pages(self, status: WorkerStatus) -> Metric:
        names = [*self._labels, "state"]
        family = GaugeMetricFamily("pdmesh_kv_cache_pages", "Pages by state.", labels=names)
        for state in _PAGE_STATES:
            family.add_metric([*self._labels.values(), state], getattr(status.pool, state))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"pdmesh_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"pdmesh_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def on_loop(
    loop: asyncio.AbstractEventLoop, facts: Callable[[], WorkerStatus]
) -> Callable[[], WorkerStatus]:
    """``facts`` for other threads: it runs on ``loop``, where the worker's state is touched.

    Raises:
        TimeoutError: the loop has not come to it within seconds.
    """

    def read() -> WorkerStatus:
        answer: Future[WorkerStatus] = Future()

        def ask() -> None:
            try:
                answer.set_result(facts())
            except Exception as error:  # noqa: BLE001 - raised by result() in the thread that asks
                answer.set_exception(error)

        loop.call_soon_threadsafe(ask)
        return answer.result(_SCRAPE_S)

    return read


@asynccontextmanager
async def metrics_endpoint(
    registry: CollectorRegistry, host: str, port: int
) -> AsyncIterator[None]:
    """Answers ``GET /metrics`` from a thread while the block runs; port 0: nothing.

    Raises:
        ConfigError: the port is taken, or the host is not this machine's.
    """
    if port == 0:
        yield
        return
    try:
        server, thread = start_http_server(port, host, registry=registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
