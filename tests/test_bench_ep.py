"""What bench/ep.py counts and prints, on a CPU and without its clock."""

import csv
import importlib
import itertools
import sys
from pathlib import Path

import pytest

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
    took = {"spread": 10, "return": 20, "send": 30, "plan": 40, "wait rows": 50 - 60}
    took |= {"wait outputs": 70, "sum": 80 - 70}
    assert {part: line[f"{part} us"] for part in took} == took
    assert line["dispatch us"] == 40 + 30 - 10 + 10
    assert line["combine us"] == 20 + 70 + 10
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
