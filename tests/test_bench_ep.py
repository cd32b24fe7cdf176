"""What bench/ep.py counts and prints, on a CPU and without its clock."""

import csv
import functools
import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pdmesh.kernels.symmetric import in_process_heaps

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    shared = importlib.import_module("ep_processes")
    for name, value in (("HIDDEN", 128), ("TOP", 2), ("EXPERTS", 8), ("DEVICE", "cpu")):
        monkeypatch.setattr(shared, name, value)
    ep = importlib.import_module("ep")
    monkeypatch.setattr(ep, "TOP", 2)

    clock = itertools.count(10, 10)

    def run(work, repeats=1):
        work()
        return float(next(clock))

    monkeypatch.setattr(ep, "timed", run)
    yield ep
    for name in ("ep", "ep_processes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
def test_a_line_has_the_parts_and_the_layout_that_was_asked_for(bench, layout):
    line = bench.one_gpu(2, 3, layout)
    assert line["layout"] == layout
    took = {"spread": 10, "spread whole": 20, "return": 30, "send": 40, "plan": 50}
    took |= {"wait rows": 60 - 70, "wait outputs": 80, "sum": 90 - 80}
    assert {part: line[f"{part} us"] for part in took} == took
    assert line["dispatch us"] == 50 + 40 - 10 + 10
    assert line["combine us"] == 30 + 80 + 10
    assert line["dispatch wire bytes"] > 128
    assert line["layout MiB"] >= 0


def test_a_contiguous_layout_has_room_for_a_tenth_more_and_for_blocks(bench):
    size = bench.sized(2, 1000, "contiguous")
    assert size.capacity % 128 == 0
    assert 2000 * 1.1 + 4 * 127 <= size.capacity <= 2000 * 1.1 + 6 * 45 + 5 * 128
    assert bench.layout_of(size)["layout"] == "contiguous"
    assert bench.layout_of(bench.sized(2, 1000, "masked"))["layout"] == "masked"


def test_prefill_sizes_are_what_the_contiguous_layout_is_run_with():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        shared = importlib.import_module("ep_processes")
    finally:
        sys.path.remove(str(ROOT / "bench"))
    size = shared.sized(8, 16384, "contiguous")
    assert shared.TOKENS["contiguous"] == [1024, 4096, 8192, 16384]
    # 1.1 x 131,072 choices, 2,172 for chance and 32 experts' blocks.
    assert size.capacity == 150528


def test_a_size_that_fails_costs_no_other_and_what_is_known_is_in_the_file(
    bench, monkeypatch, tmp_path, capsys
):
    def one_gpu(ranks, tokens, layout):
        if tokens == 128:
            raise RuntimeError("no room")
        kept = (tmp_path / "ep.csv").read_text().count("one GPU") if tokens == 256 else 0
        return {"ranks": ranks, "tokens": tokens, "where": "one GPU", "kept": kept}

    monkeypatch.setattr(bench, "OUT", tmp_path)
    monkeypatch.setattr(bench, "one_gpu", one_gpu)
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: 1)
    words = ["ep.py", "--ranks", "2", "--tokens", "16", "128", "256"]
    monkeypatch.setattr(sys, "argv", words)
    assert bench.main() == 1
    with (tmp_path / "ep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["tokens"], row["kept"]) for row in rows] == [("16", "0"), ("256", "1")]
    said = capsys.readouterr()
    assert "2 ranks, 128 tokens" in said.out
    assert "no room" in said.err


class Graph:
    """Replays by calling."""

    def __init__(self, work):
        self.replay = work


class Mark:
    """An event; each is recorded 5 us after the one before."""

    at = itertools.count(0, 5)

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.now = next(Mark.at)

    def elapsed_time(self, later):
        return (later.now - self.now) / 1e3


@pytest.fixture
def shared(bench, monkeypatch, tmp_path):
    """Of a group of this process alone, over gloo, without a device."""
    found = importlib.import_module("ep_processes")
    monkeypatch.setattr(found, "captured", Graph)
    monkeypatch.setattr(found, "spans", functools.partial(found.spans, turns=TURNS))
    monkeypatch.setattr(found.torch.cuda, "Event", Mark)
    monkeypatch.setattr(found.torch.cuda, "synchronize", lambda: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


TURNS = 12


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
def test_a_rank_times_its_exchange_its_parts_and_nccl_with_the_same_bytes(
    shared, monkeypatch, layout
):
    moved, all_to_all = [], dist.all_to_all_single

    def watched(got, given, taken, sent, group):
        moved.append((taken, sent))
        all_to_all(got, given, taken, sent, group=group)
        assert bool((got == given).all())

    monkeypatch.setattr(shared.dist, "all_to_all_single", watched)
    heap = in_process_heaps(1, "cpu")[0]
    here = shared.Member(0, 1, 3, heap, False, layout)
    took, parts = here.times()
    assert took == pytest.approx({"dispatch": 5.0, "combine": 5.0})
    names = ["plan", "send", "wait rows", "spread", "spread whole", "return", "wait and sum"]
    assert list(parts) == names
    assert here.nccl(None) == pytest.approx(took)
    row, choice = here.size.record + here.size.note, 2 * 128
    out, back = 8 + 4 * 8 + 3 * row, 3 * 2 * choice
    out, back = -(-out // 128) * 128, -(-back // 128) * 128
    assert moved[-2:] == [([out], [out]), ([back], [back])]
    assert len(moved) == 2 * (10 + TURNS)
    # Four by themselves, then twice those in graphs.
    assert int(here.end.lanes[0].step) == 4 + 2 * TURNS
    assert here.out.isfinite().all()


def test_nccl_that_fails_costs_its_own_figures_only(shared, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(shared.dist, "all_to_all_single", fails)
    here = shared.Member(0, 1, 3, in_process_heaps(1, "cpu")[0], False, "masked")
    found = shared.slowest(here.nccl(None))
    assert all(math.isinf(took) for took in found.values())
    assert list(found) == ["dispatch", "combine"]
    assert "no NCCL here" in capsys.readouterr().err


def test_nccl_is_given_what_the_exchange_sends_to_each_rank(bench):
    shared = importlib.import_module("ep_processes")
    ranks, tokens = 4, 5
    group = bench.OneGpu(ranks, tokens)
    owner = group.ends[0]._tables[0].ranks[:, 0].long()
    told = []
    for _, ids, _ in group.data:
        to = owner[ids]
        rows = [int((to == peer).any(1).sum()) for peer in range(ranks)]
        told.append(rows + [int((to == peer).sum()) for peer in range(ranks)])
    each = [shared.shares(group.size, rank, told) for rank in range(ranks)]
    for name in ("dispatch", "combine"):
        sent = [share[name][0] for share in each]
        taken = [share[name][1] for share in each]
        assert taken == [list(column) for column in zip(*sent, strict=True)]
        assert sum(map(sum, sent)) > 0
    dispatch, combine = group.wire()
    for name, wire in (("dispatch", dispatch), ("combine", combine)):
        assert 0 <= sum(each[0][name][0][1:]) - wire < 128 * ranks
