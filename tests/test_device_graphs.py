"""Decode steps filled up to captured sizes: the same rows come out, and nobody else's page changes.

The recorder calls a step again where a device would replay it: everything but the capture is real.
"""

import gc
import weakref

import numpy as np
import pytest
import torch
from device_cases import exact_model, random_model
from model_cases import tokens_of

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.graphs import plain_capture
from pdmesh.model.device.padding import fits, graph_sizes, padded, padded_size
from pdmesh.model.device.staging import StepStaging
from pdmesh.prefill.warming import warm_up

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = (pytest.mark.gpu, NO_DEVICE)
PAGE = 16


def test_sizes_are_powers_of_two_then_steps_of_a_half_and_the_largest_batch():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert all(size <= 100 for size in graph_sizes(100))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, None)])
def test_a_step_takes_the_smallest_size_that_holds_it(count, size):
    assert padded_size(count, (1, 2, 4, 8)) == size


def step_of(*ranges, tables, parents=None, form="absorbed", write_from=None):
    slices = [
        SequenceSlice(table, start, end, start if write_from is None else write_from, parents, form)
        for (start, end), table in zip(ranges, tables, strict=True)
    ]
    tokens = [tokens_of(end - start, 100 * start) for start, end in ranges]
    return Batch.build(slices, tokens, PAGE)


def test_rows_that_fill_up_stand_before_and_after_the_real_ones_and_have_no_slot():
    batch = step_of((20, 22), (9, 10), (33, 34), tables=[(4, 2), (1,), (0, 6, 3)])
    step = padded(batch, batch.host_tokens, 2, (1, 2, 4, 8), num_layers=3)
    assert (step.size, step.num_rows) == (4, 6)
    assert step.at.tolist() == [0, 1, 3, 5]
    tokens, positions, slots = step.values
    assert positions.tolist() == [20, 21, 8, 9, 32, 33, 0, 0]
    assert slots.tolist() == [2 * 48 + 4, 2 * 48 + 5, -1, 48 + 9, -1, 3 * 48 + 1, -1, -1]
    assert tokens[step.at].tolist() == batch.host_tokens.tolist()
    assert step.lengths.tolist() == [22, 10, 34, 2]
    assert step.page_table.tolist() == [[4, 2, 0], [1, 0, 0], [0, 6, 3]]


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, True),
        ({"form": "mha"}, False),
        ({"parents": (-1, -1)}, False),
        ({"ranges": ((20, 23),)}, False),
        ({"ranges": ((0, 1),)}, False),
        ({"ranges": ((20, 22),) * 3}, False),
        ({"pages": 1}, False),
    ],
)
def test_only_chains_of_few_rows_in_absorbed_form_take_a_graph(change, fit):
    pages, ranges = change.pop("pages", 4), change.pop("ranges", ((20, 22),))
    batch = step_of(*ranges, tables=[(0, 1)] * len(ranges), **change)
    assert fits(batch, "absorbed", 2, (1, 2), pages) is fit


@pytest.fixture(scope="module")
def models():
    plain = exact_model(random_model(31))
    graphs = exact_model(random_model(31))
    return plain, graphs


def filled_pool(model, tables):
    """Prompts of 40 in the first pages of each table; every other slot is NaN."""
    pool = model.new_latents(12, PAGE).fill_(float("nan"))
    slices = [SequenceSlice(table, 0, 40, 0) for table in tables]
    batch = Batch.build(slices, [tokens_of(40, i) for i in range(len(tables))], PAGE)
    hidden = model.forward(batch, pool, "mha")
    later = [SequenceSlice(table, 1, 40, 1) for table in tables]
    tokens = [tokens_of(40, i)[1:] for i in range(len(tables))]
    before = torch.cat([part[:-1] for part in hidden.split(40)])
    model.mtp_forward(Batch.build(later, tokens, PAGE), before, pool, "mha")
    return pool, [part[-1] for part in hidden.split(40)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_padded_step_gives_the_rows_and_pages_of_an_unpadded_one(models, count):
    """vllm-project/vllm#43810, with the first and the last page of the pool in use."""
    plain, graphs = models
    # The first and the last page belong to a sequence that is not in the step.
    tables = [(3, 9, 1), (4, 2, 7), (5, 10, 6), (0, 8, 11)]
    pool, last = filled_pool(plain, tables)
    other = pool.clone()
    graphs._graphs[0].clear(), graphs._graphs[1].clear()
    graphs.capture(other, (2,), 4, (1, 2), plain_capture)
    torch.testing.assert_close(other, pool, equal_nan=True, rtol=0, atol=0)
    ranges = [(40, 42), (40, 41), (40, 42)][:count]
    batch = step_of(*ranges, tables=tables[:count])
    given = graphs.forward(batch, other, "absorbed")
    expected = plain.forward(batch, pool, "absorbed")
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    before = torch.cat([x[None].expand(e - s, -1) for x, (s, e) in zip(last, ranges, strict=False)])
    given = graphs.mtp_forward(batch, before, other, "absorbed")
    expected = plain.mtp_forward(batch, before, pool, "absorbed")
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other, pool, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert torch.equal(other[[0, 8, 11]].nan_to_num(7.0), pool[[0, 8, 11]].nan_to_num(7.0))


def test_a_result_is_not_overwritten_by_the_next_step(models):
    plain, graphs = models
    tables = [(3, 9, 1), (4, 2, 7)]
    pool, _ = filled_pool(plain, tables)
    graphs._graphs[0].clear()
    graphs.capture(pool, (2,), 2, (), plain_capture)
    first = graphs.forward(step_of((40, 42), tables=tables[:1]), pool, "absorbed")
    kept = first.clone()
    graphs.forward(step_of((40, 42), tables=tables[1:]), pool, "absorbed")
    assert torch.equal(first, kept)
    assert np.isfinite(first.numpy()).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_what_a_graph_reads_is_each_steps_own_though_tables_are_kept_from_step_to_step(device):
    """Sequences that change places, get a page, leave and come back."""
    staging = StepStaging(4, 2, 3, torch.device(device))
    assert staging.lengths.tolist() == [2] * 4
    assert staging.values.tolist() == [[0] * 8, [0, 1] * 4, [-1] * 8]
    long = (4, 2, 9, 8)  # more pages than a graph takes
    steps = [
        (((20, 22), (9, 10), (33, 34)), [(4, 2), (1,), (0, 6, 3)]),
        (((9, 10), (20, 22)), [(1,), (4, 2)]),
        (((20, 22), (16, 18), (33, 34)), [long, (1, 5), (0, 6, 3)]),
        (((33, 35),), [(0, 6, 3)]),
        (((20, 22), (33, 34)), [long, (0, 6, 3)]),
    ]
    for ranges, tables in steps:
        batch = step_of(*ranges, tables=tables)
        given = staging.tables(batch.slices)
        alone = padded(batch, batch.host_tokens, 2, (4,), 3)
        at = staging.put(padded(batch, batch.host_tokens, 2, (4,), 3, given))
        assert at.tolist() == alone.at.tolist()
        assert staging.values.tolist() == alone.values.tolist()
        assert staging.lengths.tolist() == alone.lengths.tolist()
        assert staging.num_rows.tolist() == [alone.num_rows]
        for row, table in zip(staging.page_table.tolist(), tables, strict=False):
            assert row[: len(table)] == list(table[:3])
    parts = (staging.values, staging.at, staging.lengths, staging.num_rows)
    assert all(part.data_ptr() % 64 == parts[0].data_ptr() % 64 for part in parts)


def test_a_row_of_the_tables_is_copied_only_when_it_is_another():
    staging = StepStaging(4, 2, 3, torch.device("cpu"))
    copied = []

    class Watched:
        def __getitem__(self, rows):
            copied.append((rows.start, rows.stop))
            return torch.zeros(rows.stop - rows.start, 3, dtype=torch.int32)

    staging.page_table = Watched()
    first, second, third = (4, 2), (1,), (0, 6, 3)
    for tables in ([first, second, third], [first, second, third], [first, (1, 5), third]):
        batch = step_of((16, 18), (9, 10), (33, 34), tables=tables)
        given = staging.tables(batch.slices)
        staging.put(padded(batch, batch.host_tokens, 2, (4,), 3, given))
    assert copied == [(0, 3), (1, 2)]


def test_warming_up_changes_no_page(models):
    plain, _ = models
    pool, _ = filled_pool(plain, [(3, 9, 1), (4, 2, 7)])
    before = pool.clone()
    warm_up(plain, pool, 50)
    torch.testing.assert_close(pool, before, equal_nan=True, rtol=0, atol=0)


class Scheduler:
    """A decode backend that plans: a schedule must live as long as the graph that writes to it."""

    class Plan:
        def refresh(self, lengths):
            assert self.lengths is lengths

    def __init__(self, call):
        self.call, self.plans = call, []

    def plan(self, lengths, rows, heads):
        plan = self.Plan()
        plan.lengths = lengths
        self.plans.append(weakref.ref(plan))
        return plan

    def __call__(self, *args, plan=None, **keywords):
        return self.call(*args, **keywords)


def test_what_a_backend_planned_lives_as_long_as_its_graph():
    """A graph writes to the memory of a schedule at every replay, whoever has it by then."""
    model = exact_model(random_model(32))
    scheduler = Scheduler(model.ops.mla_decode)
    model.ops.mla_decode = scheduler

    def record(compute):
        output = compute().clone()
        return (lambda: None), output  # as a graph does, it keeps nothing of the call alive

    model.capture(model.new_latents(4, PAGE), (2,), 2, (2,), record)
    gc.collect()
    assert [ref() is not None for ref in scheduler.plans] == [True, True]


def test_prompts_whose_experts_take_most_memory_are_computed_first(monkeypatch):
    model = exact_model(random_model(5, max_position_embeddings=4096))
    computed = []

    class Called:
        def forward(self, batch, pool, form):
            computed.append(batch.num_rows)
            return torch.zeros(batch.num_rows, model.config.hidden_size)

        def mtp_forward(self, *_):
            pass

    monkeypatch.setattr("pdmesh.prefill.warming.expert_bytes", lambda _, rows: -abs(rows - 512))
    warm_up(model, model.new_latents(200, PAGE), 2048, Called())
    assert computed == [512, 513, 256, 128, 64, 32, 16, 1024, 2048]
