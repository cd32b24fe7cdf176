"""What a backend of attention plans for a part of a step is what computes that part."""

import dataclasses
import gc

import torch
from device_cases import ALIGNED, device_model, exact_model, random_model
from model_cases import tokens_of

from pdmesh.kernels import attention_choice, flashinfer_backend, mla_reference
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device import step
from pdmesh.model.device.full_width import full_width

PAGE = 16
HEADS = ("num_attention_heads", "num_key_value_heads")


class Wrapper:
    """Holds one plan, as FlashInfer's: a second one takes the place of the first."""

    made = 0

    def __init__(self, workspace):
        Wrapper.made += 1

    def plan(self, query_starts, key_starts, heads, widths, scale):
        self.starts, self.scale = (query_starts, key_starts), scale

    def run(self, query, key, value):
        return mla_reference.mla_prefill(query, key, value, *self.starts, self.scale)


def prompts(*lengths):
    tables = [(2 * i, 2 * i + 1) for i in range(len(lengths))]
    slices = [SequenceSlice(t, 0, n, 0) for t, n in zip(tables, lengths, strict=True)]
    return Batch.build(slices, [tokens_of(n, 7 * n) for n in lengths], PAGE)


def test_parts_of_a_prompt_are_planned_once_for_all_layers_and_each_by_itself(monkeypatch):
    model = exact_model(random_model(11))
    expected = model.forward(prompts(20, 9, 30), model.new_latents(6, PAGE), "mha")
    monkeypatch.setattr(step, "MOST_KEYS", 32)
    monkeypatch.setattr(flashinfer_backend, "Prefill", Wrapper)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(Wrapper, "made", 0)
    prefill = attention_choice.FlashInferPrefill(torch.device("cpu"))
    plans = []

    def plan(*arguments):
        plans.append(arguments)
        return attention_choice.FlashInferPrefill.plan(prefill, *arguments)

    monkeypatch.setattr(prefill, "plan", plan, raising=False)
    model.ops.mla_prefill = prefill
    for _ in range(3):
        given = model.forward(prompts(20, 9, 30), model.new_latents(6, PAGE), "mha")
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        gc.collect()
    assert len(plans) == 3 * 2
    assert Wrapper.made == 2


def test_a_prompt_of_many_keys_is_attended_to_by_some_heads_at_a_time_with_the_same_bits(
    monkeypatch,
):
    model = device_model(random_model(12, **ALIGNED | dict.fromkeys(HEADS, 8)))
    made = []
    plain = model.ops.mla_prefill

    def counted(query, *rest):
        made.append(query.shape[1])
        return plain(query, *rest)

    model.ops.mla_prefill = counted
    pools = [model.new_latents(6, PAGE) for _ in range(2)]
    expected = model.forward(prompts(20, 30), pools[0], "mha")
    monkeypatch.setattr(step, "MOST_KEYS", 1)
    given = model.forward(prompts(20, 30), pools[1], "mha")
    assert torch.equal(given, expected)
    assert torch.equal(*pools)
    assert made == [8] * 2 + [4] * 2 * 2 * 2, "two layers of two sequences, in two groups of heads"


def test_heads_are_halved_as_often_as_it_takes_and_only_at_blocks_of_the_weight():
    whole = full_width(4)
    assert [step.heads_at_once(whole, keys) for keys in (1, 16384, 16385, 65536, 163840)] == [
        128,
        128,
        64,
        32,
        8,
    ]
    odd = dataclasses.replace(whole, num_attention_heads=6, qk_nope_head_dim=16, v_head_dim=16)
    assert step.heads_at_once(odd, 10**9) == 6
