"""A slice of a request trace through a whole mesh, by policy."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SAMPLES = ("synthetic", "conversation")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import mesh_replay

        yield mesh_replay
    finally:
        sys.path.remove(str(ROOT / "bench"))


def sample(kind):
    return str(DATA / f"mooncake_{kind}_scaled32_block16_first300.jsonl")


def replayed(bench, capsys, *arguments):
    """The rows that the command prints, by policy: hit in the mesh, and of simulated workers."""
    assert bench.main(arguments) == 0
    said = capsys.readouterr().out
    assert "all policies gave the same answers" in said
    rows = [text.split() for text in said.splitlines() if "|" in text][1:]
    return {row[0]: (float(row[1]), float(row[row.index("|") + 1])) for row in rows}


def chats(path, count=3, turns=3, blocks=4):
    """A trace of chats that take turns, each turn ``blocks`` blocks longer than the one before."""
    lines = [
        {
            "timestamp": 1000 * (turn * count + chat),
            "input_length": 16 * blocks * (turn + 1),
            "output_length": 2,
            "hash_ids": [100 * chat + n for n in range(blocks * (turn + 1))],
        }
        for turn in range(turns)
        for chat in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_chats_find_in_the_mesh_what_simulated_workers_find_and_answers_do_not_depend_on_it(
    bench, capsys, tmp_path
):
    """An odd number of chats, so that round robin sends each next turn to the other of two
    workers."""
    arguments = ["--trace", chats(tmp_path / "chats.jsonl"), "--one-mesh"]
    arguments += ["--busy", "0.5", "--cold", "1"]
    rows = replayed(bench, capsys, *arguments, "--policies", "round_robin", "priced")
    (blind, blind_simulated), (priced, simulated) = rows["round_robin"], rows["priced"]
    assert simulated > blind_simulated + 25
    # A prompt's pages are there only when they are computed, so a follower may come too early.
    assert blind_simulated < priced <= simulated + 0.1
    # The mesh fetches from one worker what another one needs; simulated workers do not.
    assert blind_simulated - 0.1 <= blind <= simulated + 0.1


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", SAMPLES)
def test_the_whole_sample_is_answered_alike_by_every_policy(bench, capsys, kind):
    rows = replayed(bench, capsys, "--trace", sample(kind))
    assert rows["priced"][0] > rows["round_robin"][0]


def test_prompts_longer_than_the_context_are_left_out_and_counted(bench):
    blocks = tuple(bytes([n]) for n in range(3))
    requests = [bench.Request(0.0, tokens, 1, blocks) for tokens in (10, 4094, 4095, 9000)]
    kept, others = bench.servable(bench.Trace("t", 16, tuple(requests)), bench.CONTEXT - 2)
    assert [request.tokens for request in kept.requests] == [10, 4094]
    assert others == 2


def test_equal_blocks_are_equal_tokens_and_others_are_not(bench):
    one, other = (
        bench.prompt_of(bench.Request(0.0, 40, 1, (b"a", b"b", last))) for last in (b"c", b"d")
    )
    assert len(one) == len(other) == 40
    assert one[:32] == other[:32]
    assert one[32:] != other[32:]


def test_a_trace_of_other_blocks_is_refused_by_name(bench, tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]}')
    with pytest.raises(SystemExit, match="blocks of 512 tokens, not 16"):
        bench.main(["--trace", str(path)])
