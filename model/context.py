"""What all layers of one forward share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kernels.page_walk import PageWalk
from pdmesh.kernels.rope import RopeTable
from pdmesh.model.batch import Batch, Form


@dataclass(frozen=True)
class StepContext:
    """One batch over one pool of pages.

    Attributes:
        latents: [num_pages, num_layers, page_size, width], written and read.
        form: which form of attention.
        cos, sin: [num_padded, 1, rope] float32 of the rows' positions.
        interleave: which elements of a rotated vector are pairs.
        walk: pages of every row.
        write_rows, write_slots: [w] batch rows to write, and their flat layer-0 rows of the pool.
        num_rows: rows that are not padding.
    """

    latents: Tensor
    form: Form
    cos: Tensor
    sin: Tensor
    interleave: bool
    walk: PageWalk
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
        longest = max(item.end for item in batch.slices)
        if longest > table.cos.shape[0]:
            raise ValueError(
                f"position {longest - 1} is beyond max_position_embeddings {table.cos.shape[0]}"
            )
        rows, slots = batch.writes(latents.shape[1])
        return StepContext(
            latents=latents,
            form=form,
            cos=torch.index_select(table.cos, 0, batch.padded_positions).unsqueeze(1),
            sin=torch.index_select(table.sin, 0, batch.padded_positions).unsqueeze(1),
            interleave=table.interleave,
            walk=batch.walk(form, first_key),
            write_rows=rows,
            write_slots=slots,
            num_rows=batch.num_rows,
        )
