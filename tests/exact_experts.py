"""Experts in FP8 whose products are exact enough to have the same bits wherever a row stands."""

from __future__ import annotations

import torch

from pdmesh.kernels.backends import PLAIN, Backends, Choice
from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.kernels.moe import weighted_sum
from pdmesh.kernels.quantised import (
    BlockWeight,
    Rows,
    dequantise_rows,
    quantise_rows,
    silu_mul_quantise,
)


class ExactExperts:
    """Experts in FP8 whose products are summed in float64: the same bits whoever stands around."""

    def __init__(self, experts, hidden, width, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)

        def weight(n, k):
            wide = torch.randn(experts, n, k, generator=generator)
            scales = torch.rand(experts, -(-n // 128), -(-k // 128), generator=generator) * 0.05
            return BlockWeight(wide.to(torch.float8_e4m3fn).to(device), scales.to(device))

        self.gate_up, self.down = weight(2 * width, hidden), weight(hidden, width)
        self.ops = self.ops_with(contiguous_grouped_gemm=self.grouped)

    @staticmethod
    def ops_with(**calls):
        """The definitions of all operations, but for `calls`."""
        return Backends([Choice(op, "", "", calls.get(op, plain)) for op, plain in PLAIN.items()])

    @staticmethod
    def product(x, values, scales):
        return (dequantise_rows(x).double() @ dequantise_blocks(values, scales).double().t()).to(
            torch.bfloat16
        )

    def grouped(self, x, weight, row_expert, expected=128, *, out=None):
        if out is None:
            out = x.scales.new_empty(x.values.shape[0], weight.values.shape[1]).bfloat16()
        out.fill_(torch.nan)
        for expert in range(weight.values.shape[0]):
            at = row_expert == expert
            picked = Rows(x.values[at], x.scales[at])
            out[at] = self.product(picked, weight.values[expert], weight.scales[expert])
        return out

    def held(self, experts):
        """The weights of a rank that holds `experts`."""
        chosen = torch.tensor(experts, dtype=torch.int64, device=self.down.values.device)
        return [
            BlockWeight(
                w.values.view(torch.uint8)[chosen].view(torch.float8_e4m3fn), w.scales[chosen]
            )
            for w in (self.gate_up, self.down)
        ]

    def one_rank(self, rows, ids, weights):
        """EP1: every row by itself, quantised in the same places."""
        back = rows.new_zeros(*ids.shape, rows.shape[1])
        for row, choice in (ids >= 0).nonzero().tolist():
            expert = int(ids[row, choice])
            x = quantise_rows(rows[row : row + 1])
            both = self.product(x, self.gate_up.values[expert], self.gate_up.scales[expert])
            hidden = silu_mul_quantise(both)
            made = self.product(hidden, self.down.values[expert], self.down.scales[expert])
            back[row, choice] = made[0]
        return weighted_sum(back, weights.masked_fill(ids < 0, 0.0))
