"""What a prefill worker computes before it takes work: whatever has a kernel of its own."""

import pytest
import torch
from live_memory import PAGE, shapes_only

from pdmesh.kernels.gemm_choice import choose_contiguous
from pdmesh.model.device.full_width import full_width
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.step import heads_at_once
from pdmesh.prefill.warming import warm_up


def warmed(monkeypatch, op, seen, most, pages):
    """What ``seen`` gives for the arguments of each call of an operation."""
    model = shapes_only(full_width(4))
    found, call = set(), getattr(model.ops, op)

    def counted(*given, **named):
        found.add(seen(*given))
        return call(*given, **named)

    monkeypatch.setattr(model.ops, op, counted)
    monkeypatch.setattr(model, "logits", lambda _: torch.zeros(1))
    warm_up(model, model.new_latents(pages, PAGE), most)
    return model.config, found


@pytest.mark.parametrize("most", [512, 513, 700, 1024, 1100, 4096, 6000, 20_000])
def test_every_kernel_for_sorted_rows_is_compiled_before_a_prompt_needs_it(monkeypatch, most):
    pytest.importorskip("triton")
    from pdmesh.kernels.triton.grouped_gemm import contiguous_config

    def kernel(expected):
        return choose_contiguous(expected, {}).backend, contiguous_config(expected)

    config, found = warmed(
        monkeypatch,
        "contiguous_grouped_gemm",
        lambda rows, weight, row_expert, expected: kernel(expected),
        most,
        pages=400,
    )
    every = range(MASKED_ROWS + 1, most + 1)
    assert found == {kernel(-(-m * config.gate.top_k // config.n_routed_experts)) for m in every}


@pytest.mark.parametrize("pages", [3, 400])
def test_a_long_prompt_finds_the_products_of_fewer_heads_compiled(monkeypatch, pages):
    config, found = warmed(monkeypatch, "mla_prefill", lambda query, *_: query.shape[1], 512, pages)
    every = range(1, config.max_position_embeddings + 1)
    assert found == {heads_at_once(config, keys) for keys in every}
    assert len(found) == 5
