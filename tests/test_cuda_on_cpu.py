"""The text of the CUDA kernels, run on a CPU against float64."""

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import late

from pdmesh.kernels import cuda_absorbed, cuda_gemm, hopper_mla, mla_reference
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
