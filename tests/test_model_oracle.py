"""Logits against the transformers implementation, for the fields of a config that change them.

Weights are random, saved by transformers and read by our loader.
"""

import random
from typing import Any

import pytest
import torch
from model_cases import TINY, V2, one_slice, tiny_model, tokens_of, yarn
from oracles import published
from transformers import DeepseekV3ForCausalLM
from transformers import logging as transformers_logging

from pdmesh.model.batch import Batch
from pdmesh.model.weights import load_model, save_checkpoint

TOLERANCE = 1e-4
# The two forms associate the same sums differently; logits here are of order one.
FORM_TOLERANCE = 2e-5

CASES: dict[str, dict[str, Any]] = {
    "as published, small": {},
    "no q_lora": {"q_lora_rank": None},
    "one group": {"n_group": 1, "topk_group": 1},
    "all groups chosen": {"topk_group": 4},
    "one expert a token": {"num_experts_per_tok": 1, "topk_group": 1},
    "weights not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two shared experts": {"n_shared_experts": 2},
    "no dense layer": {"first_k_dense_replace": 0},
    "dense layers only": {"first_k_dense_replace": 3},
    "attention bias": {"attention_bias": True},
    "attention bias, no q_lora": {"attention_bias": True, "q_lora_rank": None},
    "tied embeddings": {"tie_word_embeddings": True},
    "rope in halves": {"rope_interleave": False},
    "rope theta": {"rope_theta": 500.0},
    "another epsilon": {"rms_norm_eps": 1e-2},
    "odd number of heads": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "yarn": {"rope_scaling": yarn()},
    "yarn, 40 times": {"rope_scaling": yarn(40.0, 16)},
    "yarn, mscale 0.707 twice": {"rope_scaling": yarn(mscale=0.707, mscale_all_dim=0.707)},
    "yarn, mscales differ": {"rope_scaling": yarn(mscale=1.0, mscale_all_dim=0.5)},
    "yarn, no mscale": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn, attention factor": {"rope_scaling": yarn(attention_factor=1.3)},
    "yarn, other betas": {"rope_scaling": yarn(beta_fast=8, beta_slow=2, truncate=False)},
    "softmax": V2,
    "softmax, groups": V2 | {"topk_method": "group_limited_greedy"},
    "softmax, no q_lora, yarn": V2
    | {"q_lora_rank": None, "rope_scaling": yarn(mscale=0.707, mscale_all_dim=0.707)},
}


def random_case(seed: int) -> dict[str, Any]:
    """Shapes and fields drawn at random."""
    pick = random.Random(seed)
    groups = pick.choice([1, 2, 4])
    experts = groups * pick.choice([2, 3, 4])
    chosen = pick.randint(1, groups)
    heads = pick.randint(1, 5)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": pick.choice([32, 48, 100]),
        "q_lora_rank": pick.choice([None, 16, 28]),
        "kv_lora_rank": pick.choice([8, 20, 64]),
        "qk_nope_head_dim": pick.choice([8, 12, 32]),
        "qk_rope_head_dim": pick.choice([4, 8, 32]),
        "v_head_dim": pick.choice([8, 12, 40]),
        "n_group": groups,
        "topk_group": chosen,
        "n_routed_experts": experts,
        "num_experts_per_tok": pick.randint(1, chosen * (experts // groups)),
        "norm_topk_prob": pick.random() < 0.5,
        "routed_scaling_factor": pick.choice([1.0, 2.5]),
        "n_shared_experts": pick.choice([1, 3]),
        "first_k_dense_replace": pick.randint(0, 2),
        "attention_bias": pick.random() < 0.3,
        "tie_word_embeddings": pick.random() < 0.3,
        "rope_scaling": pick.choice([None, yarn(), yarn(8.0, 32, mscale=0.707)]),
    }


CASES |= {f"random {seed}": random_case(seed) for seed in range(10)}


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.parametrize("name", list(CASES))
def test_logits_equal_transformers_with_and_without_a_cache(name, tmp_path):
    fields = TINY | {"num_nextn_predict_layers": 0} | CASES[name]
    theirs = published(fields)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    tokens = tokens_of(150, 3)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
        dense = ours.logits(ours.dense_forward(torch.tensor([tokens])).hidden)[0]
        pages = (4, 1, 3)
        pool = ours.new_latents(5).fill_(float("nan"))

        def rows(start, end, form, target):
            batch = Batch.build([one_slice(pages, start, end)], [tokens[start:end]])
            return ours.logits(ours(batch, target, form))

        served = [rows(0, 70, "mha", pool), rows(70, 140, "mha", pool)]
        served += [rows(p, p + 1, "absorbed", pool) for p in range(140, 150)]
        absorbed = rows(0, 150, "absorbed", pool.clone())
        first = theirs(torch.tensor([tokens[:140]]), use_cache=True)
        step = theirs(torch.tensor([tokens[140:]]), cache=first.cache, use_cache=True)
    assert float(expected.abs().max()) > 0.3, "logits that are all small would prove nothing"
    assert largest(dense, expected) < TOLERANCE
    assert largest(torch.cat(served), expected) < TOLERANCE
    assert largest(torch.cat(served)[140:], step.logits[0]) < TOLERANCE
    assert largest(absorbed, torch.cat(served)) < FORM_TOLERANCE


@pytest.mark.parametrize("mscale", [0.0, 0.707, 1.0])
def test_yarn_scales_match_transformers_from_position_0_to_beyond_128k(mscale, tmp_path):
    """huggingface/transformers#47435: the softmax scale of mscale_all_dim was left out."""
    factor, original = 40.0, 4096
    scaling = yarn(factor, original, mscale=mscale, mscale_all_dim=mscale)
    fields = TINY | {
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": int(factor * original),
        "rope_scaling": scaling,
    }
    # Equal mscales cancel in cos and sin. transformers reads 0 as absent there, so it is told.
    theirs = published(fields | {"rope_scaling": scaling | {"attention_factor": 1.0}})
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.config.yarn is not None
    tokens = tokens_of(6, 1)
    far = 131_500
    for first in (0, 1, 100, original - 2, original + 500, far):
        # Six tokens at positions first.. : the same relative positions, other absolute ones.
        positions = torch.arange(first, first + 6)
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), position_ids=positions[None]).logits[0]
            table = ours.rope_table()
            shifted = type(table)(table.cos[first:], table.sin[first:], table.interleave)
            ours._table = shifted
            got = ours.logits(ours.dense_forward(torch.tensor([tokens])).hidden)[0]
            ours._table = table
        assert largest(got, expected) < TOLERANCE, first


def test_dequantised_fp8_weights_give_transformers_the_same_logits(tmp_path):
    model = tiny_model(num_nextn_predict_layers=0)
    save_checkpoint(model, tmp_path / "fp8", fp8=True)
    ours = load_model(tmp_path / "fp8")
    save_checkpoint(ours, tmp_path / "plain")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    tokens = torch.tensor([tokens_of(40)])
    with torch.inference_mode():
        expected = theirs(tokens).logits
        got = ours.logits(ours.dense_forward(tokens).hidden)
        unquantised = model.logits(model.dense_forward(tokens).hidden)
    assert largest(got, expected) < TOLERANCE
    assert 1e-3 < float((got - unquantised).abs().mean()) < 0.15, "FP8 rounds, a little"
