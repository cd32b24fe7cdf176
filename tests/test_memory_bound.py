"""A worker on a device keeps to what was planned for it, and says what it takes."""

import gc
import logging
import weakref
from contextlib import nullcontext

import pytest
import torch

from pdmesh.model.device import bound
from pdmesh.model.device.bound import Figures, MemoryBound, describe, limit, serving, starting
from pdmesh.model.device.memory import KEPT, MemoryPlan
from pdmesh.registry.memory_metrics import TEXTS, memory_gauges
from pdmesh.registry.metrics import WorkerMetrics
from pdmesh.wire.errors import ConfigError, InternalError

GB = 10**9
TOTAL = 150 * GB
PLAN = MemoryPlan(budget=71 * GB, weights=63 * GB, steps=2 * GB, pages=100, page=GB // 20)
CUDA = torch.device("cuda")


@pytest.fixture
def device(monkeypatch):
    """What a device would say, and the part of it that torch was told to keep to."""
    said = {"free": 80 * GB, "allocated": 68 * GB, "reserved": 70 * GB, "peak": 69 * GB, "part": []}

    def set_part(part, device):
        assert device.index == 0, "torch asks for a number here, and for none elsewhere"
        said["part"].append(part)

    answers = {
        "mem_get_info": lambda _: (said["free"], TOTAL),
        "memory_allocated": lambda _: said["allocated"],
        "memory_reserved": lambda _: said["reserved"],
        "max_memory_allocated": lambda _: said["peak"],
        "set_per_process_memory_fraction": set_part,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return said


def test_torch_is_told_to_keep_to_the_plan_and_to_half_of_what_is_kept_back(device):
    MemoryBound(PLAN, CUDA, "decode")
    assert device["part"] == [pytest.approx(71 * (1 + KEPT / 2) / 150)]
    assert PLAN.budget < limit(PLAN) < PLAN.budget / (1 - KEPT)
    MemoryBound(PLAN, CUDA, "decode", enforced=False)
    assert len(device["part"]) == 1


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        pytest.param({}, "INFO", id="within"),
        pytest.param({"reserved": 72 * GB}, "INFO", id="pieces-in-what-is-kept-back"),
        pytest.param({"reserved": 73 * GB}, "WARNING", id="pieces-beyond-it"),
        pytest.param({"peak": 72 * GB, "reserved": 72 * GB}, "WARNING", id="tensors-over"),
    ],
)
def test_the_log_has_what_was_planned_and_what_is_taken(device, caplog, changed, level):
    device.update(changed)
    with caplog.at_level(logging.INFO):
        MemoryBound(PLAN, CUDA, "prefill").report("prefill-0")
    (record,) = caplog.records
    assert record.levelname == level
    assert record.fields["planned_gb"] == "71.0"
    assert record.fields["used_gb"] == "70.0"
    assert record.fields["peak_gb"] == f"{device['peak'] / GB:.1f}"


def test_prometheus_has_the_same(device):
    metrics = WorkerMetrics("model", "prefill-0", lambda: pytest.fail("asked for the status"))
    memory_gauges(metrics, MemoryBound(PLAN, CUDA, "prefill").figures)
    device["reserved"] = 73 * GB
    found = {
        name: family.samples[0].value / GB
        for name in TEXTS
        for family in metrics.registry.restricted_registry(
            [f"pdmesh_device_memory_{name}_bytes"]
        ).collect()
    }
    assert found == {"planned": 71, "allocated": 68, "reserved": 73, "peak": 69, "used": 70}


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 448.00 MiB.")


def test_a_start_without_enough_memory_is_one_sentence_with_plan_and_flags(device):
    device["reserved"] = 72 * GB
    with (
        pytest.raises(
            ConfigError,
            match=r"for the start of this worker: planned 70\.0 of 71\.0 GB: weights 63\.0, .*"
            r"fewer --pages, a smaller --max-batch",
        ),
        starting(MemoryBound(PLAN, CUDA, "decode")),
    ):
        out_of_memory()


@pytest.mark.parametrize("memory", [None, "bound"])
def test_other_errors_of_a_start_are_what_they_are(device, memory):
    held = memory and MemoryBound(PLAN, CUDA, "decode")
    with pytest.raises(ZeroDivisionError), starting(held):
        _ = 1 / 0
    if held is None:
        with pytest.raises(torch.OutOfMemoryError), starting(None):
            out_of_memory()


def test_a_worker_that_ends_since_its_ranks_ran_out_of_memory_says_the_same(device):
    with (
        pytest.raises(InternalError, match=r"for a step: planned .* --pages"),
        serving(MemoryBound(PLAN, CUDA, "decode")),
    ):
        out_of_memory()
    with pytest.raises(torch.OutOfMemoryError), serving(None):
        out_of_memory()


def test_who_takes_the_memory_is_who_has_to_give_it_up(device):
    found = Figures(71 * GB, 60 * GB, 61 * GB, 61 * GB, 149 * GB, 150 * GB)
    assert "end what else takes memory there" in describe(PLAN, found, "prefill", "a step")
    over = Figures(71 * GB, 60 * GB, 66 * GB, 71 * GB, 140 * GB, 150 * GB)
    assert "a smaller --chunk-tokens" in describe(PLAN, over, "prefill", "a step")


def test_a_step_that_ran_out_of_memory_says_so_and_holds_none_of_it(device):
    held = []

    def step():
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        out_of_memory()

    watch = MemoryBound(PLAN, CUDA, "prefill").watching(nullcontext())
    gc.disable()
    try:
        with pytest.raises(InternalError, match="did not suffice for a step") as failed, watch:
            step()
        assert held[0]() is None, failed
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError), watch:
        _ = 1 / 0


def test_the_watch_around_a_step_is_entered_and_left(device):
    class Watch(nullcontext):
        seen = []

        def __enter__(self):
            self.seen.append("in")

        def __exit__(self, *_):
            self.seen.append("out")

    with MemoryBound(PLAN, CUDA, "decode").watching(Watch()):
        assert Watch.seen == ["in"]
    with pytest.raises(InternalError), MemoryBound(PLAN, CUDA, "decode").watching(Watch()):
        out_of_memory()
    assert Watch.seen == ["in", "out"] * 2


def test_libraries_say_it_in_their_own_words():
    assert bound.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not bound.is_out_of_memory(RuntimeError("CUDA error: invalid argument"))
    assert not bound.is_out_of_memory(ValueError("out of memory"))
