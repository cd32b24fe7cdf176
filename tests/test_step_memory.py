"""What a step takes is no more than was counted for it, and not a small part of that either.

Full-width layers of DeepSeek-V3, dense ones, MoE and the MTP layer, followed tensor by tensor as a
device's kernels make them; `test_gpu_engine.py` does the same with a device's own count.
"""

import itertools

import pytest
import torch
from live_memory import PAGE, Live, Pieces, batch_of, peak_of, run, shapes_only

from pdmesh.model.device.full_width import full_width
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.padding import graph_sizes
from pdmesh.model.device.spread import spread_over
from pdmesh.model.device.step import MOST_KEYS, plan_step
from pdmesh.model.device.step_memory import PLAN_BYTES, library_bytes, step_bytes
from pdmesh.model.parallel.microbatch import split_batch
from pdmesh.prefill.warming import warm_up

LONGEST = 163_840


@pytest.fixture(scope="module")
def model():
    return shapes_only(full_width(5))


def test_what_is_followed_is_what_there_is():
    with Live() as live:
        first = torch.empty(1000, dtype=torch.int8, device="meta")
        view = first.view(10, 100)
        second = torch.cat([view, view])
        assert live.now == 3000
        del first
        assert live.now == 3000
        del view
        assert (live.now, live.peak) == (2000, 3000)
        del second
        assert (live.now, live.peak) == (0, 3000)


def prompts(rows):
    """Steps of a worker with steps of up to so many rows, by what they are."""
    few = min(rows, MASKED_ROWS)
    whole = {
        "a prompt": [(0, rows)],
        "all rows that the masked layout takes": [(0, few)],
        "behind the longest prefix": [(LONGEST - rows, LONGEST)],
        "few rows behind it": [(LONGEST - few, LONGEST)],
        "behind as many keys as all heads have at a time": [(max(0, MOST_KEYS - rows), MOST_KEYS)],
        "behind a few more": [(MOST_KEYS, MOST_KEYS + rows)],
        "prompts of many lengths": [(9000 + n, 9000 + n + rows // 32) for n in range(32)],
    }
    return {name: (pieces, "mha") for name, pieces in whole.items()} | {
        "rows of many prompts behind what is cached": ([(8192, 8224)] * (rows // 32), "absorbed")
    }


def check(found, counted):
    """Nothing is more than was counted, and the largest no small part of it."""
    assert max(found.values()) <= counted <= 1.5 * max(found.values()), found


@pytest.mark.parametrize("packed", [False, True], ids=["bf16 latents", "packed latents"])
@pytest.mark.parametrize("rows", [576, 1088, 2112, 4160])
def test_steps_of_a_prefill_worker(model, rows, packed):
    found = {name: peak_of(model, *step, packed) for name, step in prompts(rows).items()}
    check(found, step_bytes(model.config, rows, 32, keys=LONGEST))


@pytest.mark.parametrize(("sequences", "each"), [(1, 1), (16, 1), (32, 2), (256, 2), (256, 5)])
def test_steps_of_a_decode_worker(model, sequences, each):
    rows = sequences * each
    fewer = min(sequences, MASKED_ROWS // each)
    found = {
        f"{count} sequences of {each} rows": peak_of(
            model, [(2048, 2048 + each)] * count, "absorbed"
        )
        for count in (sequences, fewer)
    }
    check(found, step_bytes(model.config, rows, 1))


@pytest.mark.parametrize("most", [512, 1024, 2048, 4096])
def test_what_torch_reserves_for_a_prefill_worker_is_what_was_counted(model, most, monkeypatch):
    """Its warm-up, then prompts of all kinds: nothing lies so that much more is needed."""
    monkeypatch.setattr(model, "logits", lambda _: torch.zeros(1))
    counted = step_bytes(model.config, most + PAGE, 32, keys=LONGEST)
    with Pieces() as torch_has:
        warm_up(model, model.new_latents(most // PAGE, PAGE), most)
        pool = torch_has.now
        for pieces, form in prompts(most + PAGE).values():
            run(model, pieces, form)
    assert torch_has.peak <= torch_has.reserved <= 1.06 * counted + pool


@pytest.mark.parametrize(("most", "each"), [(16, (1,)), (64, (2,)), (256, (2,)), (256, (1, 3, 5))])
def test_what_torch_reserves_for_graphs_is_what_was_counted(model, most, each):
    with Pieces() as torch_has:
        for count, size in itertools.product(each, graph_sizes(most)[::-1]):
            run(model, [(2048, 2048 + count)] * size, "absorbed")
    rows = most * max(each)
    alone, with_graphs = (
        step_bytes(model.config, rows, 1, captured=held) for held in (False, True)
    )
    assert torch_has.peak <= torch_has.reserved <= with_graphs - alone < 1.5 * torch_has.reserved


def test_logits_of_all_rows_are_counted(model):
    """A step of 2,048 rows of decode, whose drafts want logits too."""
    hidden = torch.empty((2048, model.config.hidden_size), dtype=model.dtype, device="meta")
    with Live() as live:
        model.logits(hidden)
    assert live.peak < step_bytes(model.config, 2048, 2048) < 2 * live.peak


@pytest.mark.parametrize("threshold", [None, 10**6, 64])
def test_each_part_of_a_step_has_a_plan_that_is_counted(model, threshold):
    """A device's own step has its parts alone; ranks plan its halves too, where they take such."""
    prompts, many = 3, MOST_KEYS
    batch = batch_of([(many - rows, many) for rows in (PAGE, 9 * PAGE, PAGE)])
    exchange = None
    if threshold is not None:
        exchange = spread_over(model.config, True, 0, 2, 0, 2112, threshold).exchange
    halves = exchange is not None and "microbatch" in exchange.modes
    steps = (batch, *(split_batch(batch) or ())) if halves else (batch,)
    parts = sum(len(plan_step(one, "mha", 6, 0).parts) for one in steps)
    assert parts == (2 * prompts + 1 if halves else prompts)
    counted = library_bytes(prompts, exchange) - library_bytes(0, exchange)
    assert counted == parts * PLAN_BYTES
