"""The unpaged forward that training uses."""

import pytest
import torch
import torch.nn.functional as F
from model_cases import TINY, V2, one_slice, run, tiny_model, tokens_of

from pdmesh.model.batch import Batch
from pdmesh.model.config import ModelConfig
from pdmesh.model.deepseek import DeepseekV3


@pytest.mark.parametrize("changes", [{}, V2, {"q_lora_rank": None, "tie_word_embeddings": True}])
@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_it_equals_the_paged_forward(changes, impl):
    model = tiny_model(**changes)
    tokens = [tokens_of(100, 1), tokens_of(100, 2)]
    with torch.inference_mode():
        out = model.dense_forward(torch.tensor(tokens), impl)
        pool = model.new_latents(4)
        items = [(one_slice((2 * i, 2 * i + 1), 0, 100), t) for i, t in enumerate(tokens)]
        paged = run(model, pool, "mha", *items)
        torch.testing.assert_close(out.hidden, torch.stack(paged), atol=1e-5, rtol=1e-4)
        if model.mtp is None:
            assert out.mtp_hidden is None
            return
        batch = Batch.build([one_slice((0, 1), 1, 100)], [tokens[0][1:]])
        predicted = model.mtp_forward(batch, paged[0][:-1], pool, "mha")
        torch.testing.assert_close(out.mtp_hidden[0, 1:], predicted, atol=1e-5, rtol=1e-4)
        assert bool((out.mtp_hidden[:, 0] == 0).all())


def test_expert_load_counts_the_choices_of_every_row():
    model = tiny_model()
    out = model.dense_forward(torch.tensor([tokens_of(50, 1), tokens_of(50, 2)]))
    # Two MoE layers over 100 rows, the MTP layer over 98, three choices a row.
    assert [float(load.sum()) for load in out.expert_load] == [300.0, 300.0, 294.0]
    assert len(model.gates()) == 3
    model.gates()[0].e_score_correction_bias[5] = 100.0
    out = model.dense_forward(torch.tensor([tokens_of(50, 1)]))
    assert float(out.expert_load[0][5]) == 50.0


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_every_weight_gets_a_gradient_and_a_step_lowers_the_loss(impl):
    torch.manual_seed(0)
    model = DeepseekV3(ModelConfig.from_hf(TINY | {"num_experts_per_tok": 4}))
    tokens = torch.tensor([tokens_of(64, 1), tokens_of(64, 2)])

    def loss():
        out = model.dense_forward(tokens, impl)
        main = F.cross_entropy(
            model.logits(out.hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        mtp = model.mtp_logits(out.mtp_hidden[:, 1:-1]).flatten(0, 1)
        return main + 0.3 * F.cross_entropy(mtp, tokens[:, 2:].flatten())

    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = loss()
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name
    for _ in range(5):
        optimiser.step()
        optimiser.zero_grad()
        last = loss()
        last.backward()
    assert float(last.detach()) < float(first.detach()) - 0.5


def test_both_expert_implementations_give_the_same_gradients():
    grads = []
    for impl in ("dense", "grouped"):
        model = tiny_model().requires_grad_(True)
        model.dense_forward(
            torch.tensor([tokens_of(40)]), impl
        ).mtp_hidden.square().sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_it_runs_under_bfloat16_autocast(impl):
    model = tiny_model().requires_grad_(True)
    tokens = torch.tensor([tokens_of(40)])
    with torch.autocast("cpu", torch.bfloat16):
        out = model.dense_forward(tokens, impl)
    out.hidden.float().sum().backward()
    got, exact = out.hidden.detach(), model.dense_forward(tokens, impl).hidden.detach()
    assert float((got - exact).abs().mean() / exact.abs().mean()) < 0.1
