"""What the bench of a whole mesh on one device makes of answers; and one small run on a CPU."""

import importlib
import json
import sys
from pathlib import Path

import meshes
import pytest

from pdmesh.launch.arguments import parser
from pdmesh.launch.topology import load_topology
from pdmesh.prefill.config import AUTO_CHUNK
from pdmesh.wire import chat_pb2

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def figures():
    yield from loaded("gpu_mesh_figures")


@pytest.fixture(scope="module")
def bench():
    yield from loaded("gpu_mesh")


def loaded(name):
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = before


def test_tokens_of_one_message_share_the_time_before_it(figures):
    assert figures.gaps([]) == figures.gaps([1.0]) == figures.gaps([1.0, 1.0]) == []
    assert figures.gaps([1.0, 2.0, 4.0]) == [1.0, 2.0]
    assert figures.gaps([1.0, 2.0, 2.0, 3.5]) == [0.5, 0.5, 1.5]


def answer(first_s, times, transfer_ms=None, tokens=(5, 6)):
    timing = None
    if transfer_ms is not None:
        timing = chat_pb2.Timing(transfer_ms=transfer_ms, prefill_ms=80.0)
    found = meshes.Answer(first_token_s=first_s, token_times=times, timing=timing)
    found.token_ids = [tokens[i % len(tokens)] for i in range(len(times))]
    return found


def test_answers_that_did_not_end_count_as_far_as_they_came(figures):
    answers = [
        answer(0.1, [0.1, 0.2, 0.3], 10.0),
        answer(0.3, [0.3, 0.5], 20.0),
        answer(0.2, [0.2]),
        meshes.Answer(),
    ]
    point = figures.summed(2, answers, 2.0, 8, 4)
    assert (point.answers, point.tokens, point.tokens_per_s) == (2, 6, 3.0)
    assert (point.ttft_ms, point.ttft_p99_ms) == (200.0, 300.0)
    assert point.itl_ms == pytest.approx(100.0)
    assert point.itl_p99_ms == pytest.approx(200.0)
    assert (point.prefill_ms, point.hand_off_ms, point.hand_off_p99_ms) == (80.0, 15.0, 20.0)
    assert point.layers == pytest.approx(1.5)  # a layer takes 10 ms
    assert (point.distinct, point.cut, point.failed) == (2, True, 0)
    failed = figures.summed(2, answers, 2.0, 8, 4, ["UNAVAILABLE: a", "UNAVAILABLE: b"])
    assert (failed.cut, failed.failed, failed.error) == (False, 2, "UNAVAILABLE: b")
    assert "(2 failed)" in figures.row(failed)
    assert "(cut)" in figures.row(point)
    nothing = figures.summed(2, [], 2.0, 8, 4)
    assert (nothing.tokens, nothing.ttft_p99_ms, nothing.layers) == (0, 0.0, 0.0)


def test_a_measurement_is_left_out_where_there_is_no_time_for_half_of_it(figures):
    assert figures.worth_it(6.0, 1, None)
    assert not figures.worth_it(4.0, 1, None)
    before = figures.summed(1, [answer(0.1, [0.1, 0.2], 1.0)] * 2, 40.0, 8, 2)
    assert figures.worth_it(11.0, 64, before)  # a request takes 20 s
    assert not figures.worth_it(9.0, 64, before)


def test_by_default_eight_full_width_layers_are_made_on_the_gpu(bench, tmp_path):
    options = bench.parse([])
    given = parser().parse_args(["up", *bench.flags(options)])
    assert (given.device, given.random_weights, given.layers) == ("cuda", True, 8)
    assert (str(given.model), given.no_mtp, given.decode) == ("deepseek-v3", True, 1)
    (tmp_path / "mesh.toml").write_text(bench.topology(options))
    topology = load_topology(tmp_path / "mesh.toml")
    assert (topology.decode.max_batch, topology.prefill.chunk_tokens) == (64, AUTO_CHUNK)
    assert ("decode", "pages") not in topology.origins  # what the device has room for
    (tmp_path / "mesh.toml").write_text(bench.topology(bench.parse(["--chunk", "1024"])))
    assert load_topology(tmp_path / "mesh.toml").prefill.chunk_tokens == 1024
    assert topology.mesh.log_level == "INFO"
    (tmp_path / "mesh.toml").write_text(bench.topology(bench.parse(["--log-level", "DEBUG"])))
    assert load_topology(tmp_path / "mesh.toml").mesh.log_level == "DEBUG"
    shipped = bench.parse(["--device", "cpu", "--config", "shipped"])
    assert "--random-weights" not in bench.flags(shipped)


@pytest.mark.parametrize(
    "flags",
    [
        ("--rounds", "0"),
        ("--budget-s", "10"),
        ("--chunk", "-1"),
        ("--config", "shipped", "--layers", "2"),
        ("--at-x",),
    ],
)
def test_wrong_input_is_refused(bench, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.parse(list(flags))
    assert caught.value.code == 2


def test_a_small_mesh_of_random_weights_is_measured_on_a_cpu(bench, tmp_path, capsys):
    target = tmp_path / "found.json"
    flags = ["--device", "cpu", "--config", "small", "--layers", "2", "--experts", "8"]
    sizes = ["--at-once", "1", "2", "--prompt", "70", "--output", "5", "--rounds", "1"]
    assert bench.main([*flags, *sizes, "--budget-s", "300", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert [(p["at_once"], p["answers"], p["tokens"]) for p in found["points"]] == [
        (1, 1, 5),
        (2, 2, 10),
    ]
    for point in found["points"]:
        assert not point["cut"]
        assert point["itl_ms"] > 0
        assert point["batch"] >= 1
        assert 0 < point["host"] < 1
    assert set(found["loaded_s"]) == {"prefill-0", "decode-0"}
    assert found["step_tokens"] == {"prefill-0": "512"}
    assert len(found["plan"]) == 2
    assert "tokens/s" in capsys.readouterr().out


def test_a_mesh_that_cannot_start_is_said_and_written(bench, tmp_path):
    target = tmp_path / "found.json"
    flags = ["--device", "cpu", "--config", "deepseek-v3", "--layers", "61", "--prompt", "5"]
    with pytest.raises(SystemExit, match="the mesh did not come up"):
        bench.main([*flags, "--budget-s", "120", "--json", str(target)])
    assert "did not come up" in json.loads(target.read_text())["error"]
