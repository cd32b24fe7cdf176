"""What rows look like on the wire between ranks.

Rounding for the wire is part of the arithmetic: a single rank, which has no wire, rounds at the
same two places, so that the number of ranks changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK, dequantise_blocks, quantise_blocks


@dataclass(frozen=True)
class WireFormat:
    """How rows travel.

    Attributes:
        dispatch: "compute": as they are; "fp8": e4m3 with a float32 scale for every 128 values of a
            row.
        combine: "compute": as the experts give them; "bf16".
    """

    dispatch: Literal["compute", "fp8"] = "compute"
    combine: Literal["compute", "bf16"] = "compute"

    def pack_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """rows [n, h] as dispatch sends them: (rows,), or (fp8 rows, scales [n, ceil(h / 128)])."""
        if self.dispatch == "compute":
            return (rows,)
        if not rows.shape[0]:
            width = -(-rows.shape[1] // BLOCK)
            return rows.to(torch.float8_e4m3fn), rows.new_empty((0, width), dtype=torch.float32)
        return quantise_blocks(rows, (1, BLOCK))

    def unpack_rows(self, packed: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What `pack_rows` gave, as [n, h] in `dtype`."""
        if self.dispatch == "compute":
            return packed[0]
        if not packed[0].shape[0]:
            return packed[0].to(dtype)
        return dequantise_blocks(packed[0], packed[1], (1, BLOCK)).to(dtype)

    def pack_outputs(self, outputs: Tensor) -> Tensor:
        """Experts' outputs [..., h] as combine sends them."""
        return outputs if self.combine == "compute" else outputs.to(torch.bfloat16)
