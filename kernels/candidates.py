"""The implementations of each operation besides its definition, best first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from pdmesh.kernels import (
    cuda_absorbed,
    flash_mla_backend,
    flashinfer_backend,
    hopper_mla,
)
from pdmesh.kernels.backends import FASTER, Candidate, Shapes

BLOCK = 128


@cache
def triton_problem() -> str | None:
    """Why Triton's kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "FP8 kernels need a device of capability 9.0 or later"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


def _on_device(
    problem: Callable[[], str | None], fits: Callable[[Shapes], str | None] = lambda _: None
) -> Callable[[torch.device, Shapes], str | None]:
    def why_not(device: torch.device, shapes: Shapes) -> str | None:
        if device.type != "cuda":
            return f"it computes on a CUDA device, not on {device.type}"
        return problem() or fits(shapes)

    return why_not


def _triton(
    module: str,
    name: str,
    fits: Callable[[Shapes], str | None] = lambda _: None,
    strength: str = "one fused kernel",
) -> Candidate:
    def load(_: torch.device) -> Any:
        return getattr(importlib.import_module(f"pdmesh.kernels.triton.{module}"), name)

    return Candidate("triton", load, _on_device(triton_problem, fits), strength)


def _rank(s: Shapes) -> str | None:
    if s.rank % BLOCK or s.rope & (s.rope - 1):
        return f"a latent of {s.rank} + {s.rope} is not of whole blocks of {BLOCK}"
    return None


def _power_rank(s: Shapes) -> str | None:
    if s.rank & (s.rank - 1) or s.rope & (s.rope - 1) or s.rope < 16:
        return f"a latent of {s.rank} + {s.rope} is not of powers of two"
    return None


def _bf16_latents(s: Shapes) -> str | None:
    dtype = torch.bfloat16 if s.latent_bytes == 2 else torch.uint8
    return flash_mla_backend.supports(s.heads, s.page_size, s.rank + s.rope, dtype)


def _packed(s: Shapes) -> str | None:
    if s.latent_bytes != 1:
        return "the pages hold latents in bfloat16"
    fits = s.page_size == hopper_mla.PAGE and s.rank + s.rope == hopper_mla.WIDTH
    return None if fits else f"it takes pages of {hopper_mla.PAGE} latents of {hopper_mla.WIDTH}"


def _widths(s: Shapes) -> str | None:
    widths = (s.nope + s.rope, s.value_dim)
    return None if widths == (192, 128) else f"keys and values are {widths}, not (192, 128) wide"


def _few_experts(s: Shapes) -> str | None:
    return f"{s.experts} experts are more than 1024" if s.experts > 1024 else None


def _dense(_: torch.device) -> Any:
    return importlib.import_module("pdmesh.kernels.dense").fp8_gemm


def _gate(_: torch.device) -> Any:
    return importlib.import_module("pdmesh.kernels.gate_choice").gate_topk


def _grouped(name: str) -> Candidate:
    return Candidate(
        "by rows",
        lambda _: getattr(importlib.import_module("pdmesh.kernels.grouped"), name),
        _on_device(triton_problem),
        "own for few rows of an expert, DeepGEMM for many where it is installed",
    )


def _absorbed(name: str) -> Candidate:
    def fits(s: Shapes) -> str | None:
        return cuda_absorbed.unsupported(s.nope, s.rank, s.rope, s.value_dim)

    return Candidate(
        "cuda",
        lambda _: getattr(cuda_absorbed, name),
        _on_device(cuda_absorbed.unavailable, fits),
        "reads a head's weight once, in FP8",
    )


def _attention(name: str) -> Callable[[torch.device], Any]:
    def load(device: torch.device) -> Any:
        module = importlib.import_module("pdmesh.kernels.attention_choice")
        made = getattr(module, name)
        return made(device) if name == "FlashInferPrefill" else made()

    return load


def register() -> None:
    """Fills `backends.FASTER`; a second call changes nothing."""
    if FASTER:
        return
    norm, quantise = partial(_triton, "norm"), partial(_triton, "quantise")
    FASTER.update(
        {
            "rms_norm_quantise": (norm("rms_norm_quantise"),),
            "add_rms_norm_quantise": (norm("add_rms_norm_quantise"),),
            "quantise_rows": (quantise("quantise_rows"),),
            "silu_mul_quantise": (quantise("silu_mul_quantise"),),
            "masked_silu_mul_quantise": (quantise("masked_silu_mul_quantise"),),
            "fp8_gemm": (
                Candidate(
                    "by shape",
                    _dense,
                    _on_device(triton_problem),
                    "for each shape the fastest that was measured",
                ),
            ),
            "masked_grouped_gemm": (
                _grouped("masked_grouped_gemm"),
                _triton("grouped_gemm", "masked_grouped_gemm"),
            ),
            "contiguous_grouped_gemm": (
                _grouped("contiguous_grouped_gemm"),
                _triton("grouped_gemm", "contiguous_grouped_gemm"),
            ),
            "absorb_query": (_absorbed("absorb_query"), _triton("absorbed", "absorb_query")),
            "project_values_quantise": (
                _absorbed("project_values_quantise"),
                _triton("absorbed", "project_values_quantise"),
            ),
            "rope_append": (_triton("rope_append", "rope_append", _rank),),
            "gate_topk": (
                Candidate(
                    "by rows",
                    _gate,
                    _on_device(triton_problem, _few_experts),
                    "DeepSeek-V3's rule in clusters up to 256 rows, Triton's for all else",
                ),
                _triton("gate", "gate_topk", _few_experts),
            ),
            "permute_masked": (_triton("permute", "permute_masked"),),
            "permute_contiguous": (_triton("permute", "permute_contiguous"),),
            "unpermute": (_triton("permute", "unpermute"),),
            "join_keys": (_triton("join_keys", "join_keys"),),
            "mla_decode": (
                Candidate(
                    "flash_mla",
                    _attention("FlashMlaDecode"),
                    _on_device(flash_mla_backend.unavailable, _bf16_latents),
                    "the fastest decode of bf16 latents on an H200; triton in the MTP layer",
                ),
                Candidate(
                    "hopper",
                    _attention("HopperDecode"),
                    _on_device(hopper_mla.unavailable, _packed),
                    "FP8 products on latents of one scale, the fastest from 8 sequences on;"
                    " triton in the MTP layer",
                ),
                Candidate(
                    "triton",
                    _attention("TritonDecode"),
                    _on_device(triton_problem, _power_rank),
                    "any page size and packed latents",
                ),
            ),
            "mla_prefill": (
                Candidate(
                    "flashinfer",
                    _attention("FlashInferPrefill"),
                    _on_device(flashinfer_backend.unavailable, _widths),
                    "FA3 kernels for prompts",
                ),
                Candidate(
                    "triton",
                    _attention("TritonPrefill"),
                    _on_device(triton_problem),
                    "any width of keys and values",
                ),
            ),
        }
    )
