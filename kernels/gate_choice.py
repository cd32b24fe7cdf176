"""The gate on a device: in clusters where that form fits, else Triton's.

Within either form a row's logits have the same bits however many rows there are; between the two
sums are added in another order.
"""

from __future__ import annotations

from torch import Tensor

from pdmesh.kernels import cuda_gate
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.routing import Routing

MOST_ROWS = 256
"""Of more, not all clusters run at a time: 512 rows took 18.0 us, by Triton 16.7; 256 took 9.8 and
12.6. bench/gpu_small.py --only gate --tune on one H200."""


def gate_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: GateRule,
    num_rows: Tensor | None = None,
) -> Routing:
    """`routing.gate_topk` of x [m, hidden] bfloat16 on a device.

    By `cuda_gate` for DeepSeek-V3's rule, a weight in bfloat16 and up to `MOST_ROWS` rows, whose
    launch begins while the one ahead ends; by `triton.gate` for all else.
    """
    if bias is not None and why_not_clusters(x.shape[0], weight, rule) is None:
        return cuda_gate.gate_topk(x, weight, bias, rule, num_rows, dependent=True)
    from pdmesh.kernels.triton.gate import gate_topk as by_triton

    return by_triton(x, weight, bias, rule, num_rows)


def compilation(weight: Tensor, rule: GateRule) -> Compilation | None:
    """What the first use with few rows compiles, if it does so without a device."""
    return cuda_gate.compilation() if why_not_clusters(1, weight, rule) is None else None


def why_not_clusters(rows: int, weight: Tensor, rule: GateRule) -> str | None:
    """Why the form in clusters does not take this, in a sentence; None if it does."""
    if weight.dtype.itemsize != 2:
        return f"it takes a weight in bfloat16, not {weight.dtype}"
    if rows > MOST_ROWS:
        return f"Triton's is faster for more than {MOST_ROWS} rows"
    return cuda_gate.unavailable() or cuda_gate.unsupported(rule, rows)
