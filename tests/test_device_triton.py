"""The whole model by the kernels in Triton, in the interpreter, against the definitions."""

import pytest
import torch
from device_cases import ALIGNED, device_model, exact_model, random_model
from model_cases import tokens_of

from pdmesh.kernels import candidates
from pdmesh.kernels.backends import FASTER, PLAIN, Backends, Choice
from pdmesh.kernels.triton.grouped_gemm import contiguous_grouped_gemm, masked_grouped_gemm
from pdmesh.kernels.triton.splitk_gemm import fp8_gemm
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device import layers

CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16
# Rows that nobody asked for may hold NaN, which numpy, the interpreter's arithmetic, remarks on.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = ALIGNED | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


def triton_ops():
    candidates.register()
    choices = []
    for op, plain in PLAIN.items():
        of_triton = [c for c in FASTER.get(op, ()) if c.backend == "triton"]
        call = of_triton[0].load(CPU) if of_triton else plain
        choices.append(Choice(op, "triton" if of_triton else "torch", "for a test", call))
    ops = Backends(choices)
    ops.fp8_gemm = fp8_gemm
    assert ops.masked_grouped_gemm is masked_grouped_gemm
    assert ops.contiguous_grouped_gemm is contiguous_grouped_gemm
    return ops


def test_prompts_and_generated_rows_are_as_near_the_reference_as_by_the_definitions(monkeypatch):
    """Sums in another order move a few FP8 values by a step of 1/8, and every layer that quantises
    again spreads that up to the rounding of the format itself; so both are held against a model
    that does not round."""
    monkeypatch.setattr(layers, "MASKED_ROWS", 4)
    model = random_model(1, **SMALL)
    tokens = tokens_of(8)
    devices = [exact_model(model), device_model(model), device_model(model, triton_ops())]
    pools = [d.new_latents(3, PAGE).fill_(float("nan")) for d in devices]

    def check(given):
        exact, plain, triton = (x.float() for x in given)
        off = [float((x - exact).square().mean().sqrt()) for x in (plain, triton)]
        assert off[1] < 1.5 * off[0] + 0.02 * float(exact.std())

    hidden = []
    for start, end, form in ((0, 5, "mha"), (5, 7, "absorbed")):
        batch = Batch.build([SequenceSlice((2, 0), start, end, start)], [tokens[start:end]], PAGE)
        hidden.append([d.forward(batch, p, form) for d, p in zip(devices, pools, strict=True)])
        check(hidden[-1])
    before = [torch.cat(both)[:6] for both in zip(*hidden, strict=True)]
    for start, end, form in ((1, 5, "mha"), (5, 7, "absorbed")):
        batch = Batch.build([SequenceSlice((2, 0), start, end, start)], [tokens[start:end]], PAGE)
        rows = [x[start - 1 : end - 1] for x in before]
        both = zip(devices, rows, pools, strict=True)
        check([d.mtp_forward(batch, x, pool, form) for d, x, pool in both])
