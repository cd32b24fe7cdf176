"""The lower bounds that measurements are held against, by figures worked out by hand."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bounds():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("bounds")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def layer(bounds):
    return bounds.moe_layer(128, 2, 5000, ranks=128)


@pytest.mark.parametrize(
    ("op", "giga", "mega", "h100", "h200"),
    [
        ("qkv_a", 7.75, 18.1, 5.4, 3.9),
        ("q_b", 19.3, 50.7, 15.1, 10.6),
        ("absorb", 4.29, 50.3, 15.0, 10.5),
        ("mla", 356.5, 808.6, 360.3, 360.3),
        ("values", 4.29, 50.3, 15.0, 10.5),
        ("o_proj", 60.1, 125.3, 37.4, 30.4),
        ("gate", 0.94, 7.6, 2.3, 1.6),
    ],
)
def test_an_operation_takes_no_less_than(bounds, layer, op, giga, mega, h100, h200):
    work = layer[op]
    assert work.operations / 1e9 == pytest.approx(giga, rel=0.01)
    assert work.bytes / 1e6 == pytest.approx(mega, rel=0.01)
    assert work.microseconds(bounds.H100) == pytest.approx(h100, abs=0.06)
    assert work.microseconds(bounds.H200) == pytest.approx(h200, abs=0.06)


def test_attention_over_packed_latents_is_bound_by_fp8_arithmetic(bounds):
    work = bounds.moe_layer(128, 2, 5000, ranks=128, packed=True)["mla"]
    assert work.operations / 1e9 == pytest.approx(356.5, rel=0.01)
    assert work.bytes / 1e6 == pytest.approx(491.2, rel=0.01)
    assert work.microseconds(bounds.H200) == pytest.approx(180.1, abs=0.06)


def test_the_routed_experts_of_a_wide_rank_are_bound_by_arithmetic(bounds):
    up, down = bounds.routed(2, 1024)
    assert (up.limit(bounds.H200), down.limit(bounds.H200)) == ("compute", "compute")
    took = up.microseconds(bounds.H200) + down.microseconds(bounds.H200)
    assert took == pytest.approx(91.1, abs=0.1)


@pytest.mark.parametrize(("device", "limit"), [("H100", 440), ("H200", 307)])
def test_those_of_a_rank_of_eight_by_memory(bounds, device, limit):
    parts = bounds.routed(32, 64)
    device = getattr(bounds, device)
    assert {part.limit(device) for part in parts} == {"memory"}
    assert sum(part.microseconds(device) for part in parts) == pytest.approx(limit, abs=0.5)


@pytest.mark.parametrize(
    ("device", "ranks", "sum_"),
    [("H100", 128, 557), ("H200", 128, 530), ("H100", 8, 906), ("H200", 8, 746)],
)
def test_the_products_of_a_layer_one_after_another(bounds, device, ranks, sum_):
    work = bounds.moe_layer(128, 2, 5000, ranks)
    assert bounds.total(work, getattr(bounds, device)) == pytest.approx(sum_, abs=1)


@pytest.mark.parametrize(("ranks", "rows"), [(8, 64), (128, 1024)])
def test_an_expert_gets_rows_by_the_number_of_ranks(bounds, ranks, rows):
    work = bounds.moe_layer(128, 2, 5000, ranks)
    assert (work["routed_up"], work["routed_down"]) == bounds.routed(256 // ranks, rows)


def test_an_expert_without_a_row_is_not_read(bounds):
    work = bounds.moe_layer(1, 2, 5000, 8, 16, senders=8)
    assert (work["routed_up"], work["routed_down"]) == bounds.routed(2, 1)
    alone = bounds.moe_layer(1, 1, 5000, 8)
    assert (alone["routed_up"], alone["routed_down"]) == bounds.routed(8, 1)


def test_a_transfer_is_bytes_over_bandwidth(bounds):
    assert bounds.transfer(256, bounds.INFINIBAND) == pytest.approx((302.8, 587.2), abs=0.1)
    assert sum(bounds.transfer(256, bounds.NVLINK)) == pytest.approx(98.9, abs=0.1)
    assert sum(bounds.transfer(256, bounds.INFINIBAND, 120 / 128)) == pytest.approx(834, abs=1)


@pytest.mark.parametrize(
    ("device", "ranks", "communication", "overlap", "step_ms", "gpu"),
    [
        ("H100", 128, 834, True, 52.1, 3929),
        ("H200", 128, 834, True, 51.7, 3961),
        ("H100", 128, 834, False, 85.0, 2409),
        ("H200", 128, 834, False, 83.0, 2467),
        ("H200", 8, 98.9, True, 46.5, 4403),
        ("H200", 8, 86.5, False, 51.6, 3967),
    ],
)
def test_a_step_of_the_whole_model(bounds, device, ranks, communication, overlap, step_ms, gpu):
    device = getattr(bounds, device)
    compute = bounds.total(bounds.moe_layer(128, 2, 5000, ranks), device)
    moe = max(compute, communication) if overlap else compute + communication
    dense = bounds.total(bounds.dense_layer(128, 2, 5000), device)
    took = bounds.step(moe, dense, bounds.head(256).microseconds(device))
    assert took == pytest.approx(step_ms, abs=0.1)
    assert bounds.throughput(128, took)[1] == pytest.approx(gpu, rel=0.003)


@pytest.mark.parametrize(
    ("chunk", "cost"), [(512, 1.77), (1024, 1.38), (2048, 1.18), (4096, 1.085), (8192, 1.037)]
)
def test_a_prompt_in_chunks_costs_more(bounds, chunk, cost):
    assert bounds.chunked_cost(32768, chunk) == pytest.approx(cost, abs=0.006)


@pytest.mark.parametrize(("cached", "new"), [(128, 117), (512, 149), (1024, 158), (4096, 167)])
def test_the_multi_head_form_pays_from(bounds, cached, new):
    assert bounds.form_crossover(cached) == pytest.approx(new, abs=0.6)


def test_the_two_forms_differ_by_a_factor_of_3_4(bounds):
    ratio = bounds.prefill_pair_operations(True) / bounds.prefill_pair_operations(False)
    assert ratio == pytest.approx(3.4)
