"""Matrix products whose rows do not depend on how many rows there are.

A CPU library picks another inner loop for the rows left over after its tiles, so one row alone may
differ in the last bit from the same row in a larger matrix. Measured with torch on AVX-512: a row
is bitwise the same once the number of rows and the length of the sums are multiples of four, for
every matrix size tried. `varying_shapes` tries the processor at hand.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4
INNER_MULTIPLE = 4
_HALF_TILE = 32
"""Sums of 16-bit numbers are taken in tiles of this length (AMX, 64 bytes a tile row). Of a shorter
last tile a CPU library reads on into the next row and multiplies that by zero, which a NaN or an
infinity in the next row survives: measured with torch 2.13 on Sapphire Rapids."""


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
    if reads_on(x):
        wide = linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    if x.device.type != "cpu" or x.shape[0] % ROW_MULTIPLE == 0:
        return F.linear(x, weight, bias)
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]


def bmm(x: Tensor, weights: Tensor) -> Tensor:
    """x [b, n, k] times weights [b, k, m]: [b, n, m], a row for itself as far as ``linear``'s.

    The number of rows is the caller's to pad.
    """
    if reads_on(x):
        return torch.bmm(x.float(), weights.float()).to(x.dtype)
    return torch.bmm(x, weights)


def reads_on(x: Tensor) -> bool:
    """Whether a product with x [..., k] may look into the row after each row: then in float32."""
    return x.device.type == "cpu" and x.element_size() < 4 and x.shape[-1] % _HALF_TILE != 0


def varying_shapes(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> list[tuple[int, int]]:
    """Those (outputs, inputs) of weights for which a row varies with its neighbours on this CPU.

    Tries 1 to 65 random rows at several offsets; an empty list is what `linear` promises.
    """
    generator = torch.Generator().manual_seed(0)
    varying = []
    for outputs, inputs in shapes:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x = torch.randn(65, inputs, generator=generator).to(dtype)
        whole = linear(x, weight)
        spans = [(i, i + 1) for i in range(0, 65, 9)] + [(0, 2), (3, 8), (31, 64), (1, 65)]
        if not all(torch.equal(linear(x[a:b], weight), whole[a:b]) for a, b in spans):
            varying.append((outputs, inputs))
    return varying
