"""What fits on a device is counted before it is allocated."""

import dataclasses

import pytest
import torch
from device_cases import ALIGNED, device_model, random_model
from torch import Tensor

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.device.full_width import full_width
from pdmesh.model.device.memory import (
    MemoryPlan,
    check_all_fit,
    plain_weight_bytes,
    plan_memory,
    weight_bytes,
)
from pdmesh.model.device.spread import spread_over
from pdmesh.model.device.step_memory import step_bytes
from pdmesh.model.parallel.device_heap import heap_bytes
from pdmesh.model.parallel.nvshmem_lane import Lane
from pdmesh.model.parallel.nvshmem_tables import Tables
from pdmesh.wire.errors import ConfigError


def held(value) -> int:
    """Bytes of the distinct tensors in dataclasses, tuples and tensors."""
    found: dict[int, int] = {}

    def walk(item):
        if isinstance(item, Tensor):
            found[item.data_ptr()] = item.nbytes
        elif dataclasses.is_dataclass(item):
            for f in dataclasses.fields(item):
                walk(getattr(item, f.name))
        elif isinstance(item, tuple):
            for part in item:
                walk(part)

    walk(value)
    return sum(found.values())


@pytest.mark.parametrize("changes", [{}, ALIGNED, {"tie_word_embeddings": True}])
def test_weights_are_as_large_as_counted(changes):
    model = random_model(**changes)
    counted = weight_bytes(model.config)
    # Norms and biases are not counted; heads inside of blocks are kept in bfloat16.
    assert counted <= held(device_model(model).weights) * 1.05
    assert counted >= held(device_model(model).weights) * 0.93


def test_deepseek_v3_has_the_bytes_that_its_shapes_say():
    """671 billion parameters; k_b and v_b are kept twice, embedding and head in bfloat16."""
    whole = weight_bytes(full_width(61), mtp=False)
    assert 672e9 < whole < 676e9
    layer = weight_bytes(full_width(7), mtp=False) - weight_bytes(full_width(6), mtp=False)
    assert 11.5e9 < layer < 11.7e9


def test_pages_take_the_room_that_is_left_and_no_more_than_are_of_use():
    given = {"total": 100, "free": 80, "share": 0.5, "weights": 20, "steps": 5, "page": 2}
    assert plan_memory(**given, pages=0, most_pages=1000).pages == (47 - 25) // 2
    assert plan_memory(**given, pages=0, most_pages=4).pages == 4
    assert plan_memory(**given, pages=3, most_pages=4).pages == 3
    assert plan_memory(**(given | {"free": 33}), pages=0, most_pages=99).pages == 4
    for change in ({"pages": 12}, {"weights": 45, "pages": 0}, {"free": 28, "pages": 0}):
        with pytest.raises(ConfigError, match="does not fit: weights need"):
            plan_memory(**(given | change), most_pages=1000)


def test_a_step_of_few_rows_needs_room_for_all_of_them_at_every_expert():
    config = full_width(4)
    few = step_bytes(config, 256, 256)
    assert 1.42e9 < few < 1.6e9
    assert step_bytes(config, 4096, 1) < 4e9


def test_a_worker_of_large_steps_has_room_for_small_ones_too():
    config = full_width(4)
    sizes = [step_bytes(config, rows, 32, keys=4096) for rows in (64, 512, 513, 1088, 2112, 4160)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "size", [ExchangeSize(3, 5, 7, 384, 2, 128), ExchangeSize.contiguous(3, 5, 7, 384, 2)]
)
def test_what_an_exchange_takes_is_as_counted(size):
    heap = in_process_heaps(3)[0]
    lane = Lane(heap, size, None, Tables(torch.zeros(4), torch.ones(3), 1))
    assert size.symmetric_bytes() == lane._memory.nbytes
    kept = [lane.arrived.rows.values, lane.arrived.rows.scales, lane.arrived.homes, lane.made]
    kept += [lane.arrived.row_expert] if size.capacity else []
    assert size.arrived_bytes() == sum(tensor.nbytes for tensor in kept)


def test_a_rank_has_room_for_its_experts_and_for_all_rows_of_all_ranks():
    """DeepSeek-V3 at EP8: 32 experts of 44 MB a layer, and 8 x 128 rows at each of them."""
    config = full_width(61)
    spread = spread_over(config, False, 0, 8, 0, 128, 64)
    alone, rank = (weight_bytes(config, False, slots) for slots in (None, 32))
    assert alone - rank == pytest.approx(58 * 224 * 44.05e6, rel=0.01)
    assert spread.exchange.lanes == 2
    assert spread.exchange.nbytes == pytest.approx(2 * 32 * 1024 * 3.05 * 7168, rel=0.1)
    shared = step_bytes(config, 128, 64, spread.exchange)
    assert shared > step_bytes(config, 128, 64) + spread.exchange.nbytes
    assert heap_bytes(spread.exchange.symmetric) >= spread.exchange.symmetric + (64 << 20)
    assert heap_bytes(spread.exchange.symmetric) % (2 << 20) == 0


@pytest.mark.parametrize("changes", [{}, ALIGNED, {"tie_word_embeddings": True}])
def test_plain_weights_are_as_large_as_counted(changes):
    model = random_model(**changes)
    held = sum(value.numel() for value in model.parameters())
    assert 0.97 * 4 * held < plain_weight_bytes(model.config, True, 4) <= 4 * held
    c = model.config
    moved = 3 * c.hidden_size * c.moe_intermediate_size * c.n_routed_experts // 2 * 4
    layers = len(model.gates())
    shared = plain_weight_bytes(c, True, 4, ranks=2)
    assert plain_weight_bytes(c, True, 4) - shared == layers * moved


def test_workers_of_one_device_must_fit_together():
    plan = MemoryPlan(budget=50, weights=30, steps=5, pages=9, page=1)
    check_all_fit([(1, plan), (1, plan)], 74)
    with pytest.raises(ConfigError, match="3 workers need"):
        check_all_fit([(1, plan), (2, plan)], 110)


def test_eight_layers_of_full_width_fit_twice_on_an_h200():
    """Of 150.7 GB each of two workers may use 71.6; with the MTP layer seven do."""
    total = 143_771 << 20
    for layers, mtp in ((8, False), (7, True)):
        config = full_width(layers)
        weights = weight_bytes(config, mtp)
        for rows, chosen in ((576, 32), (64, 32)):
            page = (layers + mtp) * 64 * 1152
            steps = step_bytes(config, rows, chosen)
            plan = plan_memory(total, total, 0.5, weights, steps, page, 0, 10**9)
            assert plan.pages > 5000
