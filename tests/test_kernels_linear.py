"""Products, norms and activations: right, and the same for a row whatever is around it."""

import pytest
import torch
import torch.nn.functional as F

from pdmesh.kernels.activation import sigmoid, silu_mul
from pdmesh.kernels.linear import bmm, linear, pad_rows, varying_shapes
from pdmesh.kernels.moe import routed_experts
from pdmesh.kernels.norm import rms_norm

# Weights of a small model of the family, (outputs, inputs).
SHAPES = [
    (768, 256),
    (896, 192),
    (384, 512),
    (256, 384),
    (32, 256),
    (256, 128),
    (4096, 256),
    (8, 64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(dtype):
    assert varying_shapes(SHAPES, dtype) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [8, 42, 128])
def test_a_row_of_nan_or_infinity_touches_no_other_row(dtype, rows):
    """Whatever the length of the sums: libraries read on into the next row at uneven ones."""
    generator = torch.Generator().manual_seed(rows)
    for inner in (4, 20, 32, 64, 68, 76, 80, 96, 100, 160, 188):
        for bad in (float("nan"), float("inf")):
            x = torch.randn(rows, 4, inner, generator=generator).to(dtype)
            weights = torch.randn(4, inner, 64, generator=generator).to(dtype)
            x[rows // 2 :] = bad
            plain = linear(x[:, 0], weights[0].T.contiguous())
            batched = bmm(x.transpose(0, 1), weights)
            turned = bmm(x.transpose(0, 1), weights.transpose(1, 2).contiguous().transpose(1, 2))
            for product in (plain, batched.transpose(0, 1), turned.transpose(0, 1)):
                assert bool(product[: rows // 2].isfinite().all()), (inner, bad)
                assert not bool(product[rows // 2 :].isfinite().any()), (inner, bad)


@pytest.mark.parametrize("width", [24, 76, 96])
def test_a_row_of_nan_touches_no_other_row_of_its_experts(width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(64, 2 * width, generator=generator).bfloat16()
    x[32:] = float("nan")
    ids = torch.randint(0, 4, (64, 1), generator=generator)
    gate_up = torch.randn(4, 2 * width, 2 * width, generator=generator).bfloat16()
    down = torch.randn(4, 2 * width, width, generator=generator).bfloat16()
    result = routed_experts(x, ids, torch.ones(64, 1), gate_up, down)
    assert bool(result[:32].isfinite().all())
    assert bool(result[32:].isnan().all())


def test_padding_is_cut_off_again():
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    assert pad_rows(x).shape == (8, 8)
    assert pad_rows(x[:4]) is not None
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    assert linear(x[:0], weight).shape == (0, 3)


def test_rms_norm_is_the_formula_and_reduces_in_float32():
    x, weight = torch.randn(6, 40), torch.rand(40)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.03, rtol=0.02)
    assert bool((rms_norm(torch.zeros(2, 40), weight, 1e-6) == 0).all())


@pytest.mark.parametrize("width", [6, 26, 128])
def test_activations_give_one_value_for_one_input_wherever_it_stands(width):
    x = torch.randn(301, width, generator=torch.Generator().manual_seed(1)) * 4
    whole, activated = sigmoid(x), silu_mul(x)
    for begin, end in ((0, 1), (1, 2), (7, 12), (100, 301), (3, 36)):
        assert torch.equal(sigmoid(x[begin:end].clone()), whole[begin:end])
        assert torch.equal(silu_mul(x[begin:end].clone()), activated[begin:end])
    torch.testing.assert_close(whole, torch.sigmoid(x))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(activated, F.silu(gate) * up)


def test_activations_survive_large_inputs():
    x = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert sigmoid(x)[0, :5].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert silu_mul(x)[0].isfinite().all()
