"""Ranks over a tiny model of 256 experts, and what one process computes for the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from model_cases import one_slice, tiny_model, tokens_of
from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.balancer import BalanceRule, place
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import VirtualRanks

WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
}
"""A dense layer, a routed one, and the MTP layer: two MoE layers."""
MOE_LAYERS = 2
PAGES = 2


@cache
def wide_model(seed: int = 0) -> DeepseekV3:
    """256 experts in 8 groups, 8 for every token."""
    return tiny_model(seed, **WIDE)


@cache
def skewed_model() -> DeepseekV3:
    """Some experts get most of the rows."""
    model = tiny_model(0, **WIDE)
    for gate in model.gates():
        generator = torch.Generator().manual_seed(8)
        gate.e_score_correction_bias.copy_(torch.randn(256, generator=generator))
    return model


@cache
def narrow_model() -> DeepseekV3:
    """All rows go to the same eight experts, the first two of four groups."""
    model = tiny_model(0, **WIDE)
    for gate in model.gates():
        gate.e_score_correction_bias.view(8, 32)[2:6, :2] = 9.0
    return model


def redundant(num_physical: int, num_ranks: int, seed: int = 0) -> Placement:
    """A placement of 256 experts for loads drawn from `seed`."""
    load = np.random.default_rng(seed).zipf(1.5, (MOE_LAYERS, 256)).clip(max=1000)
    return place(load, num_ranks, BalanceRule(num_physical))


@dataclass
class Step:
    """Inputs of one step, and what each DP group's rows give in one process."""

    inputs: list[RankBatch | None]
    hidden: list[Tensor | None]
    mtp: list[Tensor | None]
    pools: list[Tensor | None]


def a_step(
    model: DeepseekV3, dp: int, tp: int, lengths: Sequence[int], form: Form = "absorbed"
) -> Step:
    """Group d computes a prompt of lengths[d % len] tokens; nothing for 0. The pools are stale."""
    step = Step([], [], [], [])
    for group in range(dp):
        length = lengths[group % len(lengths)]
        if not length:
            for values in (step.inputs, step.hidden, step.mtp, step.pools):
                values.append(None)
            continue
        batch = a_batch([length], group)
        pools = [stale(model) for _ in range(tp + 1)]
        step.inputs.append(RankBatch(batch, tuple(pools[:tp]), form))
        step.hidden.append(model(batch, pools[tp], form))
        later = later_rows(batch)
        if later is None:
            step.mtp.append(None)
        else:
            step.mtp.append(model.mtp_forward(later, step.hidden[-1][:-1], pools[tp], form))
        step.pools.append(pools[tp])
    return step


def a_batch(lengths: Sequence[int], seed: int) -> Batch:
    """One prompt a length, each with pages of its own."""
    slices = [
        one_slice(tuple(range(PAGES * i, PAGES * i + PAGES)), 0, n) for i, n in enumerate(lengths)
    ]
    return Batch.build(slices, [tokens_of(n, 31 * seed + i) for i, n in enumerate(lengths)])


def later_rows(batch: Batch) -> Batch | None:
    """The rows of the MTP layer for a batch of one prompt: positions from 1 on."""
    (item,) = batch.slices
    if item.end < 2:
        return None
    tokens = batch.tokens.tolist()[1:]
    return Batch.build([one_slice(item.page_table, 1, item.end)], [tokens])


def stale(model: DeepseekV3, pages: int = PAGES) -> Tensor:
    return model.new_latents(pages).fill_(float("nan"))


def check(ranks: VirtualRanks, step: Step) -> None:
    """Hidden states, the MTP layer's and all pages of all ranks are bitwise what they must be."""
    same(ranks.forward(step.inputs), step.hidden)
    later = [
        None if item is None or mtp is None else RankBatch(later_rows(item.batch), item.latents)
        for item, mtp in zip(step.inputs, step.mtp, strict=True)
    ]
    previous = [None if h is None else h[:-1] for h in step.hidden]
    same(ranks.mtp_forward(later, previous), step.mtp)
    for item, expected in zip(step.inputs, step.pools, strict=True):
        for pool in () if item is None else item.latents:
            assert torch.equal(pool.isnan(), expected.isnan())
            assert torch.equal(pool.nan_to_num(), expected.nan_to_num())


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Bit for bit, and no NaN."""
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert got is None
        else:
            assert torch.equal(got, wanted)
            assert not bool(got.isnan().any())
