"""What the router counts, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pdmesh.router.usage import Usage
from pdmesh.wire.errors import ConfigError

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PAUSE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class TokenHistogram(Collector):
    """A histogram that takes many equal values at once; for one thread that observes.

    Args:
        name, text: as Prometheus shows them.
        bounds: upper ends of the buckets, rising; one for all larger values is added.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        """``count`` times ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> list[HistogramMetricFamily]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return [HistogramMetricFamily(self._name, self._text, buckets, self._sum)]


class Metrics:
    """Counters, gauges and histograms of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "pdmesh_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = TokenHistogram(
            "pdmesh_inter_token_latency_seconds",
            "Between tokens of one answer; tokens of one step share its time.",
            _ITL_BUCKETS,
        )
        registry.register(self.inter_token_latency)
        self.requests = Counter(
            "pdmesh_requests", "Requests by how they ended.", ["outcome"], registry=registry
        )
        self.running = Gauge(
            "pdmesh_num_requests_running", "Requests being served.", registry=registry
        )
        self.in_flight = Gauge(
            "pdmesh_worker_in_flight", "Bookings at workers.", ["role"], registry=registry
        )
        self.e2e_latency = Histogram(
            "pdmesh_e2e_request_latency_seconds",
            "From a request's arrival to the end of its last answer, where it was served.",
            buckets=_E2E_BUCKETS,
            registry=registry,
        )
        self.queue_time = Histogram(
            "pdmesh_request_queue_time_seconds",
            "Waiting for room at a decode worker and in prefill's queue.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self.waiting = Gauge(
            "pdmesh_num_requests_waiting",
            "Attempts waiting for room at a decode worker.",
            registry=registry,
        )
        self.answers = Histogram(
            "pdmesh_request_params_n",
            "Answers wanted by a request.",
            buckets=(1, 2, 4, 8, 16),
            registry=registry,
        )
        self.preemptions = Counter(
            "pdmesh_num_preemptions",
            "Answers that gave their pages up and went on elsewhere.",
            registry=registry,
        )
        self.migrations = Counter(
            "pdmesh_migrations",
            "Moves of running answers to another decode worker.",
            ["outcome"],
            registry=registry,
        )
        self.migration_pause = Histogram(
            "pdmesh_migration_pause_seconds",
            "From the last token of a moved answer's source to the first of its target.",
            buckets=_PAUSE_BUCKETS,
            registry=registry,
        )
        self.failed_attempts = Counter(
            "pdmesh_failed_attempts",
            "Tries of a request that failed at a worker.",
            ["role"],
            registry=registry,
        )
        self.costs = Gauge(
            "pdmesh_cost_seconds",
            "What the policy weighs, as fitted to the workers.",
            ["cost"],
            registry=registry,
        )
        self.cost_samples = Gauge(
            "pdmesh_cost_samples", "Measurements behind a fit.", ["fit"], registry=registry
        )
        self.prompt_tokens = self._tokens("prompt", "Prompt tokens of finished requests.")
        self.cached_tokens = self._tokens("cached", "Of the prompt tokens, those not computed.")
        self.generation_tokens = self._tokens("generation", "Tokens of finished answers.")
        self.drafted_tokens = self._tokens("drafted", "MTP drafts verified.")
        self.accepted_tokens = self._tokens("accepted", "Of the drafts, those accepted.")

    def _tokens(self, name: str, text: str) -> Counter:
        return Counter(f"pdmesh_{name}_tokens", text, registry=self.registry)

    def count(self, outcome: str, usage: Usage) -> None:
        """One request that ended."""
        self.requests.labels(outcome).inc()
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.drafted_tokens.inc(usage.drafted_tokens)
        self.accepted_tokens.inc(usage.accepted_tokens)

    def fitted(self, costs_ms: Mapping[str, float], samples: Mapping[str, int]) -> None:
        """What is weighed now, in milliseconds by name, and the measurements behind each fit."""
        for name, ms in costs_ms.items():
            self.costs.labels(name).set(ms / 1e3)
        for name, count in samples.items():
            self.cost_samples.labels(name).set(count)

    def value(self, name: str, **labels: str) -> float:
        """One sample by its full name, e.g. ``pdmesh_num_requests_running``; 0 if absent."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Answers ``GET /metrics`` from a thread; returns the port and how to stop.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return _port(server), stop


def _port(server: WSGIServer) -> int:
    return int(server.server_address[1])
