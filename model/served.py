"""A checkpoint as a worker serves it: the model, and the format of its pages."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.grammar import Grammars
from pdmesh.model.page_format import page_format
from pdmesh.model.rows_check import check_rows
from pdmesh.model.weights import Progress, fingerprint, load_model
from pdmesh.wire.hashes import Arithmetic, PageFormat


def load_served_model(
    path: Path,
    name: str,
    *,
    dtype: str,
    device: str,
    mtp: bool,
    page_size: int,
    arithmetic: Arithmetic,
    progress: Progress,
    experts: bool = True,
) -> tuple[DeepseekV3, PageFormat]:
    """Loads a checkpoint and warns if rows vary on this processor.

    Args:
        path: checkpoint directory.
        name: the name that clients use.
        dtype: "float32", "bfloat16" or "float16".
        device: where the model computes.
        mtp: whether the MTP layer is loaded and its latents are kept.
        page_size: tokens a page.
        arithmetic: "fast" or "exact".
        progress, experts: as in `load_model`.

    Raises:
        ConfigError: the checkpoint cannot be served.
    """
    model = load_model(path, getattr(torch, dtype), torch.device(device), mtp, progress, experts)
    weights = fingerprint(path)
    check_rows(model)
    return model, page_format(model.config, name, weights, dtype, mtp, page_size, arithmetic)


def served_grammars(path: Path, vocab_size: int) -> Grammars | None:
    """The grammars of a checkpoint; None where it has no tokenizer to follow them with."""
    return Grammars(path, vocab_size) if (path / "tokenizer.json").is_file() else None
