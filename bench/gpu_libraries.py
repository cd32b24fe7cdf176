"""The operations of a layer through public libraries, each with the arguments of `pdmesh.kernels`.

Imported lazily: a library that is missing, or that refuses a shape, is left out of the tables with
its reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels.quantised import Rows, quantise_rows, unpack_latents


def torch_absorb(query: Tensor, key: Tensor, rotated: Tensor) -> Tensor:
    """bfloat16 batched product; key [heads, nope, rank]."""
    m, heads, _ = query.shape
    rank = key.shape[2]
    output = query.new_empty((m, heads, rank + rotated.shape[2]))
    torch.bmm(query.transpose(0, 1), key, out=output[..., :rank].transpose(0, 1))
    output[..., rank:] = rotated
    return output


def torch_values(latent: Tensor, up: Tensor) -> Rows:
    """bfloat16 batched product, then quantisation; up [heads, rank, value]."""
    m, heads, _ = latent.shape
    output = latent.new_empty((m, heads, up.shape[2]))
    torch.bmm(latent.transpose(0, 1), up, out=output.transpose(0, 1))
    return quantise_rows(output.flatten(1))


class FlashMla:
    """Decode attention of FlashMLA; the schedule of a batch is made once."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, rows: int, scale: float
    ) -> Tensor:
        from pdmesh.kernels.flash_mla_backend import Plan

        key = (lengths.data_ptr(), rows, query.shape[1])
        if key not in self._plans:
            # The lengths are kept: no other batch's may come to lie where they were.
            self._plans[key] = Plan(lengths, rows, query.shape[1]), lengths
        return self._plans[key][0].decode(query, pages, table, lengths, rows, scale)


class FlashInferMla:
    """Decode attention of FlashInfer; the plan of a batch is made once."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, rows: int, scale: float
    ) -> Tensor:
        from pdmesh.kernels.flashinfer_backend import WORKSPACE_BYTES, Decode

        key = (lengths.data_ptr(), rows, query.shape[1])
        if key not in self._plans:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            plan = Decode(workspace, table.shape[0], table.shape[1], graph=True)
            plan.plan(table.cpu(), lengths.cpu(), rows, query.shape[1], pages.shape[1], scale)
            self._plans[key] = plan, lengths
        return self._plans[key][0].run(query, pages)


def attention_reference(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    rows: int,
    scale: float,
    first: int = 4,
) -> Tensor:
    """The first sequences' attention in float32 and as bfloat16, rows causal among themselves.

    `pages` are bfloat16, or packed.
    """
    parts = []
    for sequence in range(min(len(lengths), first)):
        length = int(lengths[sequence])
        latent = pages[table[sequence].long()].flatten(0, 1)[:length]
        latent = unpack_latents(latent) if pages.dtype == torch.uint8 else latent.float()
        mine = query[sequence * rows : (sequence + 1) * rows].float()
        scores = torch.einsum("qhd,kd->qhk", mine, latent) * scale
        reach = length - rows + torch.arange(rows, device=query.device)
        beyond = torch.arange(length, device=query.device)[None] > reach[:, None]
        scores = scores.masked_fill(beyond[:, None, :], float("-inf")).softmax(dim=-1)
        parts.append(torch.einsum("qhk,kd->qhd", scores, latent[:, :512]))
    return torch.cat(parts).to(torch.bfloat16)
