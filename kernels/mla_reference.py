"""Attention over latents, as a batch of a step has it, in float64: what fast kernels are tested by.

DeepSeek-V2 (arXiv:2405.04434), section 2.1, in absorbed form (`mla_decode`) and in MHA form
(`mla_prefill`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdmesh.kernels.quantised import unpack_latents


def mla_decode(
    query: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    rows: int,
    scale: float,
    *,
    rank: int = 512,
    first_key: int = 0,
) -> Tensor:
    """Attention of the last `rows` tokens of every sequence, in absorbed form.

    Args:
        query: [n * rows, heads, rank + rope] bfloat16, absorbed, not scaled; a sequence's rows
            stand together, the last token's row last.
        pages: one layer's [num_pages, page_size, rank + rope] bfloat16, or [..., 656] uint8 as
            `pack_latents` writes them. May be a view that is not contiguous.
        page_table: [n, max_pages] int32; entries beyond a sequence's length may hold anything.
        lengths: [n] int32, tokens of each sequence with the `rows` last ones; 0 for padding.
        rows: query rows of each sequence. Row j sees the first length - (rows - 1 - j) tokens.
        scale: what scores are multiplied by.
        rank: values of a latent that are not rotated.
        first_key: tokens before it are not read, whatever stands there.

    Returns:
        [n * rows, heads, rank] bfloat16; rows that see nothing are zeros.
    """
    output = query.new_zeros((query.shape[0], query.shape[1], rank))
    page_size = pages.shape[1]
    for sequence, length in enumerate(lengths.tolist()):
        table = page_table[sequence, : -(-length // page_size)].long()
        latents = pages[table].flatten(0, 1)[:length]
        wide = unpack_latents(latents) if pages.dtype == torch.uint8 else latents
        wide = wide.double()
        for j in range(rows):
            seen = length - (rows - 1 - j)
            if seen > first_key:
                row = sequence * rows + j
                keys = wide[first_key:seen]
                scores = query[row].double() @ keys.t() * scale
                output[row] = (scores.softmax(dim=-1) @ keys[:, :rank]).to(output.dtype)
    return output


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention in MHA form over ragged rows; a chunk's queries are its last keys.

    Args:
        query: [total_q, heads, nope + rope] bfloat16.
        key: [total_k, heads, nope + rope] bfloat16, cached prefix and chunk of each sequence.
        value: [total_k, heads, v] bfloat16.
        query_starts, key_starts: [n + 1] int32: where each sequence's rows begin. A sequence has at
            least as many keys as queries; its query i sees the first keys - queries + i + 1.
        scale: what scores are multiplied by.

    Returns:
        [total_q, heads, v] bfloat16.
    """
    output = torch.empty_like(query[..., : value.shape[-1]])
    for q0, q1, k0, k1 in zip(
        query_starts[:-1].tolist(),
        query_starts[1:].tolist(),
        key_starts[:-1].tolist(),
        key_starts[1:].tolist(),
        strict=True,
    ):
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1].double(), key[k0:k1].double()) * scale
        ahead = torch.arange(k1 - k0, device=key.device) > torch.arange(
            k1 - k0 - (q1 - q0), k1 - k0, device=key.device
        ).unsqueeze(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
        output[q0:q1] = torch.einsum("hqk,khd->qhd", weights, value[k0:k1].double()).to(
            output.dtype
        )
    return output
