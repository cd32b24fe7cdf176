"""The FP8 products in Triton, in its interpreter: rests, zeros, and rows that nobody asked for."""

import pytest
import torch

from pdmesh.kernels import quantised
from pdmesh.kernels.fp8 import quantise_blocks
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.quantised import BlockWeight, Rows, dequantise_rows, quantise_rows
from pdmesh.kernels.routing import gate_topk

pytest.importorskip("triton")

from pdmesh.kernels.gemm_config import SplitConfig
from pdmesh.kernels.triton import absorbed, grouped_gemm, splitk_gemm
from pdmesh.kernels.triton.absorbed import HeadConfig
from pdmesh.kernels.triton.grouped_gemm import GroupedConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN_BITS = 0x7F


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(seed: int, *shape: int) -> Rows:
    x = torch.randn(shape, generator=generator(seed)) * 3
    return quantise_rows(x.to(DEVICE))


def weight(seed: int, *shape: int) -> BlockWeight:
    *batch, n, k = shape
    w = torch.randn(shape, generator=generator(seed)).view(-1, n, k)
    values, scales = zip(*(quantise_blocks(part) for part in w), strict=True)
    return BlockWeight(
        torch.stack(values).view(shape).to(DEVICE),
        torch.stack(scales).view(*batch, -(-n // 128), -(-k // 128)).to(DEVICE),
    )


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)


def spoil(x: Rows, unused: torch.Tensor) -> None:
    """NaN in the rows that `unused` marks and in their scales."""
    x.values.view(torch.uint8)[unused] = NAN_BITS
    x.scales[unused] = torch.nan


SPLITS = [
    SplitConfig(16, 64, 1, 4, 3),
    SplitConfig(16, 64, 3, 4, 3, swap=True),
    SplitConfig(32, 128, 2, 4, 3),
    SplitConfig(16, 32, 16, 4, 3, bulk=False),
]


@pytest.mark.parametrize("config", SPLITS, ids=str)
@pytest.mark.parametrize("shape", [(1, 128, 256), (5, 200, 400), (17, 72, 384), (33, 24, 136)])
def test_a_product_with_split_sums_is_the_plain_one(shape, config):
    m, n, k = shape
    x, w, out = rows(m, m, k), weight(n, n, k), poisoned(m, n)
    got = splitk_gemm.fp8_gemm(x, w, out=out, config=config)
    assert got is out
    torch.testing.assert_close(got, quantised.fp8_gemm(x, w), rtol=1e-2, atol=1e-3)


def test_a_product_of_no_rows_is_empty():
    assert splitk_gemm.fp8_gemm(rows(0, 0, 128), weight(0, 24, 128)).shape == (0, 24)


def test_a_zero_block_and_a_zero_row_give_exact_zeros():
    x, w = torch.randn(4, 256, generator=generator(1)), torch.ones(128, 256)
    x[2] = 0
    w[:, :128] = 0
    x[3, 128:] = 0
    narrow = BlockWeight(*(part.to(DEVICE) for part in quantise_blocks(w)))
    got = splitk_gemm.fp8_gemm(quantise_rows(x.to(DEVICE)), narrow, config=SPLITS[2])
    assert got[2:].eq(0).all()
    assert got[:2].ne(0).all()


def test_a_nan_stays_in_its_row():
    x, w = rows(1, 4, 256), weight(2, 24, 256)
    clean = splitk_gemm.fp8_gemm(x, w, config=SPLITS[2])
    x.values.view(torch.uint8)[1, 3] = NAN_BITS
    got = splitk_gemm.fp8_gemm(x, w, config=SPLITS[2])
    assert got[1].isnan().all()
    assert got[[0, 2, 3]].equal(clean[[0, 2, 3]])


def test_the_counters_are_zeros_again_and_a_second_product_is_right():
    space = splitk_gemm.new_workspace(DEVICE)
    x, w = rows(1, 5, 512), weight(2, 72, 512)
    wanted = quantised.fp8_gemm(x, w)
    for config in (SPLITS[1], SPLITS[3], SPLITS[1]):
        got = splitk_gemm.fp8_gemm(x, w, workspace=space, config=config)
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)
        assert space.arrived.eq(0).all()


def test_a_split_that_does_not_fit_the_workspace_is_not_split(monkeypatch):
    monkeypatch.setattr(splitk_gemm, "PARTIAL_FLOATS", 100)
    x, w = rows(1, 5, 512), weight(2, 72, 512)
    got = splitk_gemm.fp8_gemm(x, w, config=SPLITS[1])
    torch.testing.assert_close(got, quantised.fp8_gemm(x, w), rtol=1e-2, atol=1e-3)


def test_rows_whose_start_is_not_aligned_are_read_by_ordinary_loads():
    buffer = torch.zeros(4 * 136 + 8, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    x = rows(3, 4, 136)
    shifted = buffer[8:].view(4, 136).copy_(x.values)
    assert not splitk_gemm.bulk_loads(shifted)
    w = weight(4, 24, 136)
    got = splitk_gemm.fp8_gemm(Rows(shifted, x.scales), w, config=SPLITS[0])
    torch.testing.assert_close(got, quantised.fp8_gemm(x, w), rtol=1e-2, atol=1e-3)


GROUPED = [
    GroupedConfig(16, 64, 4, 3),
    GroupedConfig(32, 32, 4, 3, swap=True),
    GroupedConfig(16, 128, 4, 3, bulk=False),
    GroupedConfig(32, 32, 4, 3, together=4),
    GroupedConfig(16, 16, 4, 3, together=5),
    GroupedConfig(64, 32, 4, 3, together=1),
]


@pytest.mark.parametrize("config", GROUPED, ids=str)
def test_experts_multiply_the_rows_that_count_and_leave_the_others(config):
    x, w = rows(1, 3, 20, 272), weight(2, 3, 72, 272)
    counts = torch.tensor([0, 5, 20], dtype=torch.int32, device=DEVICE)
    wanted = quantised.masked_grouped_gemm(x, w, counts, 8)
    unused = torch.arange(20, device=DEVICE) >= counts[:, None]
    spoil(x, unused)
    got = grouped_gemm.masked_grouped_gemm(x, w, counts, 8, out=poisoned(3, 20, 72), config=config)
    torch.testing.assert_close(got[~unused], wanted[~unused], rtol=1e-2, atol=1e-3)
    assert got[unused].isnan().all()


@pytest.mark.parametrize("counts", [(0, 5, 0, 0, 1), (0, 0, 0, 0, 0), (20, 0, 0, 20, 0), (1, 1)])
@pytest.mark.parametrize("used", [2, 3, 5])
def test_experts_with_rows_are_found_among_those_without(used, counts):
    x, w = rows(1, len(counts), 20, 144), weight(2, len(counts), 40, 144)
    given = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    wanted = quantised.masked_grouped_gemm(x, w, given, 1)
    unused = torch.arange(20, device=DEVICE) >= given[:, None]
    spoil(x, unused)
    config = GroupedConfig(16, 64, 4, 3)
    out = poisoned(len(counts), 20, 40)
    got = grouped_gemm.masked_grouped_gemm(x, w, given, 1, used, out=out, config=config)
    torch.testing.assert_close(got[~unused], wanted[~unused], rtol=1e-2, atol=1e-3)
    assert got[unused].isnan().all()


@pytest.mark.parametrize("config", GROUPED, ids=str)
def test_rows_in_groups_take_their_experts_weight(config):
    expert = torch.full((300,), -1, dtype=torch.int32, device=DEVICE)
    expert[:40], expert[128:129], expert[256:] = 2, 0, 1
    x, w = rows(1, 300, 144), weight(2, 3, 40, 144)
    wanted = quantised.contiguous_grouped_gemm(x, w, expert)
    spoil(x, expert < 0)
    got = grouped_gemm.contiguous_grouped_gemm(x, w, expert, config=config)
    used = expert >= 0
    torch.testing.assert_close(got[used], wanted[used], rtol=1e-2, atol=1e-3)


def test_experts_without_rows_give_an_empty_result():
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    w = weight(2, 2, 24, 128)
    assert grouped_gemm.masked_grouped_gemm(rows(1, 2, 0, 128), w, counts, 0).shape == (2, 0, 24)
    assert grouped_gemm.contiguous_grouped_gemm(rows(1, 0, 128), w, counts[:0]).shape == (0, 24)


HEADS = [
    HeadConfig(16, 64, 2),
    HeadConfig(32, 32, 1, swap=True),
    HeadConfig(16, 128, 1, wide=False),
    HeadConfig(16, 64, 3, wide=False, swap=True),
]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("config", HEADS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 128, 512, 64), (17, 3, 16, 160, 8), (40, 1, 24, 32, 4)])
def test_an_absorbed_query_is_the_plain_one(shape, config):
    m, heads, nope, rank, rope = shape
    whole = torch.randn(m, heads, nope + rope, generator=generator(m)).bfloat16().to(DEVICE)
    query, rotated = whole[..., :nope], whole[..., nope:]
    w, out = weight(heads, heads, rank, nope), poisoned(m, heads, rank + rope)
    wanted = quantised.absorb_query(query, w, rotated, 0.3)
    got = absorbed.absorb_query(query, w, rotated, 0.3, out=out, config=config)
    assert got is out
    assert error(got, wanted) < (4e-3 if config.wide else 5e-2)
    assert got[..., rank:].equal(wanted[..., rank:])


@pytest.mark.parametrize("config", HEADS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 128, 512), (17, 3, 128, 160), (5, 2, 16, 32)])
def test_projected_values_are_the_plain_ones_quantised(shape, config):
    m, heads, values, rank = shape
    latent = torch.randn(m, heads, rank, generator=generator(m)).bfloat16().to(DEVICE)
    w = weight(heads, heads, values, rank)
    wanted = quantised.project_values_quantise(latent, w)
    got = absorbed.project_values_quantise(latent, w, config=config)
    assert got.values.shape == wanted.values.shape
    assert got.scales.stride() == wanted.scales.stride()
    assert error(dequantise_rows(got), dequantise_rows(wanted)) < (1e-2 if config.wide else 7e-2)


def test_a_head_that_saw_zeros_gives_zeros():
    latent = torch.zeros(3, 2, 256, dtype=torch.bfloat16, device=DEVICE)
    got = absorbed.project_values_quantise(latent, weight(1, 2, 128, 256))
    assert dequantise_rows(got).eq(0).all()


def test_absorbed_products_of_no_rows_are_empty():
    query = torch.zeros(0, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    w = weight(1, 2, 512, 128)
    assert absorbed.absorb_query(query, w, query[..., :64], 1.0).shape == (0, 2, 576)
    latent = torch.zeros(0, 2, 512, dtype=torch.bfloat16, device=DEVICE)
    got = absorbed.project_values_quantise(latent, weight(1, 2, 128, 512))
    assert got.values.shape == (0, 256)
    assert got.scales.shape == (0, 2)


def test_a_query_longer_than_one_scale_is_refused():
    query = torch.zeros(1, 1, 256, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="256"):
        absorbed.absorb_query(query, weight(1, 1, 128, 256), query[..., :64], 1.0)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's library picks its product by the rows")
def test_a_row_of_a_definition_on_a_cpu_is_the_same_whatever_rows_stand_beside_it():
    queries = torch.randn(9, 2, 128, generator=generator(4)).bfloat16()
    seen = torch.randn(9, 2, 256, generator=generator(5)).bfloat16()
    hidden = torch.randn(9, 256, generator=generator(6)).bfloat16()
    x, dense, key = rows(1, 9, 256), weight(2, 384, 256), weight(3, 2, 256, 128)
    up, router = weight(7, 2, 128, 256), torch.randn(16, 256, generator=generator(8))
    rotated = torch.zeros(9, 2, 64, dtype=torch.bfloat16)
    rule = GateRule("noaux_tc", 16, 1, 1, 2, True, 1.0)

    def everything(chosen):
        part = Rows(x.values[chosen], x.scales[chosen])
        values = quantised.project_values_quantise(seen[chosen], up)
        return (
            quantised.fp8_gemm(part, dense),
            quantised.absorb_query(queries[chosen], key, rotated[chosen], 1.0),
            dequantise_rows(values),
            gate_topk(hidden[chosen], router, None, rule).weights,
        )

    whole = everything(slice(None))
    for chosen in (slice(0, 1), slice(3, 5), slice(2, 9)):
        for found, wanted in zip(everything(chosen), whole, strict=True):
            assert torch.equal(found, wanted[chosen])
