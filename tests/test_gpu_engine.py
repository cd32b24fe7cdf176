"""The model on a GPU: the shipped one against a CPU, graphs against single launches."""

import pytest
import torch
from device_cases import check_agreement, conversations, random_model
from model_cases import tokens_of

from pdmesh.launch.topology import shipped_model
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.padding import padded
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.device.step import DeviceStep, Paged, Part
from pdmesh.model.weights import load_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def reference():
    return load_model(shipped_model())


@pytest.fixture(scope="module")
def device():
    return DeviceModel.load(shipped_model(), "cuda")


@pytest.fixture(scope="module")
def talks(reference):
    return list(conversations(reference, shipped_model()))


FULL_HEADS = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
}


def batch_of(items, device):
    slices = [SequenceSlice(table, start, end, start) for table, start, end, _ in items]
    return Batch.build(slices, [whole[start:end] for _, start, end, whole in items], 64, device)


def test_every_operation_that_has_a_fast_version_uses_it(device):
    slow = {c.op for c in device.ops.choices if c.backend == "torch"}
    assert slow <= {"rms_norm"}, device.ops.describe()


def test_heads_of_the_published_sizes_agree_with_the_reference():
    """Random weights of deviation 0.03; a prompt, one behind a cached prefix, generated rows."""
    model = random_model(3, std=0.03, **FULL_HEADS)
    weights = build_weights(model.config, ModelSource(model, "cuda"), torch.device("cuda"))
    device = DeviceModel(model.config, weights)
    chosen = {c.op: c.backend for c in device.ops.choices}
    assert chosen["mla_prefill"] in ("flashinfer", "triton")
    tokens = tokens_of(130)
    pools = [m.new_latents(4).fill_(float("nan")) for m in (model, device)]
    for start, end, form in ((0, 90, "mha"), (90, 128, "mha"), (128, 130, "absorbed")):
        rows = []
        for m, pool in zip((model, device), pools, strict=True):
            batch = batch_of([((3, 0, 2), start, end, tokens)], m.device)
            rows.append(m.logits(m.forward(batch, pool, form)).cpu())
        off = (rows[0] - rows[1]).square().mean(-1).sqrt() / rows[0].std()
        assert float(off.median()) < 0.12, (start, end, form, chosen)


def test_prompts_say_what_the_reference_says(reference, device, talks):
    given, expected = [], []
    for tokens, answer in talks:
        rows = slice(len(tokens) - answer - 1, len(tokens) - 1)
        for model, kept in ((reference, expected), (device, given)):
            pool = model.new_latents(6).fill_(float("nan"))
            batch = batch_of([((5, 2, 1), 0, len(tokens), tokens)], model.device)
            kept.append(model.logits(model.forward(batch, pool, "mha"))[rows].cpu())
    check_agreement(torch.cat(given), torch.cat(expected))


@pytest.mark.parametrize("packed", [False, True], ids=["bf16 latents", "packed latents"])
def test_generated_rows_say_what_the_reference_says(reference, device, talks, packed):
    """Two rows a step in absorbed form, behind a prompt in MHA form."""
    if packed:
        device = DeviceModel.of(device.config, device.weights, latent_bytes=1)
    given, expected = [], []
    for tokens, answer in talks:
        begin = len(tokens) - answer - 1
        for model, kept in ((reference, expected), (device, given)):
            if model is device:
                pool = model.new_latents(6, packed=packed).fill_(255 if packed else torch.nan)
            else:
                pool = model.new_latents(6)
            model.forward(batch_of([((5, 2, 1), 0, begin, tokens)], model.device), pool, "mha")
            for at in range(begin, len(tokens) - 2, 2):
                step = batch_of([((5, 2, 1), at, at + 2, tokens)], model.device)
                kept.append(model.logits(model.forward(step, pool, "absorbed")).cpu())
    check_agreement(torch.cat(given), torch.cat(expected))


def test_the_mtp_layer_drafts_what_the_reference_drafts(reference, device, talks):
    given, expected = [], []
    for tokens, answer in talks:
        begin = len(tokens) - answer
        table, end = (5, 2, 1), len(tokens)
        for model, kept in ((reference, expected), (device, given)):
            pool = model.new_latents(6).fill_(float("nan"))
            prompt = batch_of([(table, 0, end, tokens)], model.device)
            hidden = model.forward(prompt, pool, "mha")
            first = batch_of([(table, 1, begin, tokens)], model.device)
            model.mtp_forward(first, hidden[: begin - 1], pool, "mha")
            for at in range(begin, end - 1, 2):
                step = batch_of([(table, at, at + 2, tokens)], model.device)
                rows = model.mtp_forward(step, hidden[at - 1 : at + 1], pool, "absorbed")
                kept.append(model.mtp_logits(rows).cpu())
    check_agreement(torch.cat(given), torch.cat(expected))


def test_a_prompt_in_parts_agrees_with_the_whole(device, talks):
    tokens, _ = talks[0]
    cut = len(tokens) // 2
    whole, parts = (device.new_latents(6).fill_(float("nan")) for _ in range(2))
    expected = device.logits(
        device.forward(batch_of([((5, 2), 0, len(tokens), tokens)], "cuda"), whole, "mha")
    )[cut:]
    device.forward(batch_of([((5, 2), 0, cut, tokens)], "cuda"), parts, "mha")
    given = device.logits(
        device.forward(batch_of([((5, 2), cut, len(tokens), tokens)], "cuda"), parts, "mha")
    )
    check_agreement(given.cpu(), expected.cpu())


@pytest.fixture(scope="module")
def captured(device, talks):
    """A pool with four prompts of which the last owns its first and last page, and graphs on it."""
    pool = device.new_latents(8).fill_(float("nan"))
    tokens = (talks[0][0] * 10)[:100]
    tables = [(1, 6), (2, 5), (3, 4), (0, 7)]
    hidden = device.forward(batch_of([(t, 0, 90, tokens) for t in tables], "cuda"), pool, "mha")
    last = [part[-1] for part in hidden.split(90)]
    before = torch.cat([part[:-1] for part in hidden.split(90)])
    mtp = batch_of([(t, 1, 90, tokens) for t in tables], "cuda")
    device.mtp_forward(mtp, before, pool, "mha")
    before_capture = pool.clone()
    device.capture(pool, (2,), 4, (2,))
    assert torch.equal(pool.view(torch.int16), before_capture.view(torch.int16))
    return pool, tables, tokens, last


def eager(device, batch, pool, rows, first_key, previous=None):
    """The padded step without a graph."""
    graphs = device._graphs[first_key][0]
    step = padded(batch, batch.host_tokens, rows, graphs.sizes, device.num_latent_layers)
    values = torch.from_numpy(step.values).cuda()
    table = torch.zeros((step.size, graphs.pages), dtype=torch.int32, device="cuda")
    real = torch.from_numpy(step.page_table).cuda()
    table[: real.shape[0], : real.shape[1]] = real
    lengths = torch.from_numpy(step.lengths).cuda()
    num_rows = torch.tensor([step.num_rows], dtype=torch.int32, device="cuda")
    paged = Part(None, Paged(rows, table, lengths))
    plain = DeviceStep(*values, num_rows, first_key, (paged,), None)
    at = torch.from_numpy(step.at).cuda()
    plain = device._layers.planned(plain)
    with torch.no_grad():
        if previous is None:
            return device.run(plain, pool)[at]
        before = previous.new_zeros((step.size * rows, previous.shape[1]))
        before[at] = previous
        return device.run_mtp(plain, before, pool)[at]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_replay_gives_the_bits_of_single_launches_and_touches_no_other_page(
    device, captured, count
):
    """vllm-project/vllm#43810, with the first and the last page of the pool in use."""
    pool, tables, tokens, last = captured
    ends = [92, 91, 92][:count]
    items = [(t, 90, end, tokens) for t, end in zip(tables, ends, strict=False)]
    batch = batch_of(items, "cuda")
    other = pool.clone()
    expected = eager(device, batch, other, 2, 0)
    given = device.forward(batch, pool, "absorbed")
    assert torch.equal(given, expected)
    previous = torch.cat([x[None].expand(e - 90, -1) for x, e in zip(last, ends, strict=False)])
    expected = eager(device, batch, other, 2, 1, previous)
    assert torch.equal(device.mtp_forward(batch, previous, pool, "absorbed"), expected)
    assert torch.equal(pool.view(torch.int16), other.view(torch.int16))
    unpadded = device.new_latents(8)
    unpadded.copy_(other)
    device._pool, kept = None, device._pool
    try:
        plain = device.forward(batch, unpadded, "absorbed")
    finally:
        device._pool = kept
    check_agreement(device.logits(given).cpu(), device.logits(plain).cpu())
