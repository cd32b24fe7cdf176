"""The text of the CUDA kernels, run on a CPU against float64."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import late

from pdmesh.kernels import (
    cuda_absorbed,
    cuda_gate,
    cuda_gemm,
    hopper_mla,
    mla_reference,
    routing,
)
from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.gemm_config import ClusterTile
from pdmesh.kernels.quantised import (
    BlockWeight,
    Rows,
    dequantise_rows,
    new_scales,
    pack_latents,
)

on_cpu = cuda_on_cpu.on_cpu


def fp8(draw: torch.Generator, *shape: int) -> torch.Tensor:
    values = torch.randn(shape, generator=draw) * 100
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def uniform(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=draw) * 1e-3 + 1e-4


def rows(draw: torch.Generator, m: int, k: int) -> Rows:
    scales = new_scales(m, -(-k // 128), device="cpu")
    scales.copy_(uniform(draw, *scales.shape))
    return Rows(fp8(draw, m, k), scales)


def weight(draw: torch.Generator, *shape: int) -> BlockWeight:
    *batch, n, k = shape
    return BlockWeight(fp8(draw, *shape), uniform(draw, *batch, -(-n // 128), -(-k // 128)))


def wide(values: torch.Tensor, scales: torch.Tensor, down: int) -> torch.Tensor:
    spread = scales.double().repeat_interleave(128, -1)[..., : values.shape[-1]]
    if down > 1:
        spread = spread.repeat_interleave(down, -2)[..., : values.shape[-2], :]
    return values.double() * spread


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


TILES = [
    (ClusterTile(72, 2, 2, 3), 200, 304, 1104),
    (ClusterTile(72, 4, 1, 8, short=True), 64, 296, 1680),
]
MORE_TILES = [
    (ClusterTile(136, 4, 1, 3), 100, 400, 1104),
    (ClusterTile(128, 1, 2, 3), 150, 520, 400),
    (ClusterTile(136, 8, 1, 4), 90, 640, 1168),
    (ClusterTile(136, 2, 1, 4, short=True), 70, 272, 640),
]
"""Each is compiled for itself, which takes most of the time."""


@pytest.mark.parametrize(
    ("tile", "m", "n", "k"),
    [*TILES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_TILES)],
    ids=str,
)
def test_a_product_in_clusters_is_that_of_float64(on_cpu, tile, m, n, k):
    draw = torch.Generator().manual_seed(m)
    x, w = rows(draw, m, k), weight(draw, n, k)
    exact = wide(*x, 1) @ wide(*w, 128).t()
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    cuda_gemm.clusters(tile)
    late(on_cpu[0], *x)
    got = cuda_gemm.fp8_gemm(x, w, out=out, tile=tile, dependent=True)
    assert error(got, exact) < 3e-3


@pytest.mark.parametrize(("m", "heads", "blocks"), [(1, 1, 2), (330, 1, 1), (130, 2, 8)])
def test_absorbed_products_are_those_of_float64(on_cpu, monkeypatch, m, heads, blocks):
    monkeypatch.setattr(cuda_absorbed, "PROCESSORS", blocks)
    draw = torch.Generator().manual_seed(m)
    both = torch.randn(m, heads, 192, generator=draw).bfloat16()
    latent = torch.randn(m, heads, 512, generator=draw).bfloat16()
    up, down = weight(draw, heads, 512, 128), weight(draw, heads, 128, 512)
    out = torch.full((m, heads, 576), torch.nan, dtype=torch.bfloat16)
    rounded = torch.einsum("mhd,hrd->mhr", both[..., :128].double(), wide(*up, 128)) * 0.1
    exact = torch.cat([rounded, both[..., 128:].double() * 0.1], dim=-1)
    seen = torch.einsum("mhr,hvr->mhv", latent.double(), wide(*down, 128))
    for name in ("absorb_query", "project_values"):
        cuda_absorbed._launcher(name)
    late(on_cpu[0], both)
    late(on_cpu[1], latent)
    given = (both[..., :128], up, both[..., 128:])
    query = cuda_absorbed.absorb_query(*given, 0.1, out=out)
    assert error(query[..., :512], exact[..., :512]) < 3e-3
    assert error(query[..., 512:], exact[..., 512:]) < 3e-3
    values = cuda_absorbed.project_values_quantise(latent, down)
    assert error(dequantise_rows(values), seen.flatten(1)) < 4e-2


V3 = GateRule("noaux_tc", 256, 8, 8, 4, True, 2.5)
SEVEN = cuda_gate.Form(7, 8)


def gate_inputs(m: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(m)
    x = torch.randn(m, hidden, generator=draw).bfloat16()
    w = (torch.randn(256, hidden, generator=draw) / hidden**0.5).bfloat16()
    return x, w, torch.randn(256, generator=draw) / 10


def is_the_choice_of(got: routing.Routing, logits: torch.Tensor, bias: torch.Tensor, used: int):
    """Checks all that a gate gives against the definition, for these logits."""
    ids, weights = choose_experts(logits, bias, V3)
    ids[used:], weights[used:] = -1, 0
    assert torch.equal(got.ids, ids.int())
    torch.testing.assert_close(got.weights, weights, rtol=1e-5, atol=1e-6, equal_nan=True)
    for mine, theirs in zip(got[2:], routing.place_choices(ids, 256), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("best", [0.25, torch.inf])
def test_the_gate_chooses_among_experts_that_are_infinitely_bad(on_cpu, best):
    """With `best` infinite, groups with one expert that is no worse than any other stay."""
    x, w, _ = gate_inputs(3, 64)
    bias = torch.full((256,), -torch.inf)
    bias[[130, 170, 200, 250]] = best
    work = cuda_gate.workspace(3, "cpu")
    got = cuda_gate.gate_topk(x, w, bias, V3, work=work)
    is_the_choice_of(got, work, bias, 3)


GATES = [
    *((1, 72, None), (15, 1544, 9), (30, 64, 30), (64, 2120, 0), (70, 1544, 67)),
    *((129, 200, None), (256, 64, 250), (300, 64, None)),
]
"""Rows, hidden sizes of a few steps and of more than the stages hold, rows that count."""


@pytest.mark.parametrize(
    ("m", "hidden", "used", "form"),
    [
        *((*case, cuda_gate.FORMS[0]) for case in GATES),
        *((15, 9224, 9, SEVEN), (70, 1544, 67, SEVEN), (129, 64, None, SEVEN)),
        pytest.param(66, 9224, 66, cuda_gate.FORMS[0], marks=pytest.mark.full),
    ],
)
def test_the_gate_chooses_and_counts_as_its_definition(on_cpu, m, hidden, used, form):
    x, w, bias = gate_inputs(m, hidden)
    x[0], bias[3] = 0, bias[7]
    if m > 10:
        w[40:60] = w[40]
        x[1, 5] = torch.nan
        x[2] = torch.inf
    exact, work = x.double() @ w.double().t(), cuda_gate.workspace(m, "cpu").fill_(torch.nan)
    num_rows = None if used is None else torch.tensor(used, dtype=torch.int32)
    cuda_gate._launcher(form)
    late(on_cpu[0], x)
    got = cuda_gate.gate_topk(x, w, bias, V3, num_rows, work=work, form=form)
    torch.testing.assert_close(work.double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    is_the_choice_of(got, work, bias, m if used is None else used)


def test_all_rows_may_choose_the_same_experts(on_cpu):
    _, w, bias = gate_inputs(512, 64)
    x = torch.ones(512, 64).bfloat16()
    work = cuda_gate.workspace(512, "cpu")
    got = cuda_gate.gate_topk(x, w, bias, V3, work=work)
    assert int(got.counts.max()) == 512
    is_the_choice_of(got, work, bias, 512)


def test_a_rows_logits_in_clusters_do_not_depend_on_the_number_of_rows(on_cpu):
    x, w, bias = gate_inputs(70, 1544)
    logits = {m: cuda_gate.workspace(m, "cpu") for m in (1, 9, 17, 40, 70)}
    for m, some in logits.items():
        cuda_gate.gate_topk(x[:m], w, bias, V3, work=some)
    for m, some in logits.items():
        assert torch.equal(some, logits[70][:m]), m


def test_attention_over_fp8_latents_is_that_of_float64(on_cpu, monkeypatch):
    """Sequences of no, one, and up to seven pages, whose scores grow; two rows of 33 heads."""
    lengths, rows, heads = torch.tensor([0, 40, 130, 448], dtype=torch.int32), 2, 33
    draw = torch.Generator().manual_seed(3)
    pages = torch.full((14, 64, 656), 0xFF, dtype=torch.uint8)
    table = torch.full((4, 8), 1 << 20, dtype=torch.int32)
    order = torch.randperm(14, generator=draw).tolist()
    for i, length in enumerate(lengths.tolist()):
        for j in range(-(-length // 64)):
            table[i, j], count = order.pop(), min(64, length - j * 64)
            latents = torch.randn(count, 576, generator=draw) * (j + 1)
            pages[table[i, j], :count] = pack_latents(latents.bfloat16())
    query = torch.randn(4 * rows, heads, 576, generator=draw).bfloat16()
    monkeypatch.setattr(hopper_mla, "_entry", cuda_on_cpu.entry_of_attention)
    got = hopper_mla.mla_decode(query, pages, table, lengths, rows, 0.02)
    exact = mla_reference.mla_decode(query, pages, table, lengths, rows, 0.02)
    assert not got[:rows].any()
    assert error(got, exact) < 6e-2
