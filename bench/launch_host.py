"""The host's time of Triton launches in a MoE layer of a prompt, without a device.

    python -P bench/launch_host.py --rows 1024

Kernels are compiled for an H200, then launched through Triton with a driver that does nothing, on
tensors of the CPU: what is left is Python, checks, new tensors, Triton's own way from arguments to
a kernel. The driver's part of a launch, and products and attention, which other libraries launch,
are not in it. Prints microseconds of each operation in JSON, medians, and of a layer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from pdmesh.kernels.gate import GateRule  # noqa: E402
from pdmesh.kernels.quantised import Rows, new_scales  # noqa: E402
from pdmesh.kernels.triton import gate, norm, permute, quantise, rope_append  # noqa: E402
from pdmesh.model.config import ModelConfig  # noqa: E402
from pdmesh.model.device.full_width import DEEPSEEK_V3  # noqa: E402

ROUNDS = 400
CAPACITY = 1024
"""Rows of the layout of experts: far fewer than there would be, all of which a CPU would map."""


class NoDriver:
    """What Triton asks of a driver, of an H200 on which nothing happens."""

    def __init__(self) -> None:
        self.utils = self

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_, **__: None

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def calls(config: ModelConfig, rule: GateRule, m: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Operations of a MoE layer on `m` rows: how often, and one call."""
    c, bf16 = config, torch.bfloat16
    hidden, rank, rope = c.hidden_size, c.kv_lora_rank, c.qk_rope_head_dim
    low = c.q_lora_rank or 0

    def empty(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x, residual, weight = empty(m, hidden), empty(m, hidden), empty(hidden)
    both, q_norm, kv_norm = empty(m, low + rank + rope), empty(low), empty(rank)
    query = empty(m, c.num_attention_heads, c.qk_head_dim)[..., c.qk_nope_head_dim :]
    tables = empty(4096, rope, dtype=torch.float32), empty(4096, rope, dtype=torch.float32)
    at = empty(m, dtype=torch.int64), empty(m, dtype=torch.int64)
    pool = empty(64, 8, 64, rank + rope)
    router = empty(rule.num_experts, hidden), empty(rule.num_experts, dtype=torch.float32)
    rows = Rows(empty(m, hidden, dtype=torch.float8_e4m3fn), new_scales(m, hidden // 128))
    latents, gate_up = empty(m, rank + rope)[:, :rank], empty(m, 2 * c.moe_intermediate_size)
    attended = empty(m, c.num_attention_heads * c.v_head_dim)
    routed = gate.gate_topk(x, *router, rule)
    chosen = routed.ids, routed.places, routed.counts
    parts = empty(CAPACITY, hidden)
    return {
        "add_rms_norm_quantise": (
            2,
            lambda: norm.add_rms_norm_quantise(x, residual, weight, 1e-6),
        ),
        "rms_norm_quantise": (1, lambda: norm.rms_norm_quantise(both[:, :low], q_norm, 1e-6)),
        "rope_append": (
            1,
            lambda: rope_append.rope_append(query, both[:, low:], kv_norm, *tables, *at, pool, 3),
        ),
        "quantise_rows of latents": (1, lambda: quantise.quantise_rows(latents)),
        "quantise_rows of values": (1, lambda: quantise.quantise_rows(attended)),
        "gate_topk": (1, lambda: gate.gate_topk(x, *router, rule)),
        "permute_contiguous": (1, lambda: permute.permute_contiguous(rows, *chosen, CAPACITY)),
        "silu_mul_quantise": (2, lambda: quantise.silu_mul_quantise(gate_up)),
        "unpermute": (1, lambda: permute.unpermute(parts, routed.ids, routed.weights)),
    }


def microseconds(call: Callable[[], Any]) -> float:
    """The median of a call, once its kernels are compiled."""
    call()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__, "standard output")
    parser.add_argument("--rows", type=int, default=1024, help="of a chunk")
    options = parser.parse_args(arguments)
    driver.set_active(NoDriver())
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    assert config.gate is not None
    layer = 0.0
    for name, (count, call) in calls(config, config.gate, options.rows).items():
        took = microseconds(call)
        layer += count * took
        print(as_json({"operation": name, "a_layer": count, "us": round(took, 1)}), flush=True)
    print(as_json({"operation": "all of a layer", "rows": options.rows, "us": round(layer, 1)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
