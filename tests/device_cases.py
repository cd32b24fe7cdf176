"""Device models for tests: with FP8 arithmetic, and with the same weights and plain arithmetic."""

from functools import partial

import torch
from model_cases import tiny_model
from tokenizers import Tokenizer

from pdmesh.kernels.backends import PLAIN, Backends, Choice
from pdmesh.kernels.fp8 import dequantise_blocks, quantise_blocks
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.routing import Permuted
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.bindings import bindings
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.reference import generate_reference
from pdmesh.tools.tiny_answers import render

CPU = torch.device("cpu")
ALIGNED = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
}


def stored(model):
    """The model with its matrices as an FP8 checkpoint would give them back."""
    for binding in bindings(model):
        if binding.matrix:
            binding.write(dequantise_blocks(*quantise_blocks(binding.read())))
    return model


def random_model(seed=0, **changes):
    return stored(tiny_model(seed, **changes))


def device_model(model, ops=None, dtype=torch.bfloat16):
    weights = build_weights(model.config, ModelSource(model), CPU, dtype=dtype)
    return DeviceModel(model.config, weights, ops)


def exact_model(model):
    """The same layers on the same weights, with nothing quantised on the way: all in float32."""
    return device_model(model, exact_ops(), torch.float32)


def exact_ops():
    calls = PLAIN | {
        "rms_norm_quantise": lambda x, w, eps: _both(PLAIN["rms_norm"](x, w, eps)),
        "add_rms_norm_quantise": _add_norm,
        "quantise_rows": _wrapped,
        "silu_mul_quantise": lambda x: _wrapped(_silu_mul(x)),
        "masked_silu_mul_quantise": lambda x, counts: _wrapped(_silu_mul(x)),
        "fp8_gemm": lambda x, w: x.values @ dequantise_blocks(*w).t(),
        "masked_grouped_gemm": _masked,
        "contiguous_grouped_gemm": _contiguous,
        "absorb_query": _absorb,
        "project_values_quantise": _project,
        "permute_masked": partial(_moved, "permute_masked"),
        "permute_contiguous": partial(_moved, "permute_contiguous"),
    }
    return Backends([Choice(op, "exact", "for a test", call) for op, call in calls.items()])


def _wrapped(x):
    return Rows(x.clone(), torch.ones(*x.shape[:-1], 1))


def _both(normed):
    return _wrapped(normed), normed


def _add_norm(x, residual, weight, eps):
    residual.add_(x)
    return _both(PLAIN["rms_norm"](residual, weight, eps))


def _silu_mul(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _masked(x, weight, counts, expected, used, *, out=None):
    assert int((counts > 0).sum()) <= used or not used
    dense = torch.stack([dequantise_blocks(v, s) for v, s in zip(*weight, strict=True)])
    output = torch.bmm(x.values, dense.transpose(1, 2))
    for expert, count in enumerate(counts.tolist()):
        output[expert, count:] = torch.nan
    return output


def _contiguous(x, weight, row_expert, expected, *, out=None):
    output = torch.full((x.values.shape[0], weight.values.shape[1]), torch.nan)
    for expert in range(weight.values.shape[0]):
        chosen = row_expert == expert
        one = BlockWeight(weight.values[expert], weight.scales[expert])
        output[chosen] = x.values[chosen] @ dequantise_blocks(*one).t()
    return output


def _heads(weight):
    return torch.stack([dequantise_blocks(v, s) for v, s in zip(*weight, strict=True)])


def _absorb(query, weight, rotated, scale):
    latent = torch.einsum("mhd,hrd->mhr", query, _heads(weight))
    return torch.cat([latent, rotated], dim=-1) * scale


def _project(latent, weight):
    return _wrapped(torch.einsum("mhr,hvr->mhv", latent, _heads(weight)).flatten(1))


def _moved(op, rows, *rest):
    """Float rows to where the operation puts rows in FP8: each carries its number as its scale."""
    m = rows.values.shape[0]
    index = Rows(
        torch.zeros(m, 8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.arange(1.0, m + 1).unsqueeze(1),
    )
    permuted = PLAIN[op](index, *rest)
    values = torch.full((*permuted.rows.values.shape[:-1], rows.values.shape[1]), torch.nan)
    targets = permuted.targets.long()
    chosen = targets >= 0
    flat = values.flatten(0, -2)
    flat[targets[chosen]] = rows.values.repeat_interleave(targets.shape[1], 0)[chosen.flatten()]
    return Permuted(_wrapped(values), permuted.targets, permuted.row_expert)


QUESTIONS = ("Hello! Who are you?", "Tell me a story.")


def conversations(model, path, tokens=24):
    """Questions with the model's own greedy answers: (all tokens, tokens of the answer)."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for question in QUESTIONS:
        prompt = tokenizer.encode(render([], question), add_special_tokens=False).ids
        answer = generate_reference(model, prompt, tokens, model.config.eos_token_ids)
        yield [*prompt, *answer], len(answer)


def check_agreement(given, expected):
    """Logits [n, vocab]: a usual row is off by under 8 % of the spread; the likeliest tokens are
    the same but for one in twenty, and differ where the two best are within the error only."""
    off = (given - expected).square().mean(-1).sqrt()
    assert float(off.median()) < 0.08 * float(expected.std())
    same = given.argmax(-1) == expected.argmax(-1)
    assert float(same.float().mean()) >= 0.95
    for row in (~same).nonzero().flatten().tolist():
        best = expected[row].topk(2).values
        assert float(best[0] - best[1]) < 2 * float((given[row] - expected[row]).abs().max())


def logits_at(model, tokens, position):
    pages = -(-len(tokens) // 64)
    batch = Batch.build([SequenceSlice(tuple(range(pages)), 0, len(tokens), 0)], [tokens])
    hidden = model.forward(batch, model.new_latents(pages), "mha")
    return model.logits(hidden[[position]])[0]


def check_answer(model, prompt, given, expected):
    """Tokens are the reference's up to a place where its two best are nearly as likely."""
    pairs = enumerate(zip(given, expected, strict=False))
    different = next((i for i, (a, b) in pairs if a != b), None)
    if different is None:
        return 0
    whole = [*prompt, *expected]
    logits = logits_at(model, whole, len(prompt) + different - 1)
    gap = float(logits.max() - logits[given[different]])
    # An FP8 logit is off by 4 % of the spread in the root mean square, by five times that at most.
    assert gap < 2 * 5 * 0.04 * float(logits.std()), (different, given, expected)
    return 1
