"""Which implementation of each operation runs, and why.

An operation has candidates, best first. The first that can be used on this device, for these shapes
and with what is installed, is taken; each of the others has one sentence that says why not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdmesh.kernels import mla_reference, quantised, routing
from pdmesh.kernels.latent_rows import join_keys
from pdmesh.kernels.norm import rms_norm
from pdmesh.kernels.rope_append import rope_append

Call = Callable[..., Any]
VARIABLE = "PDMESH_BACKENDS"
"""In the environment: operations of a CUDA device and what is to compute them, see
`named_backends`."""


@dataclass(frozen=True)
class Shapes:
    """What the choice depends on besides the device. Sizes in values, `page_size` in tokens."""

    hidden: int
    heads: int
    rank: int
    rope: int
    nope: int
    value_dim: int
    intermediate: int
    experts: int
    page_size: int
    latent_bytes: int = 2
    """Bytes of a value in the pool: 4, 2, or 1 for packed latents."""


@dataclass(frozen=True)
class Candidate:
    """One implementation.

    Attributes:
        backend: its name.
        load: gives the function for a device; imports what it needs.
        why_not: one sentence why it cannot be used, or None.
        strength: what speaks for it, for the start-up log.
    """

    backend: str
    load: Callable[[torch.device], Call]
    why_not: Callable[[torch.device, Shapes], str | None]
    strength: str


@dataclass(frozen=True)
class Choice:
    """What was chosen for an operation: a sentence says why."""

    op: str
    backend: str
    reason: str
    call: Call


def _plain(call: Call) -> Candidate:
    return Candidate("torch", lambda _: call, lambda _device, _shapes: None, "plain torch")


PLAIN: dict[str, Call] = {
    "rms_norm": rms_norm,
    "rms_norm_quantise": quantised.rms_norm_quantise,
    "add_rms_norm_quantise": quantised.add_rms_norm_quantise,
    "quantise_rows": quantised.quantise_rows,
    "silu_mul_quantise": quantised.silu_mul_quantise,
    "masked_silu_mul_quantise": quantised.masked_silu_mul_quantise,
    "fp8_gemm": quantised.fp8_gemm,
    "masked_grouped_gemm": quantised.masked_grouped_gemm,
    "contiguous_grouped_gemm": quantised.contiguous_grouped_gemm,
    "absorb_query": quantised.absorb_query,
    "project_values_quantise": quantised.project_values_quantise,
    "rope_append": rope_append,
    "gate_topk": routing.gate_topk,
    "permute_masked": routing.permute_masked,
    "permute_contiguous": routing.permute_contiguous,
    "unpermute": routing.unpermute,
    "join_keys": join_keys,
    "mla_decode": mla_reference.mla_decode,
    "mla_prefill": mla_reference.mla_prefill,
}
"""The definition of every operation, which runs everywhere."""

FASTER: dict[str, tuple[Candidate, ...]] = {}
"""Further candidates of an operation, best first."""


class Backends:
    """The chosen implementation of every operation, as attributes named like the operations."""

    rms_norm: Call
    rms_norm_quantise: Call
    add_rms_norm_quantise: Call
    quantise_rows: Call
    silu_mul_quantise: Call
    masked_silu_mul_quantise: Call
    fp8_gemm: Call
    masked_grouped_gemm: Call
    contiguous_grouped_gemm: Call
    absorb_query: Call
    project_values_quantise: Call
    rope_append: Call
    gate_topk: Call
    permute_masked: Call
    permute_contiguous: Call
    unpermute: Call
    join_keys: Call
    mla_decode: Call
    mla_prefill: Call

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = tuple(choices)
        for choice in choices:
            setattr(self, choice.op, choice.call)

    def describe(self) -> list[str]:
        """One line an operation: its backend, and why."""
        width = max(len(choice.op) for choice in self.choices)
        return [f"{c.op:<{width}}  {c.backend}: {c.reason}" for c in self.choices]


def choose_backends(
    device: torch.device, shapes: Shapes, forced: dict[str, str] | None = None
) -> Backends:
    """The best implementation of every operation.

    Args:
        device: where it runs.
        shapes: of the model.
        forced: operation to the name of the backend that it must use; by default, on a CUDA
            device, what $PDMESH_BACKENDS names.

    Raises:
        ValueError: a forced backend does not exist or cannot be used; the message says why.
    """
    forced = _forced(device) if forced is None else forced
    return Backends([_choose(op, device, shapes, forced.get(op)) for op in PLAIN])


def check_named(device: torch.device, shapes: Shapes) -> None:
    """Whether what $PDMESH_BACKENDS names can be used, before anything is loaded for it.

    Args:
        device: where it is to run.
        shapes: of the model.

    Raises:
        ValueError: as `choose_backends`.
    """
    current = -1 if device.index is None else device.index  # -1: the one that is current
    for op, backend in _forced(device).items():
        with torch.cuda.device(current):
            _usable(op, device, shapes, backend)


def named_backends(text: str) -> dict[str, str]:
    """Operation to backend, of "operation=backend,operation=backend".

    Raises:
        ValueError: it is not of that form, or there is no such operation or backend.
    """
    named: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        op, _, backend = word.partition("=")
        if op not in PLAIN or not backend:
            raise ValueError(
                f"${VARIABLE} has {word!r}, not OPERATION=BACKEND; operations: {', '.join(PLAIN)}"
            )
        known = [candidate.backend for candidate in _candidates(op)]
        if backend not in known:
            raise ValueError(f"${VARIABLE}: {_no_backend(op, backend, known)}")
        named[op] = backend
    return named


def _forced(device: torch.device) -> dict[str, str]:
    return named_backends(os.environ.get(VARIABLE, "") if device.type == "cuda" else "")


def _candidates(op: str) -> tuple[Candidate, ...]:
    from pdmesh.kernels.candidates import register

    register()
    return (*FASTER.get(op, ()), _plain(PLAIN[op]))


def _no_backend(op: str, backend: str, known: Sequence[str]) -> str:
    return f"{op} has no backend {backend}; it has {', '.join(known)}"


def _choose(op: str, device: torch.device, shapes: Shapes, forced: str | None) -> Choice:
    candidate, reason = _usable(op, device, shapes, forced)
    return Choice(op, candidate.backend, reason, candidate.load(device))


def _usable(
    op: str, device: torch.device, shapes: Shapes, forced: str | None
) -> tuple[Candidate, str]:
    """The best candidate that can be used, and why it is taken; nothing is loaded."""
    refused: list[str] = []
    known: list[str] = []
    for candidate in _candidates(op):
        known.append(candidate.backend)
        if forced not in (None, candidate.backend):
            continue
        problem = candidate.why_not(device, shapes)
        if problem is None:
            reason = candidate.strength if not forced else f"{candidate.strength}; asked for"
            return candidate, "; ".join([reason, *refused])
        refused.append(f"not {candidate.backend}: {problem}")
    if forced is not None and forced not in known:
        raise ValueError(_no_backend(op, forced, known))
    raise ValueError(f"{op}: {'; '.join(refused)}")
