"""FP8 blocks: zeros, tiny values, the largest, what is not finite, and partial blocks."""

import pytest
import torch

from pdmesh.kernels.fp8 import (
    FP8_MAX,
    block_scales,
    dequantise_blocks,
    dequantise_part,
    quantise_blocks,
)


def round_trip(weight):
    return dequantise_blocks(*quantise_blocks(weight))


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 1), (129, 127), (576, 192), (64, 300)]
)
def test_a_round_trip_is_within_the_precision_of_e4m3(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantised, scales = quantise_blocks(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.shape == shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = dequantise_blocks(quantised, scales)
    # Three mantissa bits: half a unit in the last place is 1/16; below 2^-6 steps are even.
    step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert bool(((back - weight).abs() <= weight.abs() / 16 + step * 2**-10).all())
    again = dequantise_blocks(*quantise_blocks(back))
    torch.testing.assert_close(again, back, atol=0, rtol=1e-6)


def test_each_block_has_its_own_scale():
    weight = torch.ones(200, 300)
    weight[128:, 256:] = 1000.0
    weight[:128, :128] = 1e-4
    assert torch.equal(block_scales(weight)[1, 2], torch.tensor(1000.0) / FP8_MAX)
    torch.testing.assert_close(round_trip(weight), weight, rtol=1e-6, atol=0)


def test_zero_blocks_come_back_as_exact_zeros():
    """THUDM/slime#2256: a scale of 0 became NaN."""
    weight = torch.zeros(256, 256)
    assert torch.equal(round_trip(weight), weight)
    weight[130, 7] = 3.0
    assert torch.equal(round_trip(weight), weight)


@pytest.mark.parametrize("value", [1e-30, 1e-37, 1e-44, 448.0, 1e30, 3e38])
def test_tiny_and_large_values_stay_finite_and_close(value):
    weight = torch.zeros(4, 4)
    weight[1, 1] = value
    back = round_trip(weight)
    assert bool(back.isfinite().all())
    assert float(back[0].abs().sum()) == 0.0
    if value > 1e-36:
        torch.testing.assert_close(back, weight, rtol=1e-6, atol=0)


def test_what_is_not_finite_stays_in_its_own_element():
    weight = torch.randn(130, 130, generator=torch.Generator().manual_seed(1))
    expected = round_trip(weight)
    spoilt = weight.clone()
    spoilt[3, 4], spoilt[5, 6], spoilt[129, 129] = torch.inf, torch.nan, -torch.inf
    back = round_trip(spoilt)
    bad = ~spoilt.isfinite()
    assert bool(back[bad].isnan().all())
    # The three elements were not the largest of their blocks, so nothing else moves.
    assert torch.equal(back[~bad], expected[~bad])


def test_a_row_of_a_product_depends_on_itself_only():
    weight = round_trip(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)))
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3))
    clean = x @ weight.T
    x[2] = torch.inf
    spoilt = x @ weight.T
    keep = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(spoilt[keep], clean[keep])
    assert not bool(spoilt[2].isfinite().any())


def test_scales_of_a_wrong_shape_are_refused():
    quantised, scales = quantise_blocks(torch.ones(130, 10))
    with pytest.raises(ValueError, match=r"scales are \(1, 1\), the blocks need \(2, 1\)"):
        dequantise_blocks(quantised, scales[:1])


# ---- blocks that do not divide the matrix (vllm-project/vllm#33327) ---------------------------


SIZES = (64, 127, 128, 129, 192, 576)


def uneven(n, k):
    """A matrix whose blocks differ by orders of magnitude: a neighbour's scale would show."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k))
    rows, columns = torch.arange(n)[:, None] // 128, torch.arange(k) // 128
    return weight * 10.0 ** ((3 * rows + 2 * columns) % 7 - 3)


def plain_dequantised(quantised, scales):
    """Element by element, as the format is defined."""
    n, k = quantised.shape
    rows = [scales[i // 128, torch.arange(k) // 128] for i in range(n)]
    return quantised.float() * torch.stack(rows)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", SIZES)
def test_every_shard_of_a_matrix_equals_its_part_of_the_whole(n, k):
    """vllm-project/vllm#33327: also with a boundary inside a block, or less than one block."""
    weight = uneven(n, k)
    quantised, scales = quantise_blocks(weight)
    whole = dequantise_blocks(quantised, scales)
    assert torch.equal(whole, plain_dequantised(quantised, scales))
    step = plain_dequantised(torch.ones(n, k), scales)
    assert bool(((whole - weight).abs() <= weight.abs() / 16 + step * 2**-10).all())
    for count in (1, 2, 4):
        for dim, size in enumerate((n, k)):
            bounds = [size * i // count for i in range(count + 1)]
            parts = []
            for first, end in zip(bounds, bounds[1:], strict=False):
                part = quantised.narrow(dim, first, end - first)
                parts.append(dequantise_part(part, scales, (first, 0) if dim == 0 else (0, first)))
            assert torch.equal(torch.cat(parts, dim), whole)


def test_a_part_cut_on_all_sides_equals_that_part():
    quantised, scales = quantise_blocks(uneven(300, 400))
    whole = dequantise_blocks(quantised, scales)
    got = dequantise_part(quantised[100:290, 130:257], scales, (100, 130))
    assert torch.equal(got, whole[100:290, 130:257])


@pytest.mark.parametrize("start", [(-1, 0), (200, 0), (0, 200)])
def test_a_part_beyond_the_scales_is_refused(start):
    quantised, scales = quantise_blocks(torch.ones(100, 100))
    with pytest.raises(ValueError, match="that have scales"):
        dequantise_part(quantised, scales, start)
