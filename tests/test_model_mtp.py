"""MTP, and layers that are MoE by frequency, against a plain statement of the equations."""

import math

import pytest
import torch
import torch.nn.functional as F
from model_cases import one_slice, run, stale_pool, tiny_model, tokens_of
from torch import Tensor

from pdmesh.model.batch import Batch
from pdmesh.model.moe import Moe
from pdmesh.model.reference import generate_reference


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Pairs (2i, 2i+1) as complex numbers times e^(i position theta_i)."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    dim = x.shape[-1]
    angles = position / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).float()


def attention(attn, rows: Tensor, positions: list[int]) -> Tensor:
    """DeepSeek-V3 report, equations 1 to 11, one query, one head and one key at a time."""
    q_rank, rank, nope = attn.q_rank, attn.rank, attn.nope
    joint = rows @ attn.qkv_a_proj.weight.T
    queries = rms(joint[:, :q_rank], attn.q_a_norm) @ attn.q_b_proj.weight.T
    queries = queries.view(len(rows), attn.heads, -1)
    latents = rms(joint[:, q_rank : q_rank + rank], attn.kv_a_norm)
    rotated = [rotate(k, p) for k, p in zip(joint[:, q_rank + rank :], positions, strict=True)]
    outputs = []
    for i, position in enumerate(positions):
        heads = []
        for head in range(attn.heads):
            query = torch.cat([queries[i, head, :nope], rotate(queries[i, head, nope:], position)])
            scores, values = [], []
            for j in range(i + 1):
                key = torch.cat([attn.k_b_proj[head] @ latents[j], rotated[j]])
                scores.append(query @ key / math.sqrt(len(key)))
                values.append(attn.v_b_proj[head] @ latents[j])
            heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        outputs.append(torch.cat(heads))
    return torch.stack(outputs) @ attn.o_proj.weight.T


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def feed_forward(mlp, rows: Tensor) -> Tensor:
    """Equations 12 to 16 with group-limited choice, one row at a time."""
    if not isinstance(mlp, Moe):
        return swiglu(rows, mlp.gate_up_proj.weight, mlp.down_proj.weight)
    rule, outputs = mlp.gate.rule, []
    size = rule.num_experts // rule.num_groups
    for row in rows:
        affinity = torch.sigmoid(mlp.gate.weight @ row)
        biased = (affinity + mlp.gate.e_score_correction_bias).tolist()
        rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(rule.num_groups)]
        groups = sorted(range(rule.num_groups), key=lambda g: -rank[g])[: rule.top_groups]
        allowed = [e for e in range(rule.num_experts) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: rule.top_k]
        total = sum(float(affinity[e]) for e in chosen)
        shared = mlp.shared_experts
        out = swiglu(row, shared.gate_up_proj.weight, shared.down_proj.weight)
        for e in chosen:
            weight = rule.scale * float(affinity[e]) / total
            out = out + weight * swiglu(row, mlp.gate_up_proj[e], mlp.down_proj[e])
        outputs.append(out)
    return torch.stack(outputs)


def layer(block, rows: Tensor, positions: list[int]) -> Tensor:
    rows = rows + attention(block.self_attn, rms(rows, block.input_norm), positions)
    return rows + feed_forward(block.mlp, rms(rows, block.post_norm))


@pytest.mark.parametrize("freq", [1, 2, 3])
def test_layers_and_mtp_follow_the_equations(freq):
    model = tiny_model(num_hidden_layers=4, moe_layer_freq=freq)
    kinds = [isinstance(block.mlp, Moe) for block in model.blocks()]
    assert kinds == [i >= 1 and i % freq == 0 for i in range(5)]
    tokens = tokens_of(12, 1)
    rows = model.embed_tokens[tokens]
    for block in model.blocks()[:-1]:
        rows = layer(block, rows, list(range(12)))
    mtp = model.mtp
    joined = torch.cat(
        [rms(model.embed_tokens[tokens[1:]], mtp.enorm), rms(rows[:-1], mtp.hnorm)], dim=-1
    )
    predicted = layer(mtp.block, joined @ mtp.eh_proj.weight.T, list(range(1, 12)))
    logits = rms(predicted, mtp.head_norm) @ model.lm_head.T

    pool = stale_pool(model, 2)
    hidden = run(model, pool, "mha", (one_slice((1,), 0, 12), tokens))[0]
    torch.testing.assert_close(hidden, rows, atol=2e-5, rtol=1e-4)
    batch = Batch.build([one_slice((1,), 1, 12)], [tokens[1:]])
    for form in ("mha", "absorbed"):
        got = model.mtp_forward(batch, hidden[:-1], pool, form)
        torch.testing.assert_close(got, predicted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(model.mtp_logits(got), logits, atol=1e-4, rtol=1e-4)
    dense = model.dense_forward(torch.tensor([tokens]))
    torch.testing.assert_close(dense.mtp_hidden[0, 1:], predicted, atol=2e-5, rtol=1e-4)


def test_position_0_has_no_mtp_row():
    model = tiny_model()
    batch = Batch.build([one_slice((0,), 0, 2)], [[1, 2]])
    with pytest.raises(ValueError, match="no row for position 0"):
        model.mtp_forward(batch, torch.zeros(2, 64), model.new_latents(1), "mha")


def test_a_model_without_mtp_says_so():
    model = tiny_model(num_nextn_predict_layers=0)
    batch = Batch.build([one_slice((0,), 1, 2)], [[1]])
    with pytest.raises(ValueError, match="no MTP layer"):
        model.mtp_forward(batch, torch.zeros(1, 64), model.new_latents(1), "mha")
    with pytest.raises(ValueError, match="no MTP layer"):
        model.mtp_logits(torch.zeros(1, 64))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 120])
def test_drafting_changes_no_token(length):
    model = tiny_model(seed=4)
    prompt = tokens_of(length, length)
    plain = generate_reference(model, prompt, 70)
    assert generate_reference(model, prompt, 70, mtp=True) == plain
    assert len(plain) == 70
    stop = plain[30]
    expected = plain[: plain.index(stop) + 1]
    assert generate_reference(model, prompt, 70, {stop}) == expected
    assert generate_reference(model, prompt, 70, {stop}, mtp=True) == expected


def test_drafts_that_are_always_right_change_no_token():
    """The MTP layer is made to repeat its token, in a model that repeats itself."""
    model = tiny_model(seed=5)
    for block in model.blocks():
        block.self_attn.o_proj.weight.zero_()
        down = block.mlp.down_proj
        (down if isinstance(down, torch.nn.Parameter) else down.weight).zero_()
        if isinstance(block.mlp, Moe):
            block.mlp.shared_experts.down_proj.weight.zero_()
    model.lm_head.copy_(model.embed_tokens)
    model.norm.fill_(1.0)
    plain = generate_reference(model, [7, 9], 20)
    assert plain == [9] * 20
    hidden = 64
    model.mtp.eh_proj.weight.zero_()
    model.mtp.eh_proj.weight[:, :hidden] = torch.eye(hidden)
    model.mtp.enorm.fill_(1.0)
    model.mtp.head_norm.fill_(1.0)
    assert generate_reference(model, [7, 9], 20, mtp=True) == plain
    assert generate_reference(model, [7, 9], 19, mtp=True) == plain[:19]
