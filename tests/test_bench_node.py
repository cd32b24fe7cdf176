"""What a node is measured at: plan of memory, grid, budget, and what times come to."""

import csv
import importlib
import io
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.device.full_width import full_width
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable

ROOT = Path(__file__).resolve().parent.parent
CONFIG = full_width(61)
H200 = 150_754_820_096


@pytest.fixture(scope="module", autouse=True)
def _bench():
    sys.path.insert(0, str(ROOT / "bench"))
    yield
    sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def plan(_bench):
    return importlib.import_module("node_plan")


@pytest.fixture(scope="module")
def results(_bench):
    return importlib.import_module("node_results")


@pytest.fixture(scope="module")
def dry(_bench):
    return importlib.import_module("node_dry")


def planned(plan, ranks, total=H200, layers=None):
    return plan.plan_node(CONFIG, ranks, plan.usable(total, total), plan.grid(ranks), layers)


def by_cell(found):
    return {(one.cell.tp, one.cell.batch): one for one in found.cells}


def test_a_rank_of_eight_has_about_a_hundred_gigabytes_of_weights(plan):
    found = planned(plan, 8)
    assert (found.moe, found.dense) == (59, 3)
    # 671.03e9 parameters and the draft's layer: 58 x 32 experts of 44.04e6 are 81.7e9 of them.
    assert 99e9 < found.weights < 105e9


def test_batches_that_the_whole_model_leaves_no_room_for_run_fewer_layers_and_say_so(plan):
    found = by_cell(planned(plan, 8))
    assert found[1, 32].whole
    assert found[1, 32].moe == 59
    assert not found[1, 128].whole
    assert 20 < found[1, 128].moe < 59
    assert "of 59 layers measured" in found[1, 128].note


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fewer_gpus_get_as_many_layers_as_fit_with_the_largest_batch(plan, ranks):
    found = planned(plan, ranks)
    assert 0 < found.moe < 59
    for one in found.cells:
        assert one.moe == found.moe, one
        assert one.needs <= found.budget
    more = planned(plan, ranks, layers=found.moe + 1)
    assert by_cell(more)[1, 128].moe < found.moe + 1


def test_what_does_not_fit_is_reported_and_not_planned(plan):
    small = planned(plan, 1, total=24 * 10**9)
    assert {one.moe for one in small.cells if one.cell.batch == 128} == {0}
    assert all("does not fit" in one.note for one in small.cells if not one.moe)
    none = planned(plan, 1, total=8 * 10**9)
    assert none.moe == 0
    assert "nothing will be measured" in none.describe()
    tight = planned(plan, 8, layers=59, total=100 * 10**9)
    assert not any(one.moe for one in tight.cells)


def test_no_cell_of_any_device_needs_more_than_there_is(plan):
    for ranks in (1, 2, 4, 8):
        for total in range(10 * 10**9, 200 * 10**9, 7 * 10**9):
            found = planned(plan, ranks, total)
            assert all(one.needs <= found.budget for one in found.cells if one.moe)


def test_the_grid_has_every_cell_once_and_the_ends_of_the_front_first(plan):
    cells = plan.grid(8)
    assert len(cells) == len(set(cells)) == 32
    assert cells[:2] == (plan.Cell(1, 128), plan.Cell(8, 1))
    assert {cell.tp for cell in plan.grid(4)} == {1, 2, 4}
    assert plan.grid(1) == tuple(sorted(plan.grid(1), key=plan.grid(1).index))
    assert {cell.tp for cell in plan.grid(1)} == {1}
    assert plan.grid(2, widths=(4,)) == ()


def test_requests_rows_and_shares_of_tensor_parallelism(plan):
    cell = plan.Cell(8, 1)
    assert (cell.tokens, cell.share, cell.requests(8)) == (2, 1, 1)
    assert plan.Cell(1, 128).requests(8) == 1024
    assert plan.Cell(4, 3).share == 2
    assert plan.halves(5) == (3, 2)
    assert "microbatch" not in plan.modes_of(cell)
    assert len(plan.modes_of(plan.Cell(8, 2))) == 3


@pytest.mark.parametrize(("ranks", "share"), [(1, 4), (2, 3), (4, 16)])
def test_the_memory_of_an_exchange_is_what_it_takes(plan, ranks, share):
    size = plan.exchange_size(full_width(2, experts=8), ranks, share)
    tables = [ReplicaTable.build(Placement.even(1, 8, ranks), 0)]
    end = [NvshmemExperts(heap, tables, size, lanes=1) for heap in in_process_heaps(ranks)][0]
    lane = end.lanes[0]
    assert lane._memory.numel() == plan.symmetric_bytes(size)
    rows, counts, homes = lane.arrived
    taken = rows.values.numel() + 4 * rows.scales.numel() + 4 * homes.numel()
    taken += 2 * lane.made.numel() + lane._memory.numel()
    assert taken == pytest.approx(plan.exchange_bytes(size, lanes=1), rel=0.001)


def test_evenly_drawn_rows_have_room_and_no_more_than_all_rows_need(plan):
    assert plan.exchange_size(CONFIG, 8, 256).max_rows == 256
    assert plan.exchange_size(CONFIG, 8, 1).max_rows == 64
    assert plan.exchange_size(CONFIG, 8, 256, even=False).max_rows == 2048


def test_the_budget_leaves_time_to_finish(plan):
    assert plan.goes_on(began=100.0, now=200.0, budget_s=600.0, last_s=20.0)
    assert not plan.goes_on(began=100.0, now=670.0, budget_s=600.0, last_s=20.0)
    assert not plan.goes_on(began=0.0, now=500.0, budget_s=600.0, last_s=80.0)


def test_steps_count_the_layers_that_were_not_there(results):
    times = results.Times(moe=1000.0, dense=500.0, rest=500.0)
    assert times.step_ms == pytest.approx(59 + 1.5 + 0.5)
    assert results.moe_time(chain_us=11_500.0, dense_us=500.0, moe=11, dense=1) == 1000.0
    each, node = results.speeds(100.0, 1024)
    assert (each, node) == (pytest.approx(16.0), pytest.approx(16384.0))


def test_a_row_says_what_was_extrapolated(plan, results):
    found = by_cell(planned(plan, 8))
    times = results.Times(1000.0, 500.0, 500.0)
    row = results.result_row(found[1, 128], 8, "microbatch", times, {"finite": True})
    assert row["extrapolated"]
    assert not row["fits_whole"]
    assert "step extrapolated" in results.table_line(row)
    row = results.result_row(found[8, 1], 8, "no_overlap", times, {"finite": False})
    assert not row["extrapolated"]
    assert row["tokens_s_node"] == pytest.approx(row["tokens_s_request"], abs=0.1)
    assert "NOT FINITE" in results.table_line(row)


def test_the_front_has_what_no_other_beats_in_both(results):
    points = [(10, 100), (20, 90), (15, 80), (30, 10), (30, 5), (5, 100)]
    rows = [{"tokens_s_request": x, "tokens_s_node": y} for x, y in points]
    front = [(r["tokens_s_request"], r["tokens_s_node"]) for r in results.pareto(rows)]
    assert front == [(10, 100), (20, 90), (30, 10)]


def test_bounds_are_those_of_one_rank_where_all_experts_are_asked(plan, results):
    bounds = importlib.import_module("bounds")
    after, best = results.bound_layer(plan.Cell(1, 128), 8)
    computed = bounds.total(bounds.moe_layer(128, 2, 5000, 8), bounds.H200)
    wire = sum(bounds.transfer(256, bounds.NVLINK, 7 / 8))
    assert best == pytest.approx(computed, rel=1e-3)
    assert after == pytest.approx(computed + wire, rel=1e-3)
    # Two tokens ask for at most sixteen experts, not for all.
    assert results.bound_layer(plan.Cell(8, 1), 8)[0] < after / 5


def test_published_and_emulated_points_stand_beside(results):
    data = ROOT / "docs" / "data"
    with (data / "communication.csv").open() as file:
        rows = results.emulated_rows(
            json.loads((data / "h200_layer.json").read_text()), list(csv.DictReader(file))
        )
    assert len(rows) == 4
    assert all(10_000 < row["tokens_s_node"] < 30_000 for row in rows)
    split = next(row for row in results.published_rows() if row.get("moe_us") == 1896.0)
    assert split["tokens_s_node"] == pytest.approx(14_300, rel=0.01)
    assert len(results.bound_rows(8)) == 64


@pytest.mark.parametrize(
    ("ranks", "tp", "batch"),
    [
        (2, 2, 2),
        pytest.param(1, 1, 2, marks=pytest.mark.full),
        pytest.param(4, 4, 1, marks=pytest.mark.full),
        pytest.param(2, 1, 3, marks=pytest.mark.full),
        pytest.param(4, 2, 3, marks=pytest.mark.full),
    ],
)
def test_all_modes_give_what_layers_that_know_no_ranks_give(plan, dry, ranks, tp, batch):
    node = dry.DryNode.make(ranks, plan.Cell(tp, batch), dense=1, moe=1)
    found = dry.check(node)
    assert set(found) == set(plan.modes_of(node.cell))
    assert max(found.values()) <= dry.TOLERANCE


def test_modes_agree_where_experts_are_drawn_and_ranks_have_data_of_their_own(plan, dry):
    node = dry.DryNode.make(2, plan.Cell(1, 2), dense=0, moe=1, even=True)
    plain, early, split = (
        node.step(mode) for mode in ("no_overlap", "dispatch_overlap", "microbatch")
    )
    for rank in range(2):
        assert torch.equal(plain[rank], early[rank])
        assert dry.distance(split[rank], plain[rank]) <= dry.TOLERANCE
    assert dry.distance(plain[0], plain[1]) > 0.5


def test_a_comparison_that_finds_nothing_wrong_would_find_a_wrong_expert(plan, dry):
    node = dry.DryNode.make(2, plan.Cell(1, 2), dense=0, moe=1)
    wanted = node.plain(0)
    for kit in node.kits:
        kit.weights[0].down.values.copy_(kit.weights[0].down.values.roll(1, 0))
    assert dry.distance(node.step("dispatch_overlap")[0], wanted) > 10 * dry.TOLERANCE


def test_every_operation_of_a_layer_is_noted_and_can_be_run_again(plan, dry):
    layer = importlib.import_module("node_layer")
    node = dry.DryNode.make(1, plan.Cell(1, 1), dense=0, moe=2)
    flows = layer.flows_of(node.kits[0], node.pages(0), node.starts[0], "no_overlap")
    flows[-1].noted = noted = {}
    layer.drive(flows, layer.schedule_of(0, 2, "no_overlap"), lambda wanted: wanted.part)
    names = set(importlib.import_module("node_results").bound_work(node.cell, 8))
    assert names < set(noted)
    for calls in noted.values():
        assert len(calls) == 2
        for op, arguments, more in calls:
            op(*arguments, **more)


def test_shapes_for_compilers_are_those_of_the_members(plan):
    shapes = plan.product_shapes(CONFIG, [plan.Cell(1, 128), plan.Cell(8, 1)], 8)
    assert (0, 256, 24576, 1536) in shapes
    assert (0, 128, 7168, 16384) in shapes
    assert (0, 2, 7168, 2048) in shapes
    assert (32, 256, 4096, 7168) in shapes
    assert len(shapes) == len(set(shapes))


def test_what_is_known_so_far_is_on_disk_with_what_stands_beside(plan, results, tmp_path, capsys):
    command = importlib.import_module("node_ep8")
    report = command.Report(tmp_path, 8)
    found = by_cell(planned(plan, 8))
    row = results.result_row(
        found[8, 1], 8, "no_overlap", results.Times(300.0, 200.0, 900.0), {"finite": True}
    )
    assert not report.take({"line": "result", "row": row})
    skipped = {"line": "skipped", "tp": 1, "batch": 128, "why": "the time is over"}
    assert not report.take(skipped)
    with (tmp_path / "node_ep8.csv").open() as file:
        kinds = [line["kind"] for line in csv.DictReader(file)]
    assert kinds.count("measured") == 1
    assert {"published", "emulated", "bound", "bound_overlapped"} < set(kinds)
    saved = json.loads((tmp_path / "node_ep8.json").read_text())
    assert saved["rows"] == [row]
    assert "not measured: the time is over" in capsys.readouterr().out
    assert report.take({"line": "done"})


class LonelyWorld:
    """One rank on the CPU in the place of `node_world.World`."""

    def __init__(self, asked):
        self.rank, self.ranks, self.nccl = asked.rank, asked.ranks, None
        self.device, self.heap = torch.device("cpu"), in_process_heaps(1)[0]

    def meet(self):
        pass

    def slowest(self, *values):
        return list(values)

    def least(self, value):
        return value

    def together(self, tp):
        return lambda wanted: wanted.part


class Graph:
    def __init__(self, function):
        self.kept = function()


def test_a_rank_goes_through_its_grid_and_tells_all_there_is_to_tell(plan, dry, monkeypatch):
    rank = importlib.import_module("node_rank")
    world = importlib.import_module("node_world")
    monkeypatch.setattr(rank, "World", LonelyWorld)
    monkeypatch.setattr(rank, "captured", Graph)
    monkeypatch.setattr(rank, "replay_times", lambda graph, repeats=1: [100.0] * repeats)
    monkeypatch.setattr(rank, "timed", lambda jobs, rounds: [job() for job in jobs] and 3.0)
    monkeypatch.setattr(rank, "full_width", lambda layers, experts: dry.tiny_config())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 20 * 10**9))
    monkeypatch.setattr(rank.Rank, "_exchange", lambda self, tokens: self.tell("exchange", row={}))
    monkeypatch.setattr(rank.Rank, "_goes_on", lambda self, last: True)
    asked = world.Asked(
        0, 1, "", "", 0.0, 1, 8, (1,), (1, 2, 1 << 14), ("no_overlap", "microbatch"), True
    )
    out = io.StringIO()
    rank.Rank(asked, out).work()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [line["line"] for line in lines]
    assert kinds[0] == "plan"
    assert kinds[-1] == "done"
    assert kinds.count("skipped") == kinds.count("exchange") == 1
    assert "does not fit" in next(one["why"] for one in lines if one["line"] == "skipped")
    rows = [one["row"] for one in lines if one["line"] == "result"]
    ran = {(row["batch"], row["mode"]) for row in rows}
    assert ran == {(1, "no_overlap"), (2, "no_overlap"), (2, "microbatch")}
    assert all(row["finite"] and 0.5 < row["hidden_rms"] < 10 for row in rows)
    assert all(row["extrapolated"] for row in rows)
    operations = [one for one in lines if one["line"] == "operations"]
    assert len(operations) == 1
    assert operations[0]["rows"][-1] == {"op": "sum of these", "us": 3.0 * 17}


def _writes(*lines, then=""):
    return [
        sys.executable,
        "-c",
        f"import time\nfor line in {lines!r}: print(line, flush=True)\n{then}",
    ]


def test_ranks_are_read_until_the_first_one_ends(plan):
    command = importlib.import_module("node_ep8")
    commands = [_writes('{"line": "done"}'), _writes(then="time.sleep(600)")]
    assert list(command.lines_of(commands, {}, time.time() + 60)) == [{"line": "done"}]


@pytest.mark.parametrize(
    ("commands", "limit", "message"),
    [
        (
            [_writes(then="time.sleep(600)"), _writes(then="raise SystemExit(3)")],
            60,
            "rank 1 failed",
        ),
        ([_writes(then="raise SystemExit(3)")], 60, "rank 0 failed"),
        ([_writes(then="time.sleep(600)")], 0, "in time"),
    ],
)
def test_a_rank_that_fails_or_hangs_ends_all(plan, commands, limit, message):
    command = importlib.import_module("node_ep8")
    with pytest.raises(RuntimeError, match=message):
        list(command.lines_of(commands, {}, time.time() + limit))
