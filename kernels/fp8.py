"""FP8 e4m3 with one scale a block of 128 x 128, the weight format of DeepSeek-V3 checkpoints.

DeepSeek-V3 report (arXiv:2412.19437), section 3.3. A block's scale is its largest magnitude over
448; the stored `weight_scale_inv` is what a stored value is multiplied by. Last blocks may be
partial.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0
BLOCK = 128
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def _block_view(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [n, k] padded with zeros and cut: [n blocks, rows, k blocks, columns] float32."""
    rows, columns = block
    n, k = weight.shape
    num_row_blocks, num_column_blocks = -(-n // rows), -(-k // columns)
    padded = weight.new_zeros(
        (num_row_blocks * rows, num_column_blocks * columns), dtype=torch.float32
    )
    padded[:n, :k] = weight
    return padded.view(num_row_blocks, rows, num_column_blocks, columns)


def block_scales(weight: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Largest finite magnitude of every block over 448, never below the smallest normal float32.

    So an all-zero block has a scale that gives exact zeros back, and values outside of the finite
    numbers do not stretch the scale of their neighbours. weight [n, k]: [n blocks, k blocks].
    """
    magnitudes = _block_view(weight, block).abs()
    finite = magnitudes.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (finite.amax(dim=(1, 3)) / FP8_MAX).clamp_min(_SMALLEST_SCALE)


def quantise_blocks(
    weight: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[Tensor, Tensor]:
    """weight [n, k] to (float8_e4m3fn [n, k], scales [n blocks, k blocks] float32).

    A NaN stays a NaN and an infinity becomes a NaN, in its own element only: FP8 e4m3 has no
    infinity, and storing a finite number for one would hide it.
    """
    scales = block_scales(weight, block)
    scaled = _block_view(weight, block) / scales[:, None, :, None]
    scaled = torch.where(scaled.isfinite(), scaled.clamp(-FP8_MAX, FP8_MAX), torch.nan)
    flat = scaled.flatten(2, 3).flatten(0, 1)
    return flat[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales


def dequantise_blocks(
    quantised: Tensor, scales: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> Tensor:
    """float8_e4m3fn [n, k] times its block's scale: [n, k] float32.

    Raises:
        ValueError: scales does not have one entry for each block.
    """
    n, k = quantised.shape
    expected = (-(-n // block[0]), -(-k // block[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales are {tuple(scales.shape)}, the blocks need {expected}")
    return dequantise_part(quantised, scales, (0, 0), block)


def dequantise_part(
    part: Tensor,
    scales: Tensor,
    start: tuple[int, int],
    block: tuple[int, int] = (BLOCK, BLOCK),
) -> Tensor:
    """A part of a matrix times the scales of the whole: [rows, columns] float32.

    The part may begin and end inside a block, so a shard needs no block grid of its own.

    Args:
        part: float8_e4m3fn [rows, columns] of the matrix.
        scales: of the whole matrix, [n blocks, k blocks].
        start: row and column of the matrix where the part begins.
        block: rows and columns of a block.

    Raises:
        ValueError: the part reaches beyond the blocks that have a scale.
    """
    spread = scales.float()
    for dim in (0, 1):
        first, size = start[dim], part.shape[dim]
        if not 0 <= first <= first + size <= scales.shape[dim] * block[dim]:
            raise ValueError(
                f"{'rows' if dim == 0 else 'columns'} {first} to {first + size} are not all in the "
                f"{scales.shape[dim]} blocks of {block[dim]} that have scales"
            )
        positions = torch.arange(first, first + size, device=scales.device)
        spread = spread.index_select(dim, positions // block[dim])
    return part.float() * spread
