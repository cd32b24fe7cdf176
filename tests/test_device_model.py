"""The model with FP8 weights against the reference: structure exactly, rounding by a bound."""

import pytest
import torch
from device_cases import (
    ALIGNED,
    check_agreement,
    conversations,
    device_model,
    exact_model,
    random_model,
)
from model_cases import V2, tokens_of, yarn

from pdmesh.launch.topology import shipped_model
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device import layers
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.weights import load_model

PAGE = 16
MODELS = {
    "heads inside blocks": lambda: random_model(),
    "heads of 128": lambda: random_model(1, **ALIGNED),
    "no q_lora, odd sizes": lambda: random_model(
        2, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, hidden_size=52
    ),
    "softmax router": lambda: random_model(3, **V2),
    "biases, yarn, halves rotated, a head that is the embedding": lambda: random_model(
        4,
        attention_bias=True,
        rope_scaling=yarn(),
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
    "wider than a block": lambda: random_model(
        5, hidden_size=320, q_lora_rank=200, moe_intermediate_size=136, intermediate_size=200
    ),
}


def mixed_batch():
    """Prompts and generated rows, of different lengths, over shuffled pages of 16."""
    whole = [tokens_of(60, seed) for seed in range(4)]
    tables = [(3, 9, 1, 12), (0, 2, 15, 5), (7, 4, 11, 6), (8, 10, 13, 14)]
    before = [(0, 40, None), (0, 33, None), (0, 17, None), (0, 5, None)]
    after = [(40, 43, "absorbed"), (30, 50, "mha"), (17, 18, "absorbed"), (5, 40, "mha")]
    batches = []
    for ranges in (before, after):
        slices = [
            SequenceSlice(
                table, start, end, 33 if form == "mha" and start == 30 else start, None, form
            )
            for table, (start, end, form) in zip(tables, ranges, strict=True)
        ]
        tokens = [w[s.start : s.end] for w, s in zip(whole, slices, strict=True)]
        batches.append(Batch.build(slices, tokens, PAGE))
    return batches


@pytest.mark.parametrize("masked", [True, False], ids=["masked experts", "sorted experts"])
@pytest.mark.parametrize("name", MODELS)
def test_without_rounding_every_layer_gives_what_the_reference_gives(name, masked, monkeypatch):
    monkeypatch.setattr(layers, "MASKED_ROWS", 10**6 if masked else 0)
    model = MODELS[name]()
    device = exact_model(model)
    pools = [model.new_latents(16, PAGE).fill_(float("nan")) for _ in range(2)]
    for number, batch in enumerate(mixed_batch()):
        form = "mha" if number == 0 else "absorbed"
        seen: list[int] = []
        expected = model.forward(batch, pools[0], form)
        hidden = device.forward(batch, pools[1], form, seen.append)
        assert seen == list(range(model.config.num_hidden_layers))
        torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(device.logits(hidden), model.logits(expected), rtol=0, atol=2e-3)
    torch.testing.assert_close(pools[1], pools[0], rtol=1e-3, atol=1e-3, equal_nan=True)


def test_the_mtp_layer_begins_at_position_one_and_reads_no_slot_before_it():
    model = random_model(6)
    device = exact_model(model)
    tokens, table = tokens_of(40), (2, 0, 3)
    pools = [model.new_latents(4, PAGE).fill_(float("nan")) for _ in range(2)]
    hidden = model.forward(
        Batch.build([SequenceSlice(table, 0, 40, 0)], [tokens], PAGE), pools[0], "mha"
    )
    for start, end, form in ((1, 30, "mha"), (30, 33, "absorbed"), (33, 34, "absorbed")):
        batch = Batch.build([SequenceSlice(table, start, end, start)], [tokens[start:end]], PAGE)
        before = hidden[start - 1 : end - 1]
        expected = model.mtp_forward(batch, before, pools[0], form)
        given = device.mtp_forward(batch, before, pools[1], form)
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(
            device.mtp_logits(given), model.mtp_logits(expected), rtol=0, atol=2e-3
        )
    assert bool(pools[1][2, -1, 0].isnan().all())
    with pytest.raises(ValueError, match="no row for position 0"):
        device.mtp_forward(
            Batch.build([SequenceSlice(table, 0, 1, 0)], [[5]], PAGE), hidden[:1], pools[1], "mha"
        )


def test_a_tree_of_drafts_is_computed_as_the_reference_does():
    model = random_model(7)
    device = exact_model(model)
    tokens = tokens_of(40)
    pools = [model.new_latents(6, PAGE) for _ in range(2)]
    first = Batch.build(
        [SequenceSlice((2, 0, 3), 0, 20, 0), SequenceSlice((1, 4, 5), 0, 9, 0)],
        [tokens[:20], tokens[:9]],
        PAGE,
    )
    tree = Batch.build(
        [
            SequenceSlice((2, 0, 3), 20, 25, 20, (-1, 0, 0, 1, 2)),
            SequenceSlice((1, 4, 5), 9, 11, 9),
        ],
        [tokens[20:25], tokens[9:11]],
        PAGE,
    )
    for batch, form in ((first, "mha"), (tree, "absorbed")):
        expected = model.forward(batch, pools[0], form)
        given = device.forward(batch, pools[1], form)
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=2e-4)


def test_what_does_not_fit_is_refused():
    device = exact_model(random_model(8))
    batch = Batch.build([SequenceSlice((0,), 0, 4, 0)], [[1, 2, 3, 4]], PAGE)
    with pytest.raises(ValueError, match="contiguous"):
        device.forward(batch, torch.zeros(2, 3, PAGE, 48), "mha")
    with pytest.raises(ValueError, match="pages of 32, the batch of 16"):
        device.forward(batch, device.new_latents(2, 32), "mha")
    far = Batch.build([SequenceSlice(tuple(range(65)), 1024, 1025, 1024)], [[1]], PAGE)
    with pytest.raises(ValueError, match="beyond max_position"):
        device.forward(far, device.new_latents(65, PAGE), "absorbed")


@pytest.fixture(scope="module")
def shipped():
    """(reference, device model, conversations) of the shipped model."""
    path = shipped_model()
    reference = load_model(path)
    return reference, DeviceModel.load(path), list(conversations(reference, path))


def test_the_shipped_model_in_fp8_says_what_it_says_in_float32(shipped):
    """A value in e4m3 is off by up to 1/16, evenly spread: 1/16/sqrt(3) = 3.6 % of its size in the
    root mean square. So is every product, relative to its own size, and a layer adds two such to a
    stream that keeps its own rounding in bfloat16: with the errors of the layers independent, the
    logits of a usual position are off by about sqrt(2) times 3.6 % = 5 % of their spread. A
    position where a router decides a near tie the other way may be off by more."""
    reference, device, talks = shipped
    given, expected = [], []
    for tokens, answer in talks:
        rows = slice(len(tokens) - answer - 1, len(tokens) - 1)
        batch = Batch.build([SequenceSlice((5, 2), 0, len(tokens), 0)], [tokens])
        for model, kept in ((reference, expected), (device, given)):
            pool = model.new_latents(6).fill_(float("nan"))
            kept.append(model.logits(model.forward(batch, pool, "mha"))[rows])
    check_agreement(torch.cat(given), torch.cat(expected))


def test_the_shipped_model_over_packed_latents_says_what_it_says_in_float32(shipped):
    """Answers in absorbed form over a prompt in MHA form, with one scale for a latent."""
    reference, device, talks = shipped
    given, expected = [], []
    for tokens, answer in talks:
        begin, end = len(tokens) - answer - 1, len(tokens) - 1
        for model, kept in ((reference, expected), (device, given)):
            if model is device:
                pool = device.new_latents(6, packed=True).fill_(255)
            else:
                pool = model.new_latents(6)
            for ends, form in (((0, begin), "mha"), ((begin, end), "absorbed")):
                piece = SequenceSlice((5, 2), *ends, ends[0])
                batch = Batch.build([piece], [tokens[slice(*ends)]])
                hidden = model.forward(batch, pool, form)
            kept.append(model.logits(hidden))
    check_agreement(torch.cat(given), torch.cat(expected))


def test_both_forms_of_attention_agree_within_the_rounding():
    """The routers of random weights decide more near ties than trained ones: hence 12 %, not 8."""
    model = random_model(9, **ALIGNED)
    device = device_model(model)
    tokens, table = tokens_of(40), (1, 0, 2)
    batch = Batch.build([SequenceSlice(table, 0, 40, 0)], [tokens], PAGE)
    given = [
        device.logits(device.forward(batch, device.new_latents(3, PAGE), form))
        for form in ("mha", "absorbed")
    ]
    expected = model.logits(model.forward(batch, model.new_latents(3, PAGE), "mha"))
    spread = float(expected.std())
    for logits in given:
        off = (logits - expected).square().mean(-1).sqrt()
        assert float(off.median()) < 0.12 * spread


def test_packed_latents_cost_no_more_than_the_rounding_of_one_more_product():
    """Latents in FP8 are off by 3.6 % in the root mean square, as every product's rows are."""
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = random_model(10, **ALIGNED | wide)
    device = device_model(model)
    tokens, table = tokens_of(40), (1, 0, 2)
    expected = model.new_latents(3, PAGE)
    pools = [device.new_latents(3, PAGE, packed).fill_(0) for packed in (False, True)]
    off = [[], []]
    for start, end, form in ((0, 30, "mha"), (30, 33, "absorbed"), (33, 40, "mha")):
        batch = Batch.build([SequenceSlice(table, start, end, start)], [tokens[start:end]], PAGE)
        right = model.logits(model.forward(batch, expected, form))
        for errors, pool in zip(off, pools, strict=True):
            logits = device.logits(device.forward(batch, pool, form))
            errors.append((logits - right).square().mean(-1).sqrt() / right.std())
    plain, packed = (float(torch.cat(errors).median()) for errors in off)
    assert packed < 1.5 * plain + 0.01
    tree = SequenceSlice(table, 40, 42, 40, (-1, -1))
    with pytest.raises(ValueError, match="not packed"):
        device.forward(Batch.build([tree], [[1, 2]], PAGE), pools[1], "absorbed")
