"""Workers that map weights of another process, as they are asked for, started and ended."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_shared_weights import SMALL, check_same, loaded, weights_of

from pdmesh.kvtransfer.held_memory import held_memory
from pdmesh.kvtransfer.weight_holder import MappedWeights
from pdmesh.launch import crew as crew_module
from pdmesh.launch import join as joining
from pdmesh.launch import probe
from pdmesh.launch.checks import check_together
from pdmesh.launch.cli import main
from pdmesh.launch.crew import Crew, Plan
from pdmesh.launch.join import offered_weights
from pdmesh.launch.machine import asked
from pdmesh.launch.processes import (
    Child,
    Spec,
    command,
    environment,
    holder_specs,
    physical,
    worker_spec,
)
from pdmesh.launch.readiness import holds
from pdmesh.launch.runtime import RunDir
from pdmesh.launch.supervisor import holders_info
from pdmesh.launch.topology import Topology, load_topology
from pdmesh.model import planning
from pdmesh.model.shared_weights import Wanted
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = (pytest.mark.gpu, NO_DEVICE)
RANDOM = RandomWeights(seed=3, layers=2, experts=8)
MADE = ("--random-weights", "--weights-seed", "3", "--layers", "2", "--experts", "8")


def sharing(**model):
    return Topology().changed("model", "--share-weights", share_weights=True, **model)


def test_workers_load_their_own_weights_unless_asked(tmp_path):
    assert holder_specs(Topology(), tmp_path) == {}
    spec = worker_spec(Topology(), "decode", "decode-0", tmp_path, 0)
    assert (spec.needs, spec.socket) == ("", None)
    assert "--weights-socket" not in spec.arguments


def test_the_topology_file_and_the_flag_ask_for_one_copy(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text("[model]\nshare_weights = true\n")
    assert load_topology(file).model.share_weights
    assert not load_topology(None).model.share_weights


@pytest.mark.parametrize(
    ("visible", "device", "found"),
    [
        (None, "cuda:1", True),
        (None, "cuda", False),
        ("1", "cuda", True),
        ("1", "cuda:0", True),
        ("0,2", "cuda:1", False),
        (None, "cpu", False),
    ],
)
def test_who_joins_by_name_finds_the_weights_of_its_own_device_whatever_it_sees(
    monkeypatch, visible, device, found
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # of the mesh
    spec = Spec("weights", "weights", (), 1, socket=Path("/run/weights.sock"))
    child = Child(spec, Path("log"), ready=True, process=Runs())
    holders = holders_info({"cuda:1": child}, "auto")
    monkeypatch.setattr(joining, "find_mesh", lambda name: SimpleNamespace(holders=holders))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    socket = offered_weights("default", physical(device), "auto")
    assert socket == (spec.socket if found else None)
    assert offered_weights("default", physical(device), "plain") is None
    assert offered_weights("10.0.0.1:7080", physical(device), "auto") is None


class Runs:
    """A process that lives."""

    def poll(self):
        return None


def test_every_device_has_a_holder_and_its_workers_its_socket(tmp_path):
    topology = sharing(device="cuda:0,cuda:1")
    holders = holder_specs(topology, tmp_path)
    assert [(d, s.name, s.socket) for d, s in holders.items()] == [
        ("cuda:0", "weights-0", tmp_path / "weights-0.sock"),
        ("cuda:1", "weights-1", tmp_path / "weights-1.sock"),
    ]
    spec = worker_spec(topology, "decode", "decode-1", tmp_path, 0, None, holders["cuda:1"])
    at = spec.arguments.index("--weights-socket")
    assert spec.arguments[at + 1] == str(tmp_path / "weights-1.sock")
    assert spec.needs == "weights-1"
    (only,) = holder_specs(sharing(device="cuda"), tmp_path).values()
    assert (only.name, only.role) == ("weights", "weights")


def test_a_holder_and_its_workers_are_told_the_same_of_the_weights(tmp_path):
    topology = sharing(random_weights=True, layers=3, weights_seed=5, mtp=False, precision="fp8")
    (holder,) = holder_specs(topology, tmp_path).values()
    worker = worker_spec(topology, "prefill", "prefill-0", tmp_path, 0, None, holder)
    named = ("--weights-seed", "--layers", "--experts", "--model", "--dtype", "--precision")

    def told(arguments):
        return {flag: arguments[arguments.index(flag) + 1] for flag in named}

    assert told(holder.arguments) == told(worker.arguments)
    for arguments in (holder.arguments, worker.arguments):
        assert {"--random-weights", "--no-mtp"} <= set(arguments)


@pytest.mark.parametrize(("role", "key"), [("prefill", "ep"), ("decode", "virtual_ranks")])
def test_workers_that_share_experts_hold_different_weights(role, key):
    topology = sharing().changed(role, f"--{role}-x", **{key: 2})
    with pytest.raises(ConfigError, match=f"^--{role}-x: .* leave --share-weights out$"):
        check_together(topology)
    check_together(sharing())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "weights are offered at a socket; add --weights-socket PATH"),
        (("--model", "/none", "--weights-socket", "s"), "the model directory /none does not exist"),
        (("--device", "cuda:0,cuda:1", "--weights-socket", "s"), "a worker computes on one device"),
        (("--device", "tpu", "--weights-socket", "s"), "there is no device 'tpu'"),
    ],
)
def test_a_holder_that_cannot_be_is_refused_in_a_sentence(capsys, flags, sentence):
    assert main(["serve", "weights", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_the_memory_of_two_workers_holds_the_weights_once(monkeypatch):
    monkeypatch.setattr(planning, "check_machine", lambda *_: None)
    monkeypatch.setattr(planning, "memory_of", lambda _: (100 * 10**9, 150_700_000_000))
    full = {"device": "cuda", "random_weights": True, "layers": 8, "mtp": False}
    two = Topology().changed("decode", "--decode", workers=1)
    own = probe.answer(asked(two.changed("model", "a flag", **full)))
    assert re.search(r"2 workers need 1\d\d.*, or add --share-weights for one", own["problem"])
    found = probe.answer(asked(two.changed("model", "a flag", share_weights=True, **full)))
    assert len(found["lines"]) >= 3, found
    for line in found["lines"][:2]:
        assert re.search(
            r"on cuda: \d+\.\d of \d+\.\d GB: weights shared \(one copy of 63\.\d GB", line
        )


# ---- the crew ---------------------------------------------------------------------------------


class FakeProcess:
    """A process that ends when it is told to; ``order`` notes who was told."""

    pids = iter(range(1000, 2000))

    def __init__(self, name, order):
        self.name, self.order, self.pid, self.code = name, order, next(self.pids), None

    def poll(self):
        return self.code

    def wait(self):
        return self.code

    def send_signal(self, number):
        self.order.append((self.name, number))
        self.code = -number


@pytest.fixture
def crew(tmp_path, monkeypatch):
    """A crew whose processes are none, with ``offering``: the pids that offer weights."""
    order: list[tuple[str, int]] = []

    def start(child, redis_url, now):
        child.ready, child.started = False, now
        child.process = FakeProcess(child.spec.name, order)
        child.log.write_text("")

    async def nobody(*_):
        return []

    async def serving(_):
        return True

    offering: set[int] = set()
    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(crew_module, "read_members", nobody)
    monkeypatch.setattr(crew_module, "serving", serving)
    monkeypatch.setattr(crew_module, "holds", lambda path, pid: pid in offering)
    run_dir = RunDir(tmp_path)
    run_dir.prepare()
    made = Crew(Plan(sharing(), 7080, run_dir), tmp_path / "key")
    made.order, made.offering = order, offering
    return made


def named(crew, name):
    return next(child for child in crew.children if child.spec.name == name)


def running(crew):
    return {child.spec.name for child in crew.children if child.running}


WORKERS = {"prefill-0", "decode-0", "decode-1"}


async def test_workers_start_once_their_weights_are_there(crew):
    crew.start()
    assert running(crew) == {"router", "weights"}
    await crew.watch_once()
    assert running(crew) == {"router", "weights"}
    crew.offering.add(named(crew, "weights").process.pid)
    await crew.watch_once()
    assert named(crew, "weights").ready
    await crew.watch_once()
    assert running(crew) == {"router", "weights"} | WORKERS
    assert crew.workers().keys() == crew.known().keys() == WORKERS, "a holder is no worker"


async def test_workers_of_a_dead_holder_wait_for_the_next(crew, monkeypatch):
    crew.start()
    crew.offering.add(named(crew, "weights").process.pid)
    await crew.watch_once()
    await crew.watch_once()
    clock = [crew_module.time.monotonic()]
    monkeypatch.setattr(crew_module.time, "monotonic", lambda: clock[0])
    for name in ("weights", "decode-0"):
        named(crew, name).process.code = -9
    await crew.watch_once()
    clock[0] += 10.0
    await crew.watch_once()
    assert running(crew) == {"router", "weights", "prefill-0", "decode-1"}
    clock[0] += 10.0
    await crew.watch_once()
    assert "decode-0" not in running(crew), "the new holder has nothing to offer yet"
    assert not crew.add("decode").running
    crew.offering.add(named(crew, "weights").process.pid)
    await crew.watch_once()
    await crew.watch_once()
    assert running(crew) == {"router", "weights", "decode-2"} | WORKERS


async def test_the_holder_ends_last(crew):
    crew.start()
    crew.offering.add(named(crew, "weights").process.pid)
    await crew.watch_once()
    await crew.watch_once()
    await crew.stop()
    assert crew.order[0] == ("router", signal.SIGTERM)
    assert crew.order[-1] == ("weights", signal.SIGTERM)
    assert {name for name, _ in crew.order} == {"router", "weights"} | WORKERS
    assert not running(crew)


def test_sockets_that_a_mesh_before_left_are_taken_away(tmp_path):
    (tmp_path / "weights-1.sock").touch()
    RunDir(tmp_path).prepare()
    assert not (tmp_path / "weights-1.sock").exists()


# ---- a holder by hand -------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["plain", "fp8"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_holder_by_hand_offers_what_a_worker_would_have_loaded(tmp_path, device, precision):
    path = tmp_path / "w.sock"
    where = ("--weights-socket", str(path), "--device", device, "--precision", precision)
    assert not holds(path, os.getpid())
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command("serve", "weights", "--model", "small", *MADE, *where),
            env={k: v for k, v in environment("", 1).items() if k != "PDMESH_PARENT"},
            stderr=log,
        )
    try:
        while not holds(path, process.pid):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        assert not holds(path, os.getpid())
        fp8 = precision == "fp8"
        wanted = Wanted(SMALL, fp8, "bfloat16" if fp8 else "float32", True, RANDOM)
        with MappedWeights(path, held_memory(device)) as mapped:
            check_same(
                weights_of(loaded(wanted, mapped, device=device)[0]),
                weights_of(loaded(wanted, device=device)[0]),
            )
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert not path.exists()
    text = (tmp_path / "log").read_text()
    assert "holding weights" in text
    assert "weights mapped" in text
