"""Rows for the tests of quantising kernels, and how two results are compared."""

import torch

from pdmesh.kernels.quantised import Rows, dequantise_rows


def rows_with_extremes(m, k, seed=0, dtype=torch.bfloat16):
    """Random [m, k] with groups of zeros, of tiny and of large values."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    if m:
        x[m // 2, : min(k, 128)] = 0.0
        x[-1] *= 1e-6
        x[0, -1] = 300.0
    return x.to(dtype)


def padded_rows_of(x):
    """Whether the scales lie column by column, a column padded to a multiple of four rows."""
    m, groups = x.scales.shape[-2:]
    *batch, row, column = x.scales.stride()
    padded = -(-m // 4) * 4
    fits = column == padded or groups == 1
    return m == 0 or (row == 1 or m == 1) and fits and (not batch or batch[0] == groups * padded)


def assert_rows_close(got: Rows, want: Rows, part: float = 1e-2) -> None:
    """Equal scales but for rounding, and values equal but for a `part` of them, one step apart."""
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0)
    ours, theirs = got.values.float(), want.values.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    torch.testing.assert_close(ours, theirs, rtol=1 / 8, atol=2.0**-9, equal_nan=True)
    differing = (ours != theirs) & ~ours.isnan()
    assert int(differing.sum()) <= part * differing.numel()
    if got.values.dim() == 2:
        whole = dequantise_rows(want).nan_to_num()
        error = (dequantise_rows(got).nan_to_num() - whole).norm()
        assert float(error) <= 2e-2 * float(whole.norm())
