"""The whole model by the kernels in Triton, in the interpreter, against the definitions."""

import pytest
import torch
from device_cases import ALIGNED, device_model, random_model
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


@pytest.mark.parametrize("masked", [True, False], ids=["masked experts", "sorted experts"])
def test_prompts_and_generated_rows_agree_with_the_definitions(masked, monkeypatch):
    monkeypatch.setattr(layers, "MASKED_ROWS", 512 if masked else 0)
    model = random_model(1, **ALIGNED | {"num_hidden_layers": 2})
    tokens = tokens_of(12)
    devices = [device_model(model), device_model(model, triton_ops())]
    pools = [d.new_latents(3, PAGE).fill_(float("nan")) for d in devices]
    for start, end, form in ((0, 7, "mha"), (7, 9, "absorbed")):
        batch = Batch.build([SequenceSlice((2, 0), start, end, start)], [tokens[start:end]], PAGE)
        hidden = [d.forward(batch, pool, form) for d, pool in zip(devices, pools, strict=True)]
        spread = float(hidden[0].float().std())
        # Sums in another order move a few FP8 values by a step of 1/8, and every layer that
        # quantises again spreads that, up to the rounding of the format itself, about 5 %.
        off = (hidden[0].float() - hidden[1].float()).square().mean().sqrt()
        assert float(off) < 0.08 * spread
    before = hidden[0][:1]
    batch = Batch.build([SequenceSlice((2, 0), 8, 9, 8)], [tokens[8:9]], PAGE)
    given = [
        d.mtp_forward(batch, before, pool, "absorbed").float()
        for d, pool in zip(devices, pools, strict=True)
    ]
    assert float((given[0] - given[1]).square().mean().sqrt()) < 0.08 * float(given[0].std())
