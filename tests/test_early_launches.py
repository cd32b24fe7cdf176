"""Kernels that may begin before the one ahead has ended, and the one that waits for nothing.

FlashMLA's decode is launched as a dependent and does not wait (docs/attention-gpu.md): whatever
stands directly before it must not let it begin early.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest
from device_cases import ALIGNED, device_model, random_model
from model_cases import tokens_of

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.parallel.schedule import Stage, plan_schedule

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
LET_NEXT_BEGIN = {
    "cuda/absorb_query.cu",
    "cuda/fp8_gemm.cu",
    "cuda/gate.cu",
    "cuda/project_values.cu",
    "triton/gate.py",
    "triton/norm.py",
    "triton/project.py",
    "triton/rope_append.py",
    "triton/splitk_gemm.py",
}
"""None of them stands directly before attention but the absorbed query, which has to be asked."""


def texts(*patterns):
    found = {path for pattern in patterns for path in KERNELS.glob(pattern)}
    return {str(path.relative_to(KERNELS)): path.read_text() for path in found}


def test_the_kernels_that_let_the_next_one_begin_early_are_these():
    early = {
        name
        for name, text in texts("cuda/*.cu", "triton/*.py").items()
        if re.search(r"(let_next_begin|gdc_launch_dependents)\(\)", text)
    }
    assert early == LET_NEXT_BEGIN


def test_every_kernel_that_may_begin_early_waits():
    cuda = {name: text for name, text in texts("cuda/*.cu").items() if "dependent" in text}
    triton = {name: text for name, text in texts("triton/*.py").items() if '"launch_pdl"' in text}
    del triton["triton/catalogue.py"]  # compiles gate.py's
    assert len(cuda) == 4
    assert len(triton) == 3
    assert all("wait_for_ahead();" in text for text in cuda.values())
    assert all("gdc_wait()" in text for text in triton.values())


class Noting:
    """Operations of a model that note their order."""

    def __init__(self, model):
        self.order = []
        for choice in model.ops.choices:
            setattr(model.ops, choice.op, self.noted(choice.op, getattr(model.ops, choice.op)))

    def noted(self, name, operation):
        def call(*arguments, **keywords):
            self.order.append(name)
            return operation(*arguments, **keywords)

        return call


def test_an_absorbed_query_stands_directly_before_attention_and_nothing_early_behind_it():
    """Also where rows of one step are several parts: one row, two rows, a prompt in MHA form."""
    model = device_model(random_model(**ALIGNED))
    pool = model.new_latents(12, 16)
    ranges = [(20, 21, "absorbed"), (20, 22, "absorbed"), (0, 20, "mha"), (20, 21, "absorbed")]
    slices = [
        SequenceSlice((3 * i, 3 * i + 1), start, end, start, None, form)
        for i, (start, end, form) in enumerate(ranges)
    ]
    tokens = [tokens_of(22, i)[s.start : s.end] for i, s in enumerate(slices)]
    ops = Noting(model)
    model.forward(Batch.build(slices, tokens, 16), pool, "absorbed")
    order = ops.order
    decodes = [at for at, name in enumerate(order) if name == "mla_decode"]
    assert len(decodes) == 2 * model.config.num_hidden_layers
    assert {order[at - 1] for at in decodes} == {"absorb_query"}
    assert {order[at + 1] for at in decodes} == {"project_values_quantise"}


@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
def test_where_other_stages_come_between_query_and_attention_they_end_with_a_kernel_that_waits(
    mode,
):
    """As in the benches of layers: the experts' last product, or rows on their way back."""
    schedule = plan_schedule([(layer, layer > 0) for layer in range(4)], mode)
    found = set()
    for before, item in zip(schedule, schedule[1:], strict=False):
        if item.stage == Stage.ATTEND:
            mine = before.microbatch == item.microbatch
            found.add((before.stage, mine))
    assert (Stage.PROJECT, True) in found
    assert found <= {(Stage.PROJECT, True), (Stage.EXPERTS, False)}
    last = texts("triton/grouped_gemm.py", "triton/ep_*.py")
    assert len(last) == 5
    assert not set(last) & LET_NEXT_BEGIN


def test_candidates_of_a_layers_bench_keep_attentions_neighbours_from_beginning_early(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    table = importlib.import_module("gpu_choices").steps()
    names = [one.name for step in ("absorb", "values") for one in table[step].candidates]
    assert len(names) == 6
    assert not [name for name in names if "dependent" in name]
