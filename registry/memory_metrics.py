"""What a worker on a device takes of its memory, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdmesh.registry.metrics import WorkerMetrics

TEXTS = {
    "planned": "What the worker may use of its device.",
    "allocated": "What its tensors take now.",
    "reserved": "What torch holds for them now.",
    "peak": "The most that its tensors took at a time.",
    "used": "What all processes take of the device now.",
}


def memory_gauges(metrics: WorkerMetrics, figures: Callable[[], object]) -> None:
    """Gauges ``pdmesh_device_memory_<name>_bytes`` of what ``figures()`` has by these names; a
    scrape calls it."""

    def read(name: str) -> float:
        return float(getattr(figures(), name))

    for name, text in TEXTS.items():
        metrics.gauge(f"device_memory_{name}_bytes", text, partial(read, name))
