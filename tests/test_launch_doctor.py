"""``pdmesh doctor``: what is here, what would compute, and a status that a script can test."""

import pytest
import torch

from pdmesh.kernels import backends
from pdmesh.kernels.backends import PLAIN, Candidate, Choice, Shapes, choose_backends
from pdmesh.launch.cli import main

SHAPES = Shapes(7168, 128, 512, 64, 128, 128, 2048, 256, 64)


def test_a_machine_without_a_gpu_computes_everything_in_torch(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for op in PLAIN:
        assert any(op in line and "torch: plain torch" in line for line in lines), op
    assert any("not flash_mla: it computes on a CUDA device, not on cpu" in line for line in lines)
    assert "pages    within this host over shm, to others over tcp" in lines
    assert (
        "weights  each worker loads its own; --share-weights: one copy in memory of the"
        in (lines[-2])
    )
    assert lines[-1] == "all is well"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0,cuda:1"])
def test_a_device_that_is_not_there_is_a_problem(capsys, device):
    assert main(["doctor", "--device", device]) == 2
    assert f"PROBLEM: {device.split(',')[0]} was asked for, and" in capsys.readouterr().out


def test_several_devices_are_looked_at_one_by_one(capsys, monkeypatch):
    monkeypatch.setattr("pdmesh.model.device.report.device_report", lambda _, d, *rest: [f"at {d}"])
    monkeypatch.setattr("pdmesh.kvtransfer.transports.transport_report", lambda d: "over tcp")
    assert main(["doctor", "--device", "cuda:0,cuda:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("device", "pages"))] == [
        "device   at cuda:0",
        "device   at cuda:1",
        "pages    over tcp",
    ]


def test_a_store_that_does_not_answer_is_a_problem_whose_password_stays_hidden(capsys):
    assert main(["doctor", "--device", "cpu", "--redis", "redis://:geheim@127.0.0.1:1"]) == 2
    out = capsys.readouterr().out
    assert "PROBLEM: redis" in out
    assert "geheim" not in out


def test_a_checkpoint_that_is_not_there_is_a_problem(capsys, tmp_path):
    assert main(["doctor", "--device", "cpu", "--model", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().out


def test_the_first_candidate_that_can_be_used_is_taken_and_the_others_say_why_not(monkeypatch):
    def candidate(name, problem):
        return Candidate(name, lambda _: name, lambda _device, _shapes: problem, f"{name} is fast")

    tried = (candidate("best", "it is not installed"), candidate("good", None))
    monkeypatch.setitem(backends.FASTER, "unpermute", tried)
    chosen = {c.op: c for c in choose_backends(torch.device("cpu"), SHAPES).choices}["unpermute"]
    assert (chosen.backend, chosen.call) == ("good", "good")
    assert chosen.reason == "good is fast; not best: it is not installed"
    asked = choose_backends(torch.device("cpu"), SHAPES, {"unpermute": "torch"})
    assert "asked for" in {c.op: c for c in asked.choices}["unpermute"].reason
    with pytest.raises(ValueError, match="not best: it is not installed"):
        choose_backends(torch.device("cpu"), SHAPES, {"unpermute": "best"})
    with pytest.raises(ValueError, match="no backend other; it has best, good, torch"):
        choose_backends(torch.device("cpu"), SHAPES, {"unpermute": "other"})


def test_the_environment_names_backends_of_a_cuda_device(monkeypatch):
    monkeypatch.setattr(
        backends, "_choose", lambda op, _device, _shapes, forced: Choice(op, forced, "", op)
    )
    monkeypatch.setenv("PDMESH_BACKENDS", "mla_prefill=triton,unpermute=torch")

    def named(device, *forced):
        chosen = choose_backends(torch.device(device), SHAPES, *forced).choices
        return {choice.op: choice.backend for choice in chosen if choice.backend}

    assert named("cuda") == {"mla_prefill": "triton", "unpermute": "torch"}
    assert named("cpu") == {}
    assert named("cuda", {"fp8_gemm": "by shape"}) == {"fp8_gemm": "by shape"}
