"""The plain torch definition of every operation, under one name: what fast versions are tested by.

Each is written, with shapes, dtypes and source, in the file named after it.
"""

from pdmesh.kernels.activation import sigmoid, silu_mul
from pdmesh.kernels.fp8 import block_scales, dequantise_blocks, quantise_blocks
from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.latent_attention import (
    absorbed_attention,
    mha_attention,
    project_keys,
    project_values,
)
from pdmesh.kernels.linear import linear, pad_rows, padded_rows
from pdmesh.kernels.moe import order_by_expert, routed_experts
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.page_copy import append_latents, flat_rows, gather_latents, move_latents
from pdmesh.kernels.page_walk import SPLIT, PageWalk, Span, Tiling, plan_walk
from pdmesh.kernels.rope import (
    RopeTable,
    Yarn,
    apply_rope,
    cos_sin_factor,
    inverse_frequencies,
    softmax_scale,
)

__all__ = [
    "GateRule",
    "PageWalk",
    "SPLIT",
    "RopeTable",
    "Span",
    "Tiling",
    "Yarn",
    "absorbed_attention",
    "append_latents",
    "apply_rope",
    "block_scales",
    "choose_experts",
    "cos_sin_factor",
    "dequantise_blocks",
    "flat_rows",
    "gather_latents",
    "inverse_frequencies",
    "linear",
    "mha_attention",
    "move_latents",
    "order_by_expert",
    "pad_rows",
    "padded_rows",
    "plan_walk",
    "project_keys",
    "project_values",
    "quantise_blocks",
    "rms_norm",
    "routed_experts",
    "sigmoid",
    "silu_mul",
    "softmax_scale",
]
