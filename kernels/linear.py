"""Matrix products whose rows do not depend on how many rows there are.

A CPU library picks another inner loop for the rows left over after its tiles, so one row alone may
differ in the last bit from the same row in a larger matrix. Measured with torch on AVX-512: every
row is bitwise the same once the number of rows is a multiple of four, for any matrix size tried.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4


def padded_rows(num_rows: int) -> int:
    """The next multiple of ROW_MULTIPLE (0 stays 0)."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """x [n, ...] with zero rows appended up to a multiple of ROW_MULTIPLE; x itself if it fits."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, k] times weight [m, k] transposed, plus bias [m]: [n, m] in the dtype of x.

    On a CPU a row's result depends on that row alone. On CUDA this is the library's product as it
    is, which may pick another kernel for another number of rows.
    """
    if x.device.type != "cpu" or x.shape[0] % ROW_MULTIPLE == 0:
        return F.linear(x, weight, bias)
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]
