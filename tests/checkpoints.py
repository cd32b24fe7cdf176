"""Small random checkpoints that a mesh can serve: text goes through the shipped tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from model_cases import tiny_model

from pdmesh.launch.topology import shipped_model
from pdmesh.model.checkpoint import save_checkpoint
from pdmesh.model.deepseek import DeepseekV3

VOCAB = 4096
"""Of the shipped tokenizer."""


def random_checkpoint(folder: Path, seed: int = 0, **changes: object) -> DeepseekV3:
    """Writes a tiny random model with a tokenizer to ``folder`` and returns the model."""
    model = tiny_model(seed, vocab_size=VOCAB, **changes)
    save_checkpoint(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped_model() / name, folder / name)
    return model
