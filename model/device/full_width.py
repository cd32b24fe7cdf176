"""The published DeepSeek-V3 shapes with any number of layers, for weights that are random."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from pdmesh.model.config import ModelConfig
from pdmesh.model.random_weights import resized

DEEPSEEK_V3: dict[str, Any] = json.loads(
    resources.files("pdmesh.model").joinpath("configs/deepseek-v3/config.json").read_text("utf-8")
)
"""The config.json of DeepSeek-V3 (deepseek-ai/DeepSeek-V3 on Hugging Face)."""


def full_width(layers: int, experts: int = 256) -> ModelConfig:
    """DeepSeek-V3 with `layers` layers, of which the first three at most have no experts.

    Fewer experts than 256 are those of one rank; 8 of them are chosen for a token nevertheless.
    """
    return resized(DEEPSEEK_V3, layers, experts)
