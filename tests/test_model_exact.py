"""A row is bitwise the same whatever shares the batch with it, and however it got there."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import equal, one_slice, run, stale_pool, tokens_of, various_models

from pdmesh.kernels.page_walk import Tiling
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.deepseek import DeepseekV3

FORMS = ("mha", "absorbed")
MODELS = various_models()


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> DeepseekV3:
    return MODELS[request.param]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_alone_equals_the_row_in_a_batch_of_many_in_any_order(model, form):
    lengths = [1, 2, 63, 64, 65, 130, 200, 3, 77, 128]
    whole = [tokens_of(n, seed) for seed, n in enumerate(lengths)]
    tables = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(lengths))]
    items = [(one_slice(t, 0, len(w)), w) for t, w in zip(tables, whole, strict=True)]
    alone = [run(model, stale_pool(model, 40), form, item)[0] for item in items]
    together = run(model, stale_pool(model, 40), form, *items)
    order = list(range(len(items)))
    random.Random(5).shuffle(order)
    shuffled = run(model, stale_pool(model, 40), form, *[items[i] for i in order])
    for number in range(len(items)):
        assert equal(alone[number], together[number]), lengths[number]
        assert equal(alone[number], shuffled[order.index(number)]), lengths[number]


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(model, form):
    whole = tokens_of(210, 9)
    pages = (7, 2, 5, 0)
    at_once_pool = stale_pool(model, 8)
    at_once = run(model, at_once_pool, form, (one_slice(pages, 0, 210), whole))[0]
    for cuts in ([64, 128], [1, 2, 3], [100], [63, 65, 200], [8, 130, 209]):
        pool = stale_pool(model, 8)
        bounds = [0, *cuts, 210]
        parts = [
            run(model, pool, form, (one_slice(pages, a, b), whole))[0]
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        assert equal(torch.cat(parts), at_once), cuts
        assert torch.equal(pool.nan_to_num(), at_once_pool.nan_to_num())


@pytest.mark.parametrize("form", FORMS)
def test_after_a_prefix_hit_the_rest_equals_a_cold_run(model, form):
    whole = tokens_of(150, 3)
    pool = stale_pool(model, 8)
    cold = run(model, pool, form, (one_slice((0, 1, 2), 0, 150), whole))[0]
    # Another sequence shares pages 0 and 1 and has its own third page.
    hit = run(model, pool, form, (one_slice((0, 1, 6), 128, 150), whole))[0]
    assert equal(hit, cold[128:])


@pytest.mark.parametrize("form", FORMS)
def test_a_full_prefix_hit_recomputes_one_position_and_writes_nothing(model, form):
    whole = tokens_of(128, 4)
    pool = stale_pool(model, 4)
    cold = run(model, pool, form, (one_slice((2, 1), 0, 128), whole))[0]
    before = pool.clone()
    again = run(model, pool, form, (one_slice((2, 1), 127, 128, write_from=128), whole))[0]
    assert equal(again, cold[127:])
    assert torch.equal(pool.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
    # What it recomputes is what stands there: only a foreign number shows that nothing is written.
    pool[1, :, 63] = 5.0
    run(model, pool, form, (one_slice((2, 1), 127, 128, write_from=128), whole))
    assert bool((pool[1, :, 63] == 5.0).all())


def test_two_rows_of_a_verified_draft_equal_two_steps_of_one_row(model):
    whole = tokens_of(140, 5)
    for start in (62, 63, 64, 127, 100):
        pools = [stale_pool(model, 4) for _ in range(2)]
        for pool in pools:
            run(model, pool, "mha", (one_slice((3, 0, 1), 0, start), whole))
        both = run(model, pools[0], "absorbed", (one_slice((3, 0, 1), start, start + 2), whole))[0]
        one = [
            run(model, pools[1], "absorbed", (one_slice((3, 0, 1), p, p + 1), whole))[0]
            for p in (start, start + 1)
        ]
        assert equal(both, torch.cat(one)), start


def test_rows_in_tiles_of_any_size_equal_rows_one_by_one_in_absorbed_form(model):
    whole = tokens_of(90, 6)
    one_by_one = stale_pool(model, 4)
    single = torch.cat(
        [
            run(model, one_by_one, "absorbed", (one_slice((1, 3), p, p + 1), whole))[0]
            for p in range(90)
        ]
    )
    for start in (0, 27, 58, 74, 82, 86, 87):
        pool = one_by_one.clone()
        rows = run(model, pool, "absorbed", (one_slice((1, 3), start, 90), whole))[0]
        assert equal(rows, single[start:]), 90 - start


def test_a_rejected_draft_leaves_nothing_that_later_rows_can_see(model):
    whole = tokens_of(80, 7)
    clean, dirty = (stale_pool(model, 2) for _ in range(2))
    for pool in (clean, dirty):
        run(model, pool, "mha", (one_slice((1, 0), 0, 70), whole))
    wrong = whole[:71] + [(whole[71] + 1) % 131]
    run(model, dirty, "absorbed", (one_slice((1, 0), 70, 72), wrong))
    run(model, clean, "absorbed", (one_slice((1, 0), 70, 71), whole))
    left, right = (
        run(model, p, "absorbed", (one_slice((1, 0), 71, 73), whole))[0] for p in (clean, dirty)
    )
    assert equal(left, right)


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_write_no_page(model, form):
    pool = stale_pool(model, 6)
    pool[0], pool[5] = 0.25, 0.5
    run(model, pool, form, (one_slice((3,), 0, 5), tokens_of(5)))
    assert bool((pool[0] == 0.25).all())
    assert bool((pool[5] == 0.5).all())
    assert bool(pool[3, : model.config.num_hidden_layers, :5].isfinite().all())
    assert bool(pool[3, :, 5:].isnan().all())


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_with_nan_latents_does_not_touch_its_neighbours(model, form):
    good, bad = tokens_of(70, 1), tokens_of(100, 2)
    items = [(one_slice((0, 1), 64, 70), good), (one_slice((2, 3), 64, 100), bad)]
    clean, poisoned = stale_pool(model, 4), stale_pool(model, 4)
    for pool in (clean, poisoned):
        for pages, whole in (((0, 1), good), ((2, 3), bad)):
            run(model, pool, form, (one_slice(pages, 0, 64), whole))
    poisoned[2] = float("nan")
    expected = run(model, clean, form, *items)[0]
    got = run(model, poisoned, form, *items)
    assert equal(got[0], expected)
    assert bool(got[1].isnan().any())


@st.composite
def steps(draw):
    """Sequences of a random length, cached up to a point, with a few rows each to compute."""
    count = draw(st.integers(1, 6))
    result = []
    for _ in range(count):
        cached = draw(st.integers(0, 140))
        result.append((cached, cached + draw(st.integers(1, 9))))
    return result


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps(), st.sampled_from(FORMS), st.integers(0, 100))
def test_any_batch_equals_its_sequences_alone(plan, form, seed):
    model = MODELS["four heads"]
    pool = stale_pool(model, 3 * len(plan))
    ids = list(range(3 * len(plan)))
    random.Random(seed).shuffle(ids)
    items = []
    for number, (start, end) in enumerate(plan):
        pages, whole = tuple(ids[3 * number : 3 * number + 3]), tokens_of(end, seed + number)
        if start:
            run(model, pool, "mha", (one_slice(pages, 0, start), whole))
        items.append((one_slice(pages, start, end), whole))
    alone = [run(model, pool.clone(), form, item)[0] for item in items]
    together = run(model, pool.clone(), form, *items)
    assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


def test_memory_bounds_of_a_long_context_change_no_bit(monkeypatch):
    model = MODELS["four heads"]
    whole = tokens_of(450, 8)
    pages = tuple(range(8))
    results = []
    for entries in (1, 3, 1000):
        monkeypatch.setattr("pdmesh.kernels.page_walk.MAX_ENTRIES", entries)
        monkeypatch.setattr("pdmesh.model.batch._MHA", Tiling(64, entries, share=True))
        absorbed = (Tiling(2, entries), Tiling(64, entries))
        monkeypatch.setattr("pdmesh.model.batch._ABSORBED", absorbed)
        pool = stale_pool(model, 8)
        prompt = run(model, pool, "mha", (one_slice(pages, 0, 449), whole))[0]
        tiled = run(model, pool, "absorbed", (one_slice(pages, 400, 449, 449), whole))[0]
        last = run(model, pool, "absorbed", (one_slice(pages, 449, 450), whole))[0]
        results.append(torch.cat([prompt, tiled, last]))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_mtp_rows_are_as_exact_as_the_others():
    model = MODELS["four heads"]
    whole = tokens_of(140, 11)
    pages = (2, 0, 1)
    pool = stale_pool(model, 3)
    hidden = run(model, pool, "mha", (one_slice(pages, 0, 140), whole))[0]

    def rows(target, start, end, form="mha"):
        batch = Batch.build([one_slice(pages, start, end)], [whole[start:end]])
        return model.mtp_forward(batch, hidden[start - 1 : end - 1], target, form)

    at_once_pool = pool.clone()
    at_once = rows(at_once_pool, 1, 140)
    chunks = torch.cat([rows(pool, a, b) for a, b in ((1, 64), (64, 65), (65, 140))])
    assert equal(chunks, at_once)
    assert torch.equal(pool.nan_to_num(nan=3.0), at_once_pool.nan_to_num(nan=3.0))
    mtp_layer = model.config.num_hidden_layers
    assert bool(pool[2, mtp_layer, 0].isnan().all()), "slot 0 of a sequence stays empty"
    two = rows(pool, 138, 140, "absorbed")
    one = torch.cat([rows(pool, 138, 139, "absorbed"), rows(pool, 139, 140, "absorbed")])
    assert equal(two, one)


def test_logits_of_a_row_do_not_depend_on_the_number_of_rows():
    model = MODELS["four heads"]
    hidden = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    full = model.logits(hidden)
    for count in (1, 2, 3, 5, 8, 36):
        assert torch.equal(model.logits(hidden[:count]), full[:count])
        assert torch.equal(model.mtp_logits(hidden[-count:]), model.mtp_logits(hidden)[-count:])


def test_layers_are_reported_once_their_latents_are_in_the_pages():
    model = MODELS["four heads"]
    pool = stale_pool(model, 1)
    seen = []

    def on_layer(layer):
        written = [bool(pool[0, i, :10].isfinite().all()) for i in range(pool.shape[1])]
        seen.append((layer, written.count(True)))

    batch = Batch.build([one_slice((0,), 0, 10)], [tokens_of(10)])
    model(batch, pool, "mha", on_layer)
    assert seen == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("item", "tokens", "sentence"),
    [
        (SequenceSlice((0,), 5, 5, 5), [], "not a range"),
        (SequenceSlice((0,), -1, 5, 0), [1] * 6, "not a range"),
        (SequenceSlice((0,), 0, 5, 0), [1, 2], "2 tokens for 5 positions"),
        (SequenceSlice((0,), 60, 65, 60), [1] * 5, "1 pages of 64 do not hold 65 positions"),
    ],
)
def test_a_slice_that_makes_no_sense_is_refused(item, tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        Batch.build([item], [tokens])


def test_a_pool_of_another_shape_is_refused():
    model = MODELS["four heads"]
    batch = Batch.build([one_slice((0,), 1, 2)], [[1]])
    latents = model.new_latents(2)
    hidden = torch.zeros(1, 64)
    for wrong in (latents[:, :3].clone(), latents[..., :40].clone(), latents.transpose(0, 1)):
        with pytest.raises(ValueError, match="latents must be a contiguous"):
            model(batch, wrong, "mha")
        with pytest.raises(ValueError, match="latents must be a contiguous"):
            model.mtp_forward(batch, hidden, wrong, "mha")
    with pytest.raises(ValueError, match="latents have pages of 16, the batch of 64"):
        model(batch, model.new_latents(2, page_size=16), "mha")


@pytest.mark.parametrize("page", [-1, 2, 1 << 40])
def test_a_page_outside_of_the_pool_is_never_written(page):
    model = MODELS["four heads"]
    pool = model.new_latents(2)
    with pytest.raises((IndexError, RuntimeError)):
        run(model, pool, "absorbed", (one_slice((page,), 0, 3), tokens_of(3)))
    assert bool((pool == 0).all())


def test_a_position_beyond_the_models_longest_is_refused():
    model = MODELS["four heads"]
    pages = tuple(range(17))
    with pytest.raises(ValueError, match="beyond max_position_embeddings 1024"):
        run(model, model.new_latents(17), "mha", (one_slice(pages, 1024, 1025), [0] * 1025))
