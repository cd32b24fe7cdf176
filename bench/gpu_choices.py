"""Candidates of every step of a layer, and their definitions; the fastest correct one is chosen.

The definition of a step is plain torch; libraries and this project's kernels are measured beside it
in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gpu_libraries as lib
import torch
from gpu_block import Block, copied_rows, weighted_sum
from gpu_latents import rope_append, turned_and_written
from gpu_timing import Call, Candidate, Measured, pick
from gpu_variants import dense_candidates, own
from torch import Tensor

from pdmesh.kernels import deep_gemm_backend
from pdmesh.kernels import quantised as ref
from pdmesh.kernels import rope_append as definition
from pdmesh.kernels.gate import GateRule, choose_experts
from pdmesh.kernels.quantised import Rows

RULE = GateRule("noaux_tc", 256, 8, 8, 4, True, 2.5)
PRODUCT, SMALL, LOOSE, WEIGHTED = 5e-3, 5e-3, 3e-2, 6e-2
"""Largest relative errors: FP8 products beside float32 ones of the same operands, bfloat16 results,
results that are quantised again (a value on an edge goes to either neighbour), and attention whose
queries and weights are quantised on the way."""


@dataclass(frozen=True)
class Step:
    """A step's definition and candidates.

    Attributes:
        reference: the definition.
        candidates: to be measured.
        tolerance: largest relative error.
        look: what of a result is compared.
        changes: positions of the arguments that it changes in place.
    """

    reference: Callable[..., Any]
    candidates: list[Candidate]
    tolerance: float
    look: Callable[[Any, Call], Any] = lambda result, call: result
    changes: tuple[int, ...] = ()

    def fresh(self, call: Call) -> Call:
        return tuple(
            value.clone() if place in self.changes else value for place, value in enumerate(call)
        )


def gate(normed: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    logits = normed.float() @ weights.gate.t()
    return choose_experts(logits, weights.gate_bias, RULE)


def gate_bf16(normed: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    logits = (normed @ weights.gate_bf16.t()).float()
    return choose_experts(logits, weights.gate_bias, RULE)


def _absorb(run: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda query, w, rotated: run(query, w.key, rotated, 1.0, **options)


def _values(run: Any, **options: Any) -> Callable[..., Any]:
    return lambda latent, w: run(latent, w.value, **options)


def _gate_by(weight: str, **options: Any) -> Callable[[Any], Any]:
    """This project's gate on the weights of that name; it counts the choices besides."""
    return lambda run: (
        lambda normed, w: run(normed, getattr(w, weight), w.gate_bias, RULE, **options)[:2]
    )


def _packed(rows: Tensor) -> Tensor:
    """A copy without gaps."""
    return rows.clone(memory_format=torch.contiguous_format)


def _first_sequences(result: Tensor, call: Call) -> Tensor:
    return result[: 4 * call[4]]


def _defined(result: Any, call: Call) -> Any:
    """The rows that have a count, of a masked result: the first experts' first rows."""
    counts = call[-1] if isinstance(call[-1], Tensor) else call[-2]
    experts, count = int((counts > 0).sum()), int(counts[0])
    if isinstance(result, Rows):
        return Rows(result.values[:experts, :count], result.scales[:experts, :count])
    return result[:experts, :count]


def _masked_silu(gate_up: Tensor, counts: Tensor) -> Rows:
    return ref.masked_silu_mul_quantise(gate_up, counts)


def _act(gate_up: Tensor) -> Rows:
    return ref.silu_mul_quantise(gate_up)


def _sorted_weights(result: Any, call: Call) -> Tensor:
    """Weights in order: two experts of equal score may change places."""
    return result[1].sort(dim=-1).values


def steps(without: Sequence[str] = (), packed: bool = False) -> dict[str, Step]:
    """All steps of a MoE and a dense layer; candidates of which `without` names a part are left.

    With `packed` latents are of 656 bytes, which none of the libraries reads.
    """
    table = _all_steps()
    if packed:
        table["rope_append"] = replace(table["rope_append"], tolerance=LOOSE)
        table["mla"] = _packed_attention()
    for step in table.values():
        step.candidates[:] = [
            one for one in step.candidates if not any(part in one.name for part in without)
        ]
    return table


def _packed_attention() -> Step:
    return Step(
        lib.attention_reference,
        [
            *own("hopper_mla", "mla_decode", "CUDA"),
            *own("triton.mla_decode", "mla_decode", "Triton, 656 bytes"),
        ],
        WEIGHTED,
        look=_first_sequences,
    )


def _all_steps() -> dict[str, Step]:
    values = "project_values_quantise"
    add_norm = Step(
        ref.add_rms_norm_quantise,
        [
            Candidate("torch", ref.add_rms_norm_quantise),
            *own("triton.norm", "add_rms_norm_quantise", "norm"),
        ],
        LOOSE,
        changes=(1,),
    )
    dense = Step(ref.fp8_gemm, dense_candidates(), PRODUCT)
    act = Step(
        _act,
        [Candidate("torch", _act), *own("triton.quantise", "silu_mul_quantise", "silu")],
        LOOSE,
    )
    masked = Step(
        ref.masked_grouped_gemm,
        [
            Candidate("DeepGEMM", deep_gemm_backend.masked_grouped_gemm),
            *own("triton.grouped_gemm", "masked_grouped_gemm", "grouped"),
        ],
        PRODUCT,
        look=_defined,
    )
    return {
        "input_norm": add_norm,
        "qkv_a": dense,
        "q_norm": Step(
            ref.rms_norm_quantise,
            [
                Candidate("torch", ref.rms_norm_quantise),
                *own("triton.norm", "rms_norm_quantise", "norm"),
            ],
            LOOSE,
        ),
        "q_b": dense,
        "rope_append": Step(
            definition.rope_append,
            [
                Candidate("torch", rope_append),
                *own("triton.rope_append", "rope_append", "rope_append"),
            ],
            SMALL,
            look=turned_and_written,
        ),
        "absorb": Step(
            lambda query, w, rotated: ref.absorb_query(query, w.key, rotated, 1.0),
            [
                Candidate(
                    "torch bf16",
                    lambda query, w, rotated: lib.torch_absorb(query, w.key_bf16, rotated),
                ),
                *own("cuda_absorbed", "absorb_query", "CUDA", _absorb),
                *own("triton.absorbed", "absorb_query", "Triton", _absorb),
            ],
            SMALL,
        ),
        "mla": Step(
            lib.attention_reference,
            [
                Candidate("FlashMLA", lib.FlashMla()),
                Candidate("FlashInfer fa3", lib.FlashInferMla()),
                *own("triton.mla_decode", "mla_decode", "Triton"),
            ],
            1e-2,
            look=_first_sequences,
        ),
        "values": Step(
            lambda latent, w: ref.project_values_quantise(latent, w.value),
            [
                Candidate("torch bf16", lambda latent, w: lib.torch_values(latent, w.value_bf16)),
                *own("cuda_absorbed", values, "CUDA", _values),
                # Not as a dependent: it would wait for FlashMLA's merging kernel only, which may
                # end before attention where no sequence is split.
                *own("triton.absorbed", values, "Triton", _values),
            ],
            LOOSE,
        ),
        "o_proj": dense,
        "post_norm": add_norm,
        "gate": Step(
            gate,
            [
                Candidate("torch f32", gate),
                Candidate("torch bf16", gate_bf16),
                *own("triton.gate", "gate_topk", "gate f32", _gate_by("gate")),
                *own("triton.gate", "gate_topk", "gate bf16", _gate_by("gate_bf16")),
                *own("cuda_gate", "gate_topk", "gate bf16, clusters", _gate_by("gate_bf16")),
                *own(
                    "cuda_gate",
                    "gate_topk",
                    "gate bf16, clusters, dependent",
                    _gate_by("gate_bf16", dependent=True),
                ),
            ],
            1e-2,
            look=_sorted_weights,
        ),
        "shared_up": dense,
        "shared_act": act,
        "shared_down": dense,
        "dispatch": Step(copied_rows, [Candidate("torch copy", copied_rows)], 0.0),
        "routed_up": masked,
        "routed_act": Step(
            _masked_silu,
            [
                Candidate("torch", _masked_silu),
                *own("triton.quantise", "masked_silu_mul_quantise", "silu"),
            ],
            LOOSE,
            look=_defined,
        ),
        "routed_down": masked,
        "combine_send": Step(_packed, [Candidate("torch copy", _packed)], 0.0),
        "combine_sum": Step(
            weighted_sum,
            [
                Candidate("torch", weighted_sum),
                *own("triton.permute", "unpermute", "unpermute"),
            ],
            1e-2,
        ),
        "dense_up": dense,
        "dense_act": act,
        "dense_down": dense,
    }


Table = dict[str, list[Measured]]


def choose(
    blocks: Sequence[Block],
    table: Mapping[str, Step],
    names: Sequence[str],
    report: Callable[[str, Measured | None, list[Measured]], None],
) -> tuple[dict[str, Measured], Table]:
    """The fastest correct candidate of each step, on the arguments that the blocks noted.

    A step of which no candidate is right is left to its definition.
    """
    chosen: dict[str, Measured] = {}
    all_of_them: Table = {}
    for name in names:
        step = table[name]
        calls = [block.noted[name] for block in blocks if block.noted is not None]
        best, measured = pick(
            step.candidates,
            calls,
            step.reference,
            tolerance=step.tolerance,
            look=step.look,
            fresh=step.fresh,
            rounds=3,
        )
        if best is None:
            best = Measured("definition", False, why_not="no candidate", run=step.reference)
        chosen[name], all_of_them[name] = best, measured
        report(name, best, measured)
    return chosen, all_of_them
