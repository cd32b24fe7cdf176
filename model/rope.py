"""The rotary tables and the softmax scale of a config."""

import torch

from pdmesh.kernels.rope import RopeTable, cos_sin_factor, inverse_frequencies
from pdmesh.kernels.rope import softmax_scale as scale_of
from pdmesh.model.config import ModelConfig


def rope_table(config: ModelConfig, device: torch.device) -> RopeTable:
    """cos and sin for every position up to the config's max_position, on `device`."""
    frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    factor = cos_sin_factor(config.yarn)
    table = RopeTable.build(
        frequencies, config.max_position_embeddings, factor, config.rope_interleave
    )
    return table.to(device)


def softmax_scale(config: ModelConfig) -> float:
    """What q . k is multiplied by."""
    return scale_of(config.qk_head_dim, config.yarn)
