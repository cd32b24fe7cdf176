"""Whether a machine can compute what a mesh asks for: known before any process starts."""

import contextlib
import json
import re

import pytest
import torch

from pdmesh.kernels import backends, candidates
from pdmesh.kernels.backends import Candidate, Shapes
from pdmesh.launch import machine as asking
from pdmesh.launch import probe, up
from pdmesh.launch.cli import main
from pdmesh.launch.machine import asked
from pdmesh.launch.topology import AUTO_PAGES, Topology, shipped_config
from pdmesh.model import planning, starting
from pdmesh.model.machine import Machine, backends_for, check_machine, remarks, this_machine
from pdmesh.model.parallel import serving
from pdmesh.wire.errors import ConfigError

H200 = ("NVIDIA H200", (9, 0))
A100 = ("NVIDIA A100", (8, 0))
GOOD = Machine("2.11.0", "13.0", (H200,), triton=True, compiler=True, nvcc=True)


def with_(**changes):
    return Machine(**(GOOD.__dict__ | changes))


REFUSED = [
    (
        with_(cuda=None, devices=()),
        "cuda",
        "torch 2.11.0 is built for the CPU alone; install a bui",
    ),
    (with_(devices=()), "cuda", "no CUDA device that torch can use; see what nvidia-smi says"),
    (with_(devices=(), visible="7"), "cuda", r"torch can use \(CUDA_VISIBLE_DEVICES=7\)"),
    (GOOD, "cuda:1", "there is no cuda:1; this machine has cuda:0"),
    (with_(devices=(A100,)), "cuda", "cuda is a NVIDIA A100 of 8.0; add --precision plain"),
    (with_(devices=(H200, A100)), "cuda:1", "cuda:1 is a NVIDIA A100 of 8.0"),
    (with_(triton=False), "cuda", r"triton, which is not installed; install pdmesh\[gpu\], or add"),
    (with_(backends="mla_prefil=triton"), "cuda", "has 'mla_prefil=triton', not OPERATION=BACKEND"),
    (
        with_(backends="mla_prefill=best"),
        "cuda",
        "mla_prefill has no backend best; it has .*triton",
    ),
    (with_(backends="fp8_gemm"), "cuda", r"operations: .*fp8_gemm, "),
    (with_(compiler=False), "cuda", "a C compiler, and there is none; install gcc or clang"),
]


@pytest.mark.parametrize(("machine", "device", "sentence"), REFUSED)
def test_what_fp8_cannot_be_computed_on_is_refused_with_the_fix(machine, device, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_machine(machine, device, "fp8")
    assert "\n" not in str(caught.value)


def test_what_can_compute_is_not_refused():
    check_machine(GOOD, "cuda", "fp8")
    check_machine(with_(nvcc=False), "cuda:0", "fp8")
    check_machine(with_(devices=(A100,), triton=False, compiler=False), "cuda", "plain")
    for precision in ("fp8", "plain"):
        check_machine(with_(cuda=None, devices=(), triton=False), "cpu", precision)


def test_a_compiler_that_is_missing_costs_time_and_is_said():
    assert "nvcc" in remarks(with_(nvcc=False), "cuda", "fp8")[0]
    assert not [line for line in remarks(GOOD, "cuda", "fp8") if "nvcc" in line]
    assert remarks(with_(nvcc=False), "cpu", "fp8") == []
    assert remarks(with_(nvcc=False), "cuda", "plain") == []


@pytest.mark.gpu
def test_a_gpu_that_the_kernels_run_on_is_not_refused():
    assert candidates.triton_problem() is None
    check_machine(this_machine(), "cuda", "fp8")


def cuda(**sections):
    topology = Topology().changed("model", "--device", device="cuda")
    for name, values in sections.items():
        topology = topology.changed(name, "a flag", **values)
    return topology


def test_the_probe_is_asked_for_what_the_workers_will_ask_for():
    question = asked(cuda(model={"random_weights": True, "layers": 8}, decode={"pages": 9}))
    assert json.loads(json.dumps(question)) == question
    assert question["random"] == {"layers": 8}
    prefill, decode = question["workers"]
    assert prefill["share"] == decode["share"] == 1 / 3
    assert (prefill["count"], prefill["pages"]) == (1, AUTO_PAGES)
    assert prefill["rows"] == [chunk + 64 for chunk in (4096, 2048, 1024, 512)]
    assert (decode["count"], decode["rows"], decode["pages"]) == (2, [2 * 32], 9)
    told = asked(cuda(model={"mtp": False}, prefill={"chunk_tokens": 3000}))
    assert [worker["rows"] for worker in told["workers"]] == [[3064], [32]]
    assert asked(cuda(decode={"draft_tokens": "auto"}))["workers"][1]["rows"] == [5 * 32]
    group = asked(cuda(prefill={"ep": 4, "workers": 4}))
    assert group["workers"][0]["rows"] == [1088, 576]


def test_each_device_is_asked_for_its_own_workers():
    on_two = Topology().changed("model", "--device", device="cuda:0,cuda:1")
    found = asked(on_two.changed("decode", "--decode", workers=3))["workers"]
    assert [(w["role"], w["device"], w["count"], w["share"]) for w in found] == [
        ("prefill", "cuda:0", 1, 1 / 3),
        ("decode", "cuda:0", 2, 1 / 3),
        ("decode", "cuda:1", 1, 1.0),
    ]


def test_a_problem_names_the_flag_and_a_plan_is_handed_on():
    with pytest.raises(ConfigError, match="^--device: too small$"):
        asking.check_machine(cuda(), lambda _: {"problem": "too small"})
    told = cuda(prefill={"chunk_tokens": 64})
    found = {"lines": ["71 GB"], "prefill_rows": 128, "reason": ""}
    assert asking.check_machine(told, lambda _: found) == (told, ["71 GB"])


def test_the_shipped_way_on_a_cpu_asks_nothing():
    def never(_):
        raise AssertionError

    assert asking.check_machine(Topology(), never) == (Topology(), [])


def on_a(monkeypatch, machine, free, total):
    for module in ("planning", "machine"):
        monkeypatch.setattr(f"pdmesh.model.{module}.this_machine", lambda: machine)
    monkeypatch.setattr(planning, "memory_of", lambda _: (free, total))


FULL = {"random_weights": True, "layers": 8, "mtp": False}


def test_two_workers_of_eight_full_width_layers_share_an_h200(monkeypatch):
    on_a(monkeypatch, GOOD, 150 * 10**9, 150_700_000_000)
    found = probe.answer(asked(cuda(model=FULL, decode={"workers": 1})))
    assert len(found["lines"]) >= 3, found
    assert re.search(
        r"prefill on cuda: [67]\d\.\d of 71\.\d GB: weights 63\.\d, steps", found["lines"][0]
    )
    assert re.search(
        r"decode on cuda: [67]\d\.\d of 71\.\d GB: weights 63\.\d, steps", found["lines"][1]
    )


@pytest.mark.parametrize(
    ("machine", "free", "sections", "sentence"),
    [
        (GOOD, 150, {"model": FULL}, "the model does not fit: weights need 63.2 GB"),
        (GOOD, 100, {"model": FULL, "decode": {"workers": 1}}, "2 workers need 13"),
        (GOOD, 150, {"model": FULL | {"layers": 61}}, "random weights may have fewer --layers"),
        (with_(devices=(A100,)), 150, {}, "add --precision plain"),
        (GOOD, 150, {"model": {"random_weights": True, "experts": 4}}, "is above the 4 experts"),
    ],
)
def test_what_does_not_fit_is_one_sentence(monkeypatch, machine, free, sections, sentence):
    on_a(monkeypatch, machine, free * 10**9, 150_700_000_000)
    assert sentence in probe.answer(asked(cuda(**sections)))["problem"]


def test_workers_that_share_experts_need_room_for_their_own_only(monkeypatch):
    on_a(monkeypatch, with_(devices=2 * GOOD.devices), 150 * 10**9, 150_700_000_000)
    shared = cuda(model=FULL, decode={"workers": 2, "ep": 2})
    shared = shared.changed("model", "--device", device="cuda:0,cuda:1")
    found = probe.answer(asked(shared))
    assert "problem" not in found, found
    lines = found["lines"]
    assert re.search(r"prefill on cuda:0: [67]\d\.\d of 71\.6 GB: weights 63\.2", lines[0])
    assert re.search(r"decode on cuda:1: \d+\.\d of 143\.2 GB: weights 35\.0", lines[3])


def test_random_weights_are_planned_on_a_cpu_too(monkeypatch):
    topology = Topology().changed("model", "--random-weights", random_weights=True)
    monkeypatch.setattr(planning, "memory_of", lambda _: (10**10, 10**10))
    assert "weights need 2730" in probe.answer(asked(topology))["problem"]
    small = probe.answer(asked(topology.changed("model", "--model", path=shipped_config("small"))))
    assert "prefill on cpu: 0.6 of 9.5 GB: weights 0.1" in small["lines"][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "flags", [("--device", "cuda"), ("--device", "cuda:1", "--random-weights", "--layers", "8")]
)
def test_a_mesh_without_its_device_ends_before_any_process_starts(capsys, monkeypatch, flags):
    monkeypatch.setattr(up, "claim", lambda *_: pytest.fail("it goes on"))
    assert main(["up", *flags]) == 2
    assert f"pdmesh: --device: {flags[1]} was asked for, and" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_worker_by_hand_without_its_device_ends_before_it_loads_anything(capsys, tmp_path):
    secret = tmp_path / "key"
    secret.write_bytes(b"k" * 32)
    flags = ("--redis", "redis://127.0.0.1:1", "--secret-file", str(secret), "--device", "cuda")
    assert main(["serve", "decode", *flags]) == 2
    err = capsys.readouterr().err
    assert "pdmesh: cuda was asked for, and" in err
    assert "event=loading" not in err


def test_a_probe_that_breaks_is_one_sentence():
    with pytest.raises(ConfigError, match="could not be looked at: KeyError: 'workers'"):
        asking._process({})


def on_an_h200(monkeypatch):
    """One of whose kernels is for packed latents alone, and must not be loaded."""
    on_a(monkeypatch, GOOD, 150 * 10**9, 150_700_000_000)
    candidates.register()

    def never(_):
        raise AssertionError("it is loaded")

    def hopper(device, shapes):
        return None if shapes.latent_bytes == 1 else "the pages hold latents in bfloat16"

    monkeypatch.setitem(backends.FASTER, "mla_decode", (Candidate("hopper", never, hopper, ""),))


NOT_HOPPER = "mla_decode: not hopper: the pages hold latents in bfloat16"
NAMED = "$PDMESH_BACKENDS is 'unpermute=torch,mla_decode=hopper': name another backend there"


def test_a_mesh_whose_named_backend_cannot_compute_ends_before_any_process_starts(
    capsys, monkeypatch
):
    on_an_h200(monkeypatch)
    monkeypatch.setattr(up, "claim", lambda *_: pytest.fail("it goes on"))
    monkeypatch.setattr(
        up, "check_machine", lambda topology: asking.check_machine(topology, probe.answer)
    )
    monkeypatch.setenv("PDMESH_BACKENDS", "unpermute=torch,mla_decode=hopper")
    for shared in ((), ("--share-weights",)):
        assert main(["up", "--device", "cuda", *shared]) == 2
        sentence = capsys.readouterr().err
        assert NOT_HOPPER in sentence
        assert NAMED in sentence
        assert sentence.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("prefill",),
        ("decode",),
        ("prefill", "--ep-rank", "1", "--ep-ranks", "127.0.0.1:1,127.0.0.1:2"),
        ("decode", "--ep-rank", "0", "--ep-ranks", "127.0.0.1:1,127.0.0.1:2"),
    ],
)
def test_a_worker_whose_named_backend_cannot_compute_ends_before_it_loads_anything(
    capsys, monkeypatch, tmp_path, words
):
    on_an_h200(monkeypatch)
    monkeypatch.setattr(serving, "check_nvshmem", lambda: None)
    monkeypatch.setattr(starting, "load_served_model", lambda *_, **__: pytest.fail("it loads"))
    monkeypatch.setenv("PDMESH_BACKENDS", "unpermute=torch,mla_decode=hopper")
    secret = tmp_path / "key"
    secret.write_bytes(b"k" * 32)
    flags = ("--redis", "redis://127.0.0.1:1", "--secret-file", str(secret), "--device", "cuda")
    assert main(["serve", *words, *flags]) == 2
    err = capsys.readouterr().err
    assert NOT_HOPPER in err
    assert NAMED in err
    assert "event=loading" not in err


def test_named_backends_that_can_compute_are_not_refused_and_not_loaded_to_know(monkeypatch):
    on_an_h200(monkeypatch)
    monkeypatch.setenv("PDMESH_BACKENDS", "unpermute=torch,mla_decode=hopper")
    found = probe.answer(asked(cuda(model={"latents": "fp8", **FULL}, decode={"workers": 1})))
    assert "problem" not in found, found


def test_a_named_backend_is_asked_about_the_device_that_it_is_for(monkeypatch):
    on_an_h200(monkeypatch)
    monkeypatch.setenv("PDMESH_BACKENDS", "mla_decode=hopper")
    current = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda index: current.append(index) or contextlib.nullcontext()
    )
    shapes = Shapes(7168, 128, 512, 64, 128, 128, 2048, 256, 64, latent_bytes=1)
    for device in ("cuda", "cuda:1"):
        backends.check_named(torch.device(device), shapes)
    assert current == [-1, 1]


def test_backends_named_for_a_gpu_leave_a_cpu_and_plain_precision_alone(monkeypatch):
    on_an_h200(monkeypatch)
    monkeypatch.setenv("PDMESH_BACKENDS", "mla_decode=hopper")
    plain = cuda(model={"precision": "plain"})
    assert "problem" not in probe.answer(asked(plain))
    small = {"random_weights": True, "path": shipped_config("small"), "precision": "fp8"}
    assert "problem" not in probe.answer(asked(Topology().changed("model", "a flag", **small)))


def test_a_backend_that_is_asked_for_and_cannot_compute_the_model_is_wrong_input(monkeypatch):
    shapes = Shapes(7168, 128, 512, 64, 128, 128, 2048, 256, 64)
    monkeypatch.setenv("PDMESH_BACKENDS", "mla_decode=hopper")
    with pytest.raises(ConfigError, match=r"mla_decode: not hopper.*PDMESH_BACKENDS is 'mla_decod"):
        backends_for(torch.device("cuda"), shapes)
