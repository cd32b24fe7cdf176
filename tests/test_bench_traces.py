"""The replays of request traces, on samples of 300 requests."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SAMPLES = sorted(DATA.glob("*_first300.jsonl"))


@pytest.fixture(scope="module")
def bench():
    """The two benchmarks as modules."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("route_replay"), importlib.import_module("eviction")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module", params=SAMPLES, ids=lambda path: path.stem)
def trace(request, bench):
    return bench[0].load(request.param)


def test_the_block_size_is_found_and_tokens_add_up(bench, trace):
    assert trace.block == 16
    assert len(trace.requests) == 300
    assert trace.rate == pytest.approx(
        sum(r.tokens for r in trace.requests) / trace.requests[-1].at / 0.9
    )


def test_without_an_end_of_memory_one_worker_hits_what_was_seen_before(bench, trace):
    seen, expected = set(), 0
    for request in trace.requests:
        depth = next((i for i, b in enumerate(request.blocks) if b not in seen), None)
        depth = len(request.blocks) if depth is None else depth
        expected += min(16 * depth, request.tokens - 1)
        seen.update(request.blocks)
    result = bench[0].replay(trace, None, 8, "shared", random.Random(0))
    assert result.hit == pytest.approx(expected / sum(r.tokens for r in trace.requests))


@pytest.mark.parametrize("count", [4, 8])
def test_every_policy_is_replayed_and_none_hits_more_than_shared_memory(bench, trace, count):
    route_replay = bench[0]
    results = {
        name: route_replay.replay(trace, None, count, name, random.Random(1))
        for name in route_replay.POLICIES
    }
    most = results["shared"].hit + 1e-9
    assert all(0 <= result.hit <= most for result in results.values())
    assert all(1 <= r.imbalance <= count for r in results.values() if r.policy != "shared")
    assert results["longest_prefix"].hit == pytest.approx(results["shared"].hit)
    assert results["priced"].hit > results["random"].hit
    assert results["priced"].mean_s < results["random"].mean_s
    assert results["priced"].mean_s < results["least_load"].mean_s


def test_a_replay_gives_the_same_figures_again(bench, trace):
    one, two = (bench[0].replay(trace, 500, 4, "priced", random.Random(7)) for _ in range(2))
    assert (one.hit, one.imbalance, one.p99_s) == (two.hit, two.imbalance, two.p99_s)


def test_a_figure_that_is_too_low_is_said(bench, trace):
    route_replay = bench[0]
    make = route_replay.Result

    def cell(hit, mean, reference=None):
        rows = {"priced": (hit, mean), "bounded_load": (0.5, 9.0), "min_ttft": (0.4, 1.0)}
        return [
            make("t", 3000, 4, name, h, 1.0, m, m, 1.0, reference) for name, (h, m) in rows.items()
        ]

    assert list(route_replay.shortfalls(cell(0.49, 1.0), True)) == []
    assert len(list(route_replay.shortfalls(cell(0.48, 1.1), True))) == 2
    assert len(list(route_replay.shortfalls(cell(0.49, 1.0, (0.4, 1.0, 2.0)), True))) == 2


def test_ties_that_fall_otherwise_are_no_shortfall(bench):
    route_replay = bench[0]
    make = route_replay.Result

    def rows(ours, error):
        quick = make("t", 3000, 4, "min_ttft", 0.4, 1.0, 1.0, 1.0, 1.0, None, 0.01)
        bounded = make("t", 3000, 4, "bounded_load", 0.5, 1.0, 9.0, 9.0, 1.0)
        return [quick, bounded, make("t", 3000, 4, "priced", 0.5, 1.0, ours, 1.0, 1.0, None, error)]

    assert list(route_replay.shortfalls(rows(1.02, 0.01), False)) == []
    assert len(list(route_replay.shortfalls(rows(1.04, 0.01), False))) == 1
    assert len(list(route_replay.shortfalls(rows(1.021, 0.0), False))) == 1


def test_runs_with_several_seeds_are_one_row(bench):
    runs = [
        bench[0].Result("t", 3000, 4, "priced", h, 1.0, m, 2.0, 5.0)
        for h, m in ((0.4, 1.0), (0.6, 3.0))
    ]
    one = bench[0].averaged(runs)
    assert (one.hit, one.mean_s, one.error_s) == (0.5, 2.0, pytest.approx(1.0))
    assert bench[0].averaged(runs[:1]) == runs[0]


def test_the_command_prints_a_row_a_policy_and_writes_them(bench, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--traces", str(DATA), "--trace", SAMPLES[0].name, "--first", "50"]
    arguments += ["--blocks", "inf", "--workers", "4", "--policies", "priced", "random"]
    assert bench[0].main([*arguments, "--json", str(out)]) == 0
    assert [row["policy"] for row in json.loads(out.read_text())] == ["priced", "random"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_trace_that_is_not_there_is_named(bench):
    for module in bench:
        with pytest.raises(SystemExit, match="no trace .*nowhere.jsonl: name its folder"):
            module.main(["--traces", "x", "--trace", "nowhere.jsonl"])


def test_eviction_policies_lie_between_nothing_and_what_the_future_would_tell(bench, trace):
    eviction = bench[1]
    found = {n: h for n, (h, _) in eviction.hit_ratios(trace, 400, list(eviction.POLICIES)).items()}
    assert 0 < found["lru"] <= found["belady"] <= found["ideal"]
    assert found["returns"] <= found["belady"]
    assert found["s3-fifo"] <= found["belady"]
    large = eviction.hit_ratios(trace, 10**5, list(eviction.POLICIES))
    assert len({hit for hit, _ in large.values()}) == 1


def test_the_page_manager_with_lru_hits_what_a_plain_list_would(bench, trace):
    chains = [request.blocks for request in trace.requests]
    kept: list[bytes] = []
    hits = 0
    for chain in chains:
        hits += bench[1].leading(chain, set(kept))
        kept = [b for b in kept if b not in set(chain)] + list(reversed(chain))
        kept = kept[-400:]
    assert bench[1].ours("lru")(chains, 400) == pytest.approx(hits, abs=2)


@pytest.mark.parametrize("blocks", [400, 10**5])
def test_a_replay_with_copies_gives_up_pages_that_others_have_and_finds_no_less_than_itself(
    bench, trace, blocks
):
    copies = importlib.import_module("copies")
    without, with_hints = (copies.replay(trace, blocks, 2, 2, how, seed=1) for how in (False, True))
    for result in (without, with_hints):
        assert 0 < result.own <= result.hit < 1
        assert 0 < result.mean_s <= result.p99_s
    assert without.said == 0
    assert with_hints == copies.replay(trace, blocks, 2, 2, True, seed=1)
    if blocks == 400:
        assert with_hints.said > 0.1
    else:
        assert with_hints == without, "nothing had to go"
