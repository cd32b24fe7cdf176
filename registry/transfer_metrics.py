"""What a worker counts of the pages that it pushes to others, for Prometheus."""

from __future__ import annotations

from pdmesh.registry.metrics import WorkerMetrics


class TransferMetrics:
    """Counters by transport in the registry of ``metrics``; may be told from any thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        text = "Bytes of pages that a receiver has acknowledged, by transport."
        self._bytes = metrics.counter_by("transfer_bytes", text, "transport")
        text = "Transfers that a receiver has acknowledged whole, by transport."
        self._transfers = metrics.counter_by("transfers", text, "transport")

    def observe(self, transport: str, num_bytes: int) -> None:
        """One transfer that has succeeded."""
        self._bytes(transport).inc(num_bytes)
        self._transfers(transport).inc()
