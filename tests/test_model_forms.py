"""Two forms in one batch, the form of a prompt, and the arithmetic where every row is absorbed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import TINY, equal, one_slice, run, same_latents, stale_pool, tiny_model, tokens_of

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.config import ModelConfig
from pdmesh.model.form import form_costs, prefill_form
from pdmesh.model.reference import generate_reference
from pdmesh.wire.sampling import SamplingParams

MODEL = tiny_model(21)
DEEPSEEK_V3 = TINY | {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def config(**changes):
    return ModelConfig.from_hf(DEEPSEEK_V3 | changes)


@pytest.mark.parametrize(
    ("cached", "crossover"), [(128, 117), (512, 149), (1024, 158), (4096, 167), (131072, 170.6)]
)
def test_the_form_changes_where_the_operations_are_equal(cached, crossover):
    below, above = int(crossover), int(crossover) + 1
    assert prefill_form(config(), cached, cached + below - 1) == "absorbed"
    assert prefill_form(config(), cached, cached + above) == "mha"
    mha, absorbed = form_costs(config(), cached, below)
    assert mha / absorbed == pytest.approx(1.0, abs=0.005)


def test_the_costs_are_those_of_the_dims():
    """DeepSeek-V3: 81,920 operations a pair in MHA form, 278,528 absorbed, 33.55e6 a projection."""
    mha, absorbed = form_costs(config(), 1000, 10)
    pairs = 10 * 1000 + 10 * 10 / 2
    assert mha == 2 * (81_920 * pairs + 2**25 * 1010)
    assert absorbed == 2 * (278_528 * pairs + 2**25 * 10)
    half = form_costs(config(num_attention_heads=64, num_key_value_heads=64), 1000, 10)
    assert half == (mha // 2, absorbed // 2)


def test_a_prompt_with_nothing_cached_is_in_mha_form_and_a_cached_one_counts_one_token():
    assert prefill_form(config(), 0, 1) == "mha"
    assert prefill_form(config(), 640, 640) == prefill_form(config(), 639, 640) == "absorbed"
    # Two tokens, one of them cached: one projection for two pairs.
    assert prefill_form(config(), 1, 2) == "absorbed"
    # Latents so narrow that absorbed form costs less for every pair.
    narrow = config(kv_lora_rank=32)
    assert prefill_form(narrow, 64, 10_000) == "absorbed"
    assert prefill_form(narrow, 0, 10_000) == "mha"


def mixed_step(plan, seed):
    """(slice, tokens, cached whole) of sequences (cached, rows, form, tree) over shuffled pages."""
    pick = random.Random(seed)
    ids = list(range(16 * len(plan)))
    pick.shuffle(ids)
    items, tokens, pool = [], [], stale_pool(MODEL, len(ids), 16)
    for number, (start, rows, form, tree) in enumerate(plan):
        table, whole = tuple(ids[16 * number :][:16]), tokens_of(start + rows, seed + number)
        if start:
            run(MODEL, pool, "mha", (one_slice(table, 0, start), whole))
        parents = (-1, *(pick.randrange(i) for i in range(1, rows))) if tree else None
        items.append(SequenceSlice(table, start, start + rows, start, parents, form))
        tokens.append(whole[start:])
    return pool, items, tokens


sequences = st.tuples(
    st.integers(0, 140),
    st.integers(1, 70),
    st.sampled_from(["mha", "absorbed", None]),
    st.booleans(),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(sequences, min_size=2, max_size=5), st.integers(0, 99))
def test_a_row_in_a_batch_of_two_forms_equals_its_row_in_a_batch_of_one(plan, seed):
    pool, items, tokens = mixed_step(plan, seed)
    for default in ("mha", "absorbed"):
        together_pool = pool.clone()
        got = MODEL(Batch.build(items, tokens, 16), together_pool, default)
        parts = got.split([item.end - item.start for item in items])
        alone_pool = pool.clone()
        for form in ("mha", "absorbed"):
            own = [i for i, item in enumerate(items) if (item.form or default) == form]
            if not own:
                continue
            plain = [
                SequenceSlice(x.page_table, x.start, x.end, x.write_from, x.parents)
                for x in (items[i] for i in own)
            ]
            batch = Batch.build(plain, [tokens[i] for i in own], 16)
            rows = MODEL(batch, alone_pool, form)
            assert equal(torch.cat([parts[i] for i in own]), rows)
        assert same_latents(together_pool, alone_pool)


def test_mtp_rows_of_two_forms_equal_those_of_one():
    plan = [
        (50, 1, "absorbed", False),
        (3, 20, "mha", False),
        (70, 3, None, True),
        (9, 5, "mha", False),
    ]
    pool, items, tokens = mixed_step(plan, 5)
    generator = torch.Generator().manual_seed(0)
    pool[:, -1] = torch.randn(pool[:, -1].shape, generator=generator)
    previous = torch.randn(29, 64, generator=generator)
    got = MODEL.mtp_forward(Batch.build(items, tokens, 16), previous, pool.clone(), "absorbed")
    first = 0
    for item, ids in zip(items, tokens, strict=True):
        rows = slice(first, first + len(ids))
        first += len(ids)
        plain = SequenceSlice(item.page_table, item.start, item.end, item.start, item.parents)
        batch = Batch.build([plain], [ids], 16)
        alone = MODEL.mtp_forward(batch, previous[rows], pool.clone(), item.form or "absorbed")
        assert equal(got[rows], alone)


def test_the_two_forms_are_close_and_not_the_same_bits():
    """Otherwise the tests above could not tell which form a row had."""
    whole = tokens_of(90, 2)
    item = (one_slice((0, 1), 0, 90), whole)
    mha, absorbed = (
        run(MODEL, stale_pool(MODEL, 2), form, item)[0] for form in ("mha", "absorbed")
    )
    assert not torch.equal(mha, absorbed)
    torch.testing.assert_close(mha, absorbed, atol=1e-4, rtol=1e-3)


@st.composite
def provenance(draw):
    """A page size, and how the positions of a sequence get their latents: cuts into steps."""
    length = draw(st.integers(2, 150))
    cuts = draw(st.lists(st.integers(1, length - 1), max_size=6, unique=True).map(sorted))
    return draw(st.sampled_from([8, 16, 32, 64, 128])), length, cuts


@settings(max_examples=30, deadline=None, derandomize=True)
@given(provenance(), st.integers(0, 99))
def test_in_exact_arithmetic_no_bit_depends_on_where_a_latent_came_from(plan, seed):
    """Prompt at once; or chunks, steps of one token, a prefix of another sequence, neighbours."""
    page_size, length, cuts = plan
    whole = tokens_of(length, seed)
    at_once = stale_pool(MODEL, 3, 64)
    expected = run(MODEL, at_once, "absorbed", (one_slice((0, 1, 2), 0, length), whole))[0]

    count = -(-length // page_size)
    table = tuple(range(count))
    pool = stale_pool(MODEL, 2 * count + 1, page_size)
    bounds = [0, *cuts, length]
    pick = random.Random(seed)
    other = tokens_of(length, seed + 1)
    rows = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        item = (one_slice(table, start, end), whole)
        neighbour = (one_slice(tuple(p + count for p in table), 0, min(end, 5)), other)
        if end - start <= 12 and pick.random() < 0.5:
            one_by_one = [one_slice(table, p, p + 1) for p in range(start, end)]
            rows += [run(MODEL, pool, "absorbed", (s, whole))[0] for s in one_by_one]
        elif pick.random() < 0.5:
            rows += run(MODEL, pool, "absorbed", neighbour, item)[1:]
        else:
            rows += run(MODEL, pool, "absorbed", item)
    assert equal(torch.cat(rows), expected)
    held = pool[:count].transpose(1, 2).flatten(0, 1)[:length]
    assert same_latents(held, at_once.transpose(1, 2).flatten(0, 1)[:length])

    shared = (length - 1) // page_size
    if shared:
        hit = (*range(shared), *range(2 * count, 2 * count - (count - shared), -1))
        item = one_slice(hit, shared * page_size, length)
        assert equal(run(MODEL, pool, "absorbed", (item, whole))[0], expected[shared * page_size :])


def test_an_exact_answer_as_a_longer_prompt_gives_the_same_next_logits():
    """Latents of generated and of prompt tokens are bitwise the same; in fast arithmetic not."""
    prompt, sampled = tokens_of(70, 6), SamplingParams(temperature=1.0, seed=5)

    def logits(tokens, count, arithmetic):
        seen = []
        got = generate_reference(
            MODEL, tokens, count, arithmetic=arithmetic, sampling=sampled, on_logits=seen.append
        )
        return got, torch.cat(seen)

    for arithmetic, same in (("exact", True), ("fast", False)):
        tokens, expected = logits(prompt, 10, arithmetic)
        assert expected.shape == (10, 131)
        equal_bits = [
            torch.equal(logits(prompt + tokens[:n], 1, arithmetic)[1][0], expected[n])
            for n in range(1, 10)
        ]
        assert all(equal_bits) if same else not any(equal_bits)


def test_exact_answers_are_the_same_with_drafts_and_for_every_page_size():
    prompt = tokens_of(50, 9)
    for sampling in (None, SamplingParams(temperature=0.8, seed=11, min_p=0.01)):
        plain = generate_reference(MODEL, prompt, 20, arithmetic="exact", sampling=sampling)
        for page_size in (8, 64):
            drafted = generate_reference(
                MODEL, prompt, 20, mtp=True, arithmetic="exact", sampling=sampling,
                page_size=page_size,
            )  # fmt: skip
            assert drafted == plain
    greedy = generate_reference(MODEL, prompt, 20, arithmetic="exact")
    assert greedy != plain


def test_answers_of_one_request_differ_by_their_index():
    sampling = SamplingParams(temperature=1.5, seed=3)
    answers = [
        tuple(generate_reference(MODEL, [1, 2], 8, sampling=sampling, index=i, mtp=i % 2 == 1))
        for i in (0, 1, 2, 0)
    ]
    assert answers[0] == answers[3]
    assert len(set(answers)) == 3


def test_stop_tokens_and_max_tokens_end_a_reference_answer():
    plain = generate_reference(MODEL, [1, 2], 20, sampling=SamplingParams())
    stop = plain[5]
    first = plain.index(stop)
    sampling = SamplingParams(stop_token_ids=(stop,))
    for mtp in (False, True):
        got = generate_reference(MODEL, [1, 2], 20, sampling=sampling, mtp=mtp)
        assert got == plain[: first + 1]
    kept = SamplingParams(ignore_eos=True)
    assert generate_reference(MODEL, [1, 2], 20, {stop}, sampling=kept) == plain
    assert generate_reference(MODEL, [1, 2], 0) == []
