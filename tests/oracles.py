"""Random models of transformers, and the same weights as a model of ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers import logging as transformers_logging

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.weights import load_model


def published(fields: dict[str, Any]) -> torch.nn.Module:
    """A random transformers model of these fields in which every weight matters."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    v2 = fields["model_type"] == "deepseek_v2"
    config = (DeepseekV2Config if v2 else DeepseekV3Config)(
        **{name: value for name, value in fields.items() if name != "model_type"},
        attn_implementation="eager",
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    model = (DeepseekV2ForCausalLM if v2 else DeepseekV3ForCausalLM)(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if name.endswith("gate.weight"):
                tensor.mul_(4.0)
    return model


def with_random_mtp(theirs: torch.nn.Module, folder: Path, seed: int = 0) -> DeepseekV3:
    """Our model with the weights of ``theirs``, through a checkpoint, and a random MTP layer.

    The layer only drafts: what comes out must be what ``theirs`` says.
    """
    theirs.save_pretrained(folder)
    plain = load_model(folder)
    torch.manual_seed(seed)
    model = DeepseekV3(replace(plain.config, num_nextn_predict_layers=1))
    model.init_weights(0.08)
    unknown = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unknown.unexpected_keys
    assert all(name.startswith("mtp.") for name in unknown.missing_keys)
    return model.requires_grad_(False).eval()
