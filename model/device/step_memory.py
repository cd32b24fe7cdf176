"""What a step takes of a device's memory beside weights and pages: what `Layers` holds at a time.
Pure.

The tensors are those of the kernels of a device; `tests/test_step_memory.py` follows the steps of a
model without numbers tensor by tensor and holds each count against what was there at most.
"""

from __future__ import annotations

import math

from pdmesh.kernels.flashinfer_backend import WORKSPACE_BYTES
from pdmesh.kernels.routing import contiguous_capacity
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.spread import Exchange
from pdmesh.model.device.step import HEADS, MOST_KEYS, heads_at_once
from pdmesh.model.device.weights import round_up

_ALWAYS_BYTES = WORKSPACE_BYTES + (128 << 20)
"""What libraries keep on a device: FlashInfer's workspace, 32 MiB of cuBLAS for each of two
streams, as much of the split products."""
PLAN_BYTES = 8 << 20
"""What FlashInfer keeps for each part of a step in MHA form."""
_PROCESSORS, _PAIRS = 132, 64
"""Of an H200, and (row, head) pairs of a thread block of absorbed attention."""
_ABSORBED_ROWS = 256
"""More of a sequence are never computed in absorbed form: see `prefill_form`."""


def step_bytes(
    config: ModelConfig,
    rows: int,
    chosen: int,
    exchange: Exchange | None = None,
    *,
    keys: int = 0,
    captured: bool = False,
) -> int:
    """Bytes that the largest of a worker's steps needs.

    Args:
        rows: of the largest step. A smaller one may take more: up to `MASKED_ROWS` rows every
            expert has room for all of them.
        chosen: rows whose logits are wanted.
        exchange: of a rank, with the others: what it keeps, and what experts make of all rows.
        keys: the most of a sequence in MHA form; 0: no step has that form.
        captured: steps are graphs, which keep what they take, beside what the same steps take
            kernel by kernel: when they are captured, and where no graph fits.
    """
    if exchange is None:
        sizes = {rows, min(rows, MASKED_ROWS)}
        layers = [_layer_bytes(config, m, keys) for m in sizes]
    else:
        layers = [_rank_bytes(config, rows, keys, exchange)]
    logits = chosen * config.vocab_size * (2 + 4 + 4)  # the product, in float32, those picked
    kept = 0 if exchange is None else exchange.nbytes
    tables = 2 * 4 * config.max_position_embeddings * config.qk_rope_head_dim
    # Nothing is given back while there are graphs: both layouts have their pieces, and some do not
    # fit into others, up to a quarter.
    graphs = sum(layers) * 5 // 4 if captured else 0
    return kept + tables + graphs + max(*layers, logits)


def library_bytes(prompts: int, exchange: Exchange | None = None) -> int:
    """Bytes that libraries keep on a device.

    Args:
        prompts: of a step in MHA form: each may be a part of it; 0: no step has that form.
        exchange: of a rank, which plans a batch and its halves, one prompt in both of these.
    """
    halved = prompts > 0 and exchange is not None and exchange.lanes > 1
    return _ALWAYS_BYTES + PLAN_BYTES * (2 * prompts + 1 if halved else prompts)


def _layer_bytes(c: ModelConfig, rows: int, keys: int) -> int:
    """Of a step of exactly so many rows.

    Hidden states (residual, output, normed, quantised, before the MTP layer), and the largest of
    what follows one another in a layer.
    """
    mlp = 5 * rows * round_up(c.intermediate_size)
    return 16 * rows * c.hidden_size + max(
        _attention_bytes(c, rows, keys), mlp, expert_bytes(c, rows)
    )


def _rank_bytes(c: ModelConfig, rows: int, keys: int, exchange: Exchange) -> int:
    """One microbatch attends while experts compute for the other, so these are added up."""
    routed = exchange.lanes * math.prod(exchange.size.layout)
    expert_row = 5 * round_up(c.moe_intermediate_size)
    if not exchange.size.capacity:
        expert_row += 3 * c.hidden_size  # else the exchange has rows and outputs
    dense = rows * (16 * c.hidden_size + 5 * round_up(c.intermediate_size))
    return _attention_bytes(c, rows, keys) + routed * expert_row + dense


def _attention_bytes(c: ModelConfig, rows: int, keys: int) -> int:
    """The projected query, again for a part of the rows, and what its form of attention makes."""
    heads, rank = c.num_attention_heads, c.kv_lora_rank
    first = 3 * (round_up(c.q_lora_rank or 0) + c.latent_width)
    projected = rows * (first + 4 * heads * c.qk_head_dim)
    splits = (rows + min(rows, _ABSORBED_ROWS)) * heads + _PROCESSORS * _PAIRS
    absorbed = rows * heads * 2 * (c.latent_width + rank + c.v_head_dim) + splits * 4 * (rank + 1)
    mha = 0
    if keys:
        mha = rows * heads * (2 * c.qk_head_dim + 5 * c.v_head_dim) + _key_bytes(c, keys)
    return projected + max(absorbed, mha)


def _key_bytes(c: ModelConfig, keys: int) -> int:
    """Latents of the keys, the same quantised, and then keys and values of heads; or before it
    packed latents in float32."""
    heads, most = c.num_attention_heads, max(keys, MOST_KEYS)
    pairs = max(min(keys * heads, MOST_KEYS * HEADS), keys * heads_at_once(c, keys))
    each = 2 * (c.qk_nope_head_dim + c.v_head_dim + c.qk_head_dim)
    latents = 3 * most * c.latent_width
    return latents + max(max(pairs, MOST_KEYS * heads) * each, 16 * most * c.latent_width)


def expert_bytes(c: ModelConfig, rows: int) -> int:
    """Of a step of exactly so many rows, what experts take: of each of their rows the row in FP8,
    whose memory its activation has after it, and the larger of both products, which share theirs.
    """
    if c.gate is None:
        return 0
    if rows <= MASKED_ROWS:
        routed = c.n_routed_experts * round_up(rows)
    else:
        routed = contiguous_capacity(rows, c.gate.top_k, c.n_routed_experts)
    size = c.moe_intermediate_size
    given = max(_quantised(c.hidden_size), _quantised(round_up(size)))
    shared = 5 * rows * round_up(size * c.n_shared_experts)
    return max(routed * (given + 2 * max(2 * round_up(size), c.hidden_size)), shared)


def _quantised(columns: int) -> int:
    return columns + 4 * -(-columns // 128)
