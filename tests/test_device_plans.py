"""What a backend of attention plans for a part of a step is what computes that part."""

import gc

import torch
from device_cases import exact_model, random_model
from model_cases import tokens_of

from pdmesh.kernels import attention_choice, flashinfer_backend, mla_reference
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device import step

PAGE = 16


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
