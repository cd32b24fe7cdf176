"""The operations of the FP8 path, in plain torch: what the kernels for a device are tested by.

DeepSeek-V3 report (arXiv:2412.19437), section 3.3.2: activations in FP8 e4m3 with one scale for 128
values of a row, weights with one scale for a block of 128 x 128, sums in float32.

Rows may be any number, none included. Rows that nobody asked for (padding) may hold anything,
NaN included; no result depends on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.fp8 import BLOCK, FP8_MAX, dequantise_blocks
from pdmesh.kernels.linear import bmm, linear, pad_rows
from pdmesh.kernels.norm import rms_norm

SMALLEST_AMAX = 1e-10
"""A group's largest magnitude counts as no less than this, so that zeros come back as zeros."""
LATENT_BYTES = 656
"""A latent of rank 512 and 64 rotated values in FP8: 512 x e4m3, four float32 scales, 64 x bf16.
In the pages that a model writes the four are the same: see `pack_latents`."""


class Rows(NamedTuple):
    """Quantised rows.

    Attributes:
        values: float8_e4m3fn [..., m, k], contiguous.
        scales: float32 [..., m, ceil(k / 128)], what a value is multiplied by. They lie in memory
            column by column, a column padded to a multiple of four rows (16 bytes: what Hopper's
            bulk copy engine takes): strides (..., 1, m rounded up to four). See `new_scales`.
    """

    values: Tensor
    scales: Tensor


class BlockWeight(NamedTuple):
    """A weight [..., n, k] float8_e4m3fn and its scales [..., ceil(n / 128), ceil(k / 128)]."""

    values: Tensor
    scales: Tensor


def new_scales(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """Empty float32 scales [..., m, groups] in the layout of `Rows`."""
    *batch, rows, groups = shape
    padded = -(-rows // 4) * 4
    memory = torch.empty((*batch, groups, padded), dtype=torch.float32, device=device)
    turned = memory.transpose(-1, -2)
    return turned if rows == padded else turned[..., :rows, :]


def quantise_rows(x: Tensor) -> Rows:
    """x [..., m, k] in any floating dtype to `Rows`; the last group of a row may be partial.

    A scale is the group's largest magnitude over 448, rounded as IEEE 754 has it on every device.
    (Divided by a number of the host's, torch would multiply with its inverse on a GPU.)
    """
    *batch, rows, k = x.shape
    largest = torch.full((), FP8_MAX, device=x.device)
    groups = -(-k // BLOCK)
    wide = torch.nn.functional.pad(x.float(), (0, groups * BLOCK - k))
    wide = wide.view(*batch, rows, groups, BLOCK)
    scales = wide.abs().amax(dim=-1).clamp_min(SMALLEST_AMAX) / largest
    values = (wide / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    stored = new_scales(*batch, rows, groups, device=x.device)
    stored.copy_(scales)
    flat = values.flatten(-2)[..., :k].to(torch.float8_e4m3fn).contiguous()
    return Rows(flat, stored)


def dequantise_rows(rows: Rows) -> Tensor:
    """What `rows` stand for: [..., m, k] float32."""
    k = rows.values.shape[-1]
    return rows.values.float() * rows.scales.repeat_interleave(BLOCK, dim=-1)[..., :k]


def rms_norm_quantise(x: Tensor, weight: Tensor, eps: float) -> tuple[Rows, Tensor]:
    """`rms_norm` of x [m, k] bfloat16, quantised, and the normalised rows themselves [m, k]."""
    normed = rms_norm(x, weight, eps)
    return quantise_rows(normed), normed


def add_rms_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Rows, Tensor]:
    """Adds x [m, k] to `residual` [m, k] in place, then as `rms_norm_quantise` of the sum."""
    residual.add_(x)
    return rms_norm_quantise(residual, weight, eps)


def silu_mul_quantise(gate_up: Tensor) -> Rows:
    """silu(gate) * up of gate_up [m, 2 i], in float32, quantised: [m, i]."""
    return quantise_rows(silu_mul(gate_up.float()))


def masked_silu_mul_quantise(gate_up: Tensor, counts: Tensor) -> Rows:
    """The same of gate_up [experts, rows, 2 i]; counts [experts] int32 on the device.

    Only the first counts[e] rows of expert e are read, and only these are defined in the result.
    """
    return silu_mul_quantise(gate_up)


def fp8_gemm(x: Rows, weight: BlockWeight) -> Tensor:
    """x [m, k] times weight [n, k] transposed, sums in float32: [m, n] bfloat16.

    On a CPU a row's result depends on that row alone.
    """
    dense = dequantise_blocks(weight.values, weight.scales)
    return linear(dequantise_rows(x), dense).to(torch.bfloat16)


def masked_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    counts: Tensor,
    expected: int,
    used: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """For each expert e the first counts[e] rows: x [experts, rows, k], weight [experts, n, k].

    Args:
        counts: [experts] int32, on the device.
        expected: rows of an expert that are likely; a hint.
        used: no more experts than these have rows, by all means; 0: any may.
        out: what is returned, if given.

    Returns:
        [experts, rows, n] bfloat16; rows from counts[e] on are undefined.
    """
    outputs = [
        fp8_gemm(Rows(x.values[e], x.scales[e]), BlockWeight(weight.values[e], weight.scales[e]))
        for e in range(weight.values.shape[0])
    ]
    return torch.stack(outputs, out=out)


def contiguous_grouped_gemm(
    x: Rows,
    weight: BlockWeight,
    row_expert: Tensor,
    expected: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rows x [m, k] grouped by expert; weight [experts, n, k]: [m, n] bfloat16.

    Args:
        row_expert: [m] int32, each row's expert, -1 for padding, whose result is undefined. An
            expert's rows begin at a multiple of 128.
        expected: rows of an expert that are likely; a hint. 0: many.
        out: what is returned, if given.
    """
    shape = (x.values.shape[0], weight.values.shape[1])
    output = x.values.new_empty(shape, dtype=torch.bfloat16) if out is None else out
    for expert in range(weight.values.shape[0]):
        chosen = row_expert == expert
        one = BlockWeight(weight.values[expert], weight.scales[expert])
        output[chosen] = fp8_gemm(Rows(x.values[chosen], x.scales[chosen]), one)
    return output


def absorb_query(query: Tensor, weight: BlockWeight, rotated: Tensor, scale: float) -> Tensor:
    """The query of absorbed attention.

    Args:
        query: [m, heads, nope] bfloat16.
        weight: the key projection transposed, values [heads, rank, nope], one scale a 128 x 128.
        rotated: [m, heads, rope] bfloat16.
        scale: the softmax scale, if it is to be multiplied in; else 1.

    Returns:
        [m, heads, rank + rope] bfloat16.
    """
    key = torch.stack([dequantise_blocks(w, s) for w, s in zip(*weight, strict=True)])
    latent = _by_heads(query, key)
    return (torch.cat([latent, rotated.float()], dim=-1) * scale).to(torch.bfloat16)


def project_values_quantise(latent: Tensor, weight: BlockWeight) -> Rows:
    """What heads saw to their values, quantised for o_proj.

    Args:
        latent: [m, heads, rank] bfloat16.
        weight: the value projection, values [heads, value_dim, rank].

    Returns:
        values [m, heads * value_dim] and one scale for 128 of them.
    """
    up = torch.stack([dequantise_blocks(w, s) for w, s in zip(*weight, strict=True)])
    return quantise_rows(_by_heads(latent, up).flatten(1))


def _by_heads(x: Tensor, weights: Tensor) -> Tensor:
    """x [m, heads, k] times weights [heads, n, k] transposed: [m, heads, n] float32."""
    wide = pad_rows(x.float()).transpose(0, 1)
    return bmm(wide, weights.transpose(1, 2)).transpose(0, 1)[: x.shape[0]]


def pack_latents(latent: Tensor, shared_scale: bool = True) -> Tensor:
    """latent [..., 576] to bytes [..., 656] uint8: FP8 values, a scale for each 128, bf16 rope.

    A latent's four scales are the same, that of its 512 values together, so that a kernel may use
    one of them; pages hold no other form. Without `shared_scale` each is that of its own 128
    values. One scale costs range, not precision: e4m3 keeps its relative error down to 1/28672 of
    the largest value.
    """
    values = latent[..., :512].reshape(-1, 512).float()
    if shared_scale:
        largest = torch.full((), FP8_MAX, device=values.device)
        scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_AMAX) / largest
        quantised = (values / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        rows = Rows(quantised, scale.repeat(1, 4))
    else:
        rows = quantise_rows(values)
    parts = [
        rows.values.view(torch.uint8),
        rows.scales.contiguous().view(torch.uint8),
        latent[..., 512:].reshape(-1, 64).to(torch.bfloat16).contiguous().view(torch.uint8),
    ]
    return torch.cat(parts, dim=-1).view(*latent.shape[:-1], LATENT_BYTES)


def unpack_latents(packed: Tensor) -> Tensor:
    """What `pack_latents` packed: [..., 576] float32."""
    flat = packed.reshape(-1, LATENT_BYTES)
    values = flat[:, :512].contiguous().view(torch.float8_e4m3fn)
    scales = flat[:, 512:528].contiguous().view(torch.float32)
    rope = flat[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([dequantise_rows(Rows(values, scales)), rope], dim=-1).view(
        *packed.shape[:-1], 576
    )
