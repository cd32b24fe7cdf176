"""Feed-forward layers: SwiGLU, and routed experts with shared ones beside them."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.linear import linear
from pdmesh.kernels.moe import routed_experts
from pdmesh.model.config import ModelConfig
from pdmesh.model.gate import Gate

MoeImpl = Literal["dense", "grouped"]


class Mlp(nn.Module):
    """down(silu(gate x) * up x), gate and up in one matrix."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, hidden] to [n, hidden]; a row depends on itself."""
        return linear(silu_mul(linear(x, self.gate_up_proj.weight)), self.down_proj.weight)

    def dense(self, x: Tensor) -> Tensor:
        """As forward for x [..., hidden], differentiable."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


class Moe(nn.Module):
    """Routed experts [experts, 2 i, hidden] and [experts, hidden, i], plus shared experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, hidden, size = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.num_experts = count
        self.gate = Gate(config)
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))
        shared = config.n_shared_experts
        self.shared_experts = Mlp(hidden, size * shared) if shared else None

    def forward(self, x: Tensor, num_rows: int) -> Tensor:
        """x [n, hidden] to [n, hidden]; rows from num_rows on are padding and are not routed."""
        rows = x[:num_rows]
        ids, weights = self.gate(x)
        routed = routed_experts(
            rows, ids[:num_rows], weights[:num_rows], self.gate_up_proj, self.down_proj
        )
        if num_rows < x.shape[0]:
            routed = F.pad(routed, (0, 0, 0, x.shape[0] - num_rows))
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def dense(self, x: Tensor, impl: MoeImpl) -> tuple[Tensor, Tensor]:
        """Differentiable: x [..., hidden] to the same shape, and rows per expert [experts] float32.

        impl 'dense' computes every expert for every row and masks; 'grouped' sorts rows by expert.
        """
        rows = x.reshape(-1, x.shape[-1])
        ids, weights = self.gate.dense(rows)
        load = torch.zeros(self.num_experts, device=x.device)
        load = load.scatter_add(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=load.dtype))
        if impl == "dense":
            routed = self._masked(rows, ids, weights)
        else:
            routed = self._grouped(rows, ids, weights, load)
        routed = routed.view(x.shape)
        if self.shared_experts is not None:
            routed = routed + self.shared_experts.dense(x)
        return routed, load

    def _masked(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        full = torch.zeros(rows.shape[0], self.num_experts, device=rows.device)
        full = full.scatter(1, ids, weights)
        gate_up = F.linear(rows, self.gate_up_proj.flatten(0, 1))
        gate, up = gate_up.view(rows.shape[0], self.num_experts, -1).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * full.unsqueeze(-1).to(gate.dtype)
        return F.linear(hidden.flatten(1), self.down_proj.transpose(0, 1).flatten(1))

    def _grouped(self, rows: Tensor, ids: Tensor, weights: Tensor, load: Tensor) -> Tensor:
        device_type = rows.device.type
        dtype = rows.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        order = ids.flatten().argsort(stable=True)
        ends = load.to(torch.int32).cumsum(0, dtype=torch.int32)
        with torch.autocast(device_type=device_type, enabled=False):
            grouped = rows.to(dtype)[order // ids.shape[1]]
            gate_up = self.gate_up_proj.to(dtype).transpose(1, 2)
            gate, up = F.grouped_mm(grouped, gate_up, offs=ends).chunk(2, dim=-1)
            down = self.down_proj.to(dtype).transpose(1, 2)
            output = F.grouped_mm(F.silu(gate) * up, down, offs=ends)
            scaled = output * weights.flatten()[order].unsqueeze(-1).to(dtype)
            total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
            return total.index_add(0, order // ids.shape[1], scaled.float()).to(dtype)
