"""What all layers of one forward share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.rope import RopeTable
from pdmesh.model.batch import AttentionPart, Batch, Form


@dataclass(frozen=True)
class StepContext:
    """One batch over one pool of pages.

    Attributes:
        latents: [num_pages, num_layers, page_size, width], written and read.
        cos, sin: [num_padded, 1, rope] float32 of the rows' positions.
        interleave: which elements of a rotated vector are pairs.
        parts: the rows of each form of attention.
        merge: [num_padded] int64, where each batch row stands in the concatenated parts (padding
            rows: where row 0 does); None if there is one part.
        write_rows, write_slots: [w] batch rows to write, and their flat layer-0 rows of the pool.
        num_rows: rows that are not padding.
    """

    latents: Tensor
    cos: Tensor
    sin: Tensor
    interleave: bool
    parts: tuple[AttentionPart, ...]
    merge: Tensor | None
    write_rows: Tensor
    write_slots: Tensor
    num_rows: int

    @staticmethod
    def build(
        batch: Batch, latents: Tensor, table: RopeTable, form: Form, first_key: int
    ) -> "StepContext":
        """Look up everything once for `batch`.

        Raises:
            ValueError: the pool has another page size than the batch, or a position is too large.
        """
        if latents.shape[2] != batch.page_size:
            raise ValueError(
                f"latents have pages of {latents.shape[2]}, the batch of {batch.page_size}"
            )
        if batch.last_position >= table.cos.shape[0]:
            raise ValueError(
                f"position {batch.last_position} is beyond max_position_embeddings "
                f"{table.cos.shape[0]}"
            )
        rows, slots = batch.writes(latents.shape[1])
        parts = batch.attention(form, first_key)
        return StepContext(
            latents=latents,
            cos=torch.index_select(table.cos, 0, batch.padded_positions).unsqueeze(1),
            sin=torch.index_select(table.sin, 0, batch.padded_positions).unsqueeze(1),
            interleave=table.interleave,
            parts=parts,
            merge=_merge(parts, batch),
            write_rows=rows,
            write_slots=slots,
            num_rows=batch.num_rows,
        )


def _merge(parts: tuple[AttentionPart, ...], batch: Batch) -> Tensor | None:
    chosen = [part.rows for part in parts if part.rows is not None]
    if not chosen:
        return None
    rows = torch.cat(chosen)
    merge = torch.zeros_like(batch.padded_tokens)
    merge[rows] = torch.arange(rows.shape[0], device=rows.device)
    return torch.where(
        torch.arange(merge.shape[0], device=rows.device) < batch.num_rows, merge, merge[0]
    )
