"""Activations that give one value for one input, wherever it stands in the tensor.

torch.sigmoid and F.silu on a CPU use another approximation for the elements left over after the
vector loop, so the same value may come out one bit apart at another offset. exp does not.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise, any shape, float32."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [n, 2 i] holding gate then up: [n, i], in gate_up's dtype.

    SwiGLU (Shazeer 2020, arXiv:2002.05202). Computed in float32.
    """
    half = gate_up.shape[-1] // 2
    values = gate_up.float()
    gate, up = values[..., :half], values[..., half:]
    return (gate / torch.exp(-gate).add_(1.0)).mul_(up).to(gate_up.dtype)
