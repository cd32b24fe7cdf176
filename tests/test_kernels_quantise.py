"""Norms and SwiGLU that quantise, in Triton's interpreter, beside their definitions."""

import pytest
import torch
from quantised_cases import assert_rows_close, padded_rows_of, rows_with_extremes

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import quantised as definition  # noqa: E402
from pdmesh.kernels.quantised import Rows, dequantise_rows, new_scales  # noqa: E402
from pdmesh.kernels.triton import norm, quantise  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")
EPS = 1e-6
SHAPES = [(0, 256), (1, 128), (3, 300), (5, 64), (9, 1024)]


def poisoned(*shape):
    """Rows that hold NaN everywhere."""
    scales = new_scales(*shape[:-1], -(-shape[-1] // 128)).fill_(torch.nan)
    return Rows(torch.full(shape, torch.nan).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize(("m", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_rows_are_quantised_with_a_scale_for_128_values(m, k, dtype):
    x = rows_with_extremes(m, k, dtype=dtype)
    got = quantise.quantise_rows(x, out=poisoned(m, k))
    assert_rows_close(got, definition.quantise_rows(x))
    assert padded_rows_of(quantise.quantise_rows(x))


def test_batches_of_rows_and_views_of_wider_rows_are_quantised():
    x = rows_with_extremes(12, 512).view(2, 6, 512)[:, :5, 100:400]
    got = quantise.quantise_rows(x)
    assert padded_rows_of(got)
    assert_rows_close(got, definition.quantise_rows(x))


def test_zeros_come_back_as_zeros():
    got = quantise.quantise_rows(torch.zeros(2, 256))
    assert bool((dequantise_rows(got) == 0).all())
    assert bool((got.scales > 0).all())


def test_a_wide_row_is_shared_by_several_programs():
    x = rows_with_extremes(2, 65 * 128 + 20)
    assert_rows_close(quantise.quantise_rows(x), definition.quantise_rows(x))


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_rows_are_normalised_and_quantised(m, k):
    x, weight = rows_with_extremes(m, k), rows_with_extremes(1, k, 1)[0]
    normed_out = torch.full((m, k), torch.nan, dtype=torch.bfloat16)
    got, normed = norm.rms_norm_quantise(x, weight, EPS, out=poisoned(m, k), normed_out=normed_out)
    want, want_normed = definition.rms_norm_quantise(x, weight, EPS)
    assert normed is normed_out
    torch.testing.assert_close(normed, want_normed, rtol=2**-7, atol=1e-7)
    assert_rows_close(got, want, 2e-2)


@pytest.mark.parametrize(("m", "k"), SHAPES)
@pytest.mark.parametrize("with_normed", [True, False])
def test_a_sum_is_kept_and_normalised(m, k, with_normed):
    x, residual, weight = (rows_with_extremes(n, k, i) for i, n in enumerate((m, m, 1)))
    want_sum = residual.clone()
    want, want_normed = definition.add_rms_norm_quantise(x, want_sum, weight[0], EPS)
    got, normed = norm.add_rms_norm_quantise(x, residual, weight[0], EPS, with_normed=with_normed)
    assert torch.equal(residual, want_sum)
    assert_rows_close(got, want, 2e-2)
    assert padded_rows_of(got)
    assert normed.shape[0] == (m if with_normed else 0)
    if with_normed:
        torch.testing.assert_close(normed, want_normed, rtol=2**-7, atol=1e-7)


def test_a_program_may_have_several_rows():
    x, residual, weight = (rows_with_extremes(n, 300, i) for i, n in enumerate((9, 9, 1)))
    want, _ = norm.add_rms_norm_quantise(x, residual.clone(), weight[0], EPS)
    got, _ = norm.add_rms_norm_quantise(x, residual.clone(), weight[0], EPS, programs=1)
    assert torch.equal(got.values.float(), want.values.float())
    assert torch.equal(got.scales, want.scales)


def test_the_first_columns_of_wider_rows_are_normalised_where_they_stand():
    both, weight = rows_with_extremes(5, 256 + 72), rows_with_extremes(1, 256, 1)[0]
    got, _ = norm.rms_norm_quantise(both[:, :256], weight, EPS)
    want, _ = definition.rms_norm_quantise(both[:, :256], weight, EPS)
    assert_rows_close(got, want, 2e-2)


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_swiglu_is_quantised(m, k):
    gate_up = rows_with_extremes(m, 2 * k)
    got = quantise.silu_mul_quantise(gate_up, out=poisoned(m, k))
    assert_rows_close(got, definition.silu_mul_quantise(gate_up))
    assert padded_rows_of(quantise.silu_mul_quantise(gate_up))


def test_a_wide_swiglu_is_shared_by_several_programs():
    gate_up = rows_with_extremes(2, 2 * 17 * 128)
    assert_rows_close(quantise.silu_mul_quantise(gate_up), definition.silu_mul_quantise(gate_up))


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 0, 5), (7, 7, 7), (0, 1, 0), (1, 9, 2)])
@pytest.mark.parametrize("k", [200, 2200])
def test_rows_beyond_an_experts_count_are_neither_read_nor_written(counts, k):
    rows = 7
    gate_up = rows_with_extremes(3 * rows, 2 * k).view(3, rows, 2 * k)
    used = torch.arange(rows) < torch.tensor(counts)[:, None]
    gate_up[~used] = torch.nan
    want = definition.silu_mul_quantise(gate_up)
    out = poisoned(3, rows, k)
    got = quantise.masked_silu_mul_quantise(
        gate_up, torch.tensor(counts, dtype=torch.int32), out=out
    )
    assert got is out
    assert bool(got.values.float()[~used].isnan().all())
    assert bool(got.scales[~used].isnan().all())
    assert_rows_close(
        Rows(got.values[used], got.scales[used]), Rows(want.values[used], want.scales[used])
    )


def test_a_row_of_nan_spoils_no_other_row():
    x = rows_with_extremes(4, 256)
    weight = torch.ones(256, dtype=torch.bfloat16)
    want, _ = norm.rms_norm_quantise(x, weight, EPS)
    x[2] = torch.nan
    got, normed = norm.rms_norm_quantise(x, weight, EPS)
    assert bool(got.values[2].float().isnan().all())
    assert bool(normed[2].isnan().all())
    for row in (0, 1, 3):
        assert torch.equal(got.values[row].float(), want.values[row].float())
        assert torch.equal(got.scales[row], want.scales[row])


def test_what_does_not_fit_is_refused():
    x = rows_with_extremes(4, 256)
    with pytest.raises(ValueError, match="out holds"):
        quantise.quantise_rows(x, out=poisoned(4, 128))
    with pytest.raises(ValueError, match="consecutive"):
        quantise.quantise_rows(x.t())
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm_quantise(x, torch.ones(256), EPS)
    with pytest.raises(ValueError, match="gate and up"):
        quantise.silu_mul_quantise(x[:, :255])
