"""The weights of a model whose matrices stay in FP8, as the operations of `kernels` take them.

Matrices that are multiplied with the same rows stand under each other, each from a row that is a
multiple of 128 on, so that every block of 128 x 128 keeps its scale; the rows between are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK, dequantise_part
from pdmesh.kernels.quantised import BlockWeight


@dataclass(frozen=True)
class Linear:
    """A matrix [n, k] and perhaps a bias [n]."""

    weight: BlockWeight
    bias: Tensor | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """Of one layer.

    Attributes:
        first: what the layer's input is multiplied by: to `first_rows` values that the query is
            made of, zeros up to `latent_at`, then the latent as projected.
        q_norm, q_b: None where the query is `first`'s output itself.
        kv_norm: [rank].
        kv_b: the keys and values of each head from a latent, [heads * (nope + value_dim), rank].
        k_b: its key part, each head's transposed, [heads, rank, nope]; bfloat16 [heads, nope, rank]
            where heads do not begin at blocks.
        v_b: its value part [heads, value_dim, rank], or bfloat16.
        o: [hidden, heads * value_dim].
    """

    first: Linear
    first_rows: int
    latent_at: int
    q_norm: Tensor | None
    q_b: BlockWeight | None
    kv_norm: Tensor
    kv_b: BlockWeight
    k_b: BlockWeight | Tensor
    v_b: BlockWeight | Tensor
    o: Linear


@dataclass(frozen=True)
class MlpWeights:
    """gate over up [2 i, hidden] and down [hidden, i], i a multiple of 128."""

    gate_up: BlockWeight
    down: BlockWeight


@dataclass(frozen=True)
class MoeWeights:
    """The router [experts, hidden] and its bias [experts] float32; experts stacked; shared ones."""

    router: Tensor
    bias: Tensor | None
    gate_up: BlockWeight
    down: BlockWeight
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """Of one layer; the norms are [hidden]."""

    input_norm: Tensor
    post_norm: Tensor
    attention: AttentionWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """Of the MTP layer besides its block: norms [hidden], eh_proj [hidden, 2 hidden] bfloat16."""

    enorm: Tensor
    hnorm: Tensor
    eh_proj: Tensor
    head_norm: Tensor
    layer: LayerWeights


@dataclass(frozen=True)
class ModelWeights:
    """Embedding and head [vocab, hidden] bfloat16, the layers, the last norm, the MTP layer."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    mtp: MtpWeights | None


def round_up(rows: int) -> int:
    """The next multiple of 128."""
    return -(-rows // BLOCK) * BLOCK


def empty_blocks(*shape: int, device: torch.device | str = "cpu") -> BlockWeight:
    """Zeros [..., n, k] with scales of one."""
    *batch, n, k = shape
    values = torch.zeros((*batch, n, k), dtype=torch.uint8, device=device)
    scales = torch.ones((*batch, -(-n // BLOCK), -(-k // BLOCK)), device=device)
    return BlockWeight(values.view(torch.float8_e4m3fn), scales)


def place(target: BlockWeight, part: BlockWeight, row: int = 0) -> None:
    """Copies part [n, k'] into target [n', k], k >= k', from `row`, a multiple of 128, on."""
    n, k = part.values.shape
    target.values[row : row + n, :k].copy_(part.values)
    first = row // BLOCK
    target.scales[first : first + part.scales.shape[0], : part.scales.shape[1]].copy_(part.scales)


def rows_of_blocks(weight: BlockWeight, first: int, rows: int) -> BlockWeight:
    """Rows `first` to `first + rows` of a matrix [n, k], both multiples of 128: the same memory."""
    blocks = slice(first // BLOCK, (first + rows) // BLOCK)
    return BlockWeight(weight.values[first : first + rows], weight.scales[blocks])


def stacked(parts: Sequence[BlockWeight]) -> BlockWeight:
    """Matrices [n_i, k] under each other, all but the last padded with zeros to 128 rows."""
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + round_up(part.values.shape[0]))
    rows = starts[-1] + parts[-1].values.shape[0]
    first = parts[0].values
    result = empty_blocks(rows, first.shape[1], device=first.device)
    for start, part in zip(starts, parts, strict=True):
        place(result, part, start)
    return result


def heads_of(
    kv_b: BlockWeight,
    heads: int,
    nope: int,
    value_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[BlockWeight | Tensor, BlockWeight | Tensor]:
    """The key part, transposed, and the value part of each head of kv_b.

    Args:
        kv_b: [heads * (nope + value_dim), rank], each head's key rows before its value rows.

    Returns:
        [heads, rank, nope] and [heads, value_dim, rank] with the same scales where heads begin and
        end at blocks; else [heads, nope, rank] and [heads, value_dim, rank] in `dtype`.
    """
    rank = kv_b.values.shape[1]
    if nope % BLOCK or value_dim % BLOCK:
        dense = dequantise_part(kv_b.values, kv_b.scales, (0, 0)).to(dtype)
        dense = dense.view(heads, nope + value_dim, rank)
        return dense[:, :nope].contiguous(), dense[:, nope:].contiguous()
    values = kv_b.values.view(torch.uint8).view(heads, nope + value_dim, rank)
    scales = kv_b.scales.view(heads, (nope + value_dim) // BLOCK, -1)
    split = nope // BLOCK
    keys = values[:, :nope].transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
    up = values[:, nope:].contiguous().view(torch.float8_e4m3fn)
    return (
        BlockWeight(keys, scales[:, :split].transpose(1, 2).contiguous()),
        BlockWeight(up, scales[:, split:].contiguous()),
    )


def joined_bias(parts: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor | None:
    """Biases for `stacked` matrices of these rows; None if there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    pieces = []
    for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
        piece = given[0].new_zeros(count) if part is None else part
        last = index == len(parts) - 1
        pieces.append(piece if last else F.pad(piece, (0, round_up(count) - count)))
    return torch.cat(pieces)
