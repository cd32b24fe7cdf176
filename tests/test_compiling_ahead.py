"""What a worker compiles before its first steps, side by side, and what it does when that fails."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from child_path import python_path
from live_memory import PAGE, batch_of, shapes_only

from pdmesh.decode import capturing
from pdmesh.kernels import cuda_build, cuda_gate, dense, flashinfer_backend
from pdmesh.kernels.backends import Choice
from pdmesh.kernels.compiling import Compilation
from pdmesh.model.device import compiling as module
from pdmesh.model.device.compiling import compiling, of_prompts, of_steps
from pdmesh.model.device.full_width import full_width
from pdmesh.model.device.padding import graph_sizes
from pdmesh.prefill import warming

WAIT_S = 30
CHOSEN = {
    "gate_topk": "by rows",
    "fp8_gemm": "by shape",
    "absorb_query": "cuda",
    "project_values_quantise": "cuda",
    "mla_decode": "hopper",
}


def missing(name, run):
    return Compilation(name, lambda: False, run)


def told(caplog, name):
    """The fields of all events of a name."""
    return [record.fields for record in caplog.records if record.getMessage() == name]


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.INFO)


def test_libraries_are_compiled_side_by_side_and_beside_the_steps(caplog):
    together = threading.Barrier(3)
    with compiling([missing(name, lambda: together.wait(WAIT_S)) for name in "ab"], jobs=2):
        together.wait(WAIT_S)
    (begun,), (ended,) = told(caplog, "compiling kernels"), told(caplog, "kernels compiled")
    assert begun == {"kernels": 2, "jobs": 2}
    assert (ended["kernels"], ended["failed"], ended["left"]) == (2, 0, 0)
    assert {line["kernel"] for line in told(caplog, "kernel compiled")} == {"a", "b"}


def test_no_more_compilers_run_than_were_allowed():
    threads, begin, done = set(), threading.Event(), threading.Semaphore(0)

    def run():
        assert begin.wait(WAIT_S)
        threads.add(threading.get_ident())
        done.release()

    with compiling([missing(str(n), run) for n in range(20)], jobs=2):
        begin.set()
        assert all(done.acquire(timeout=WAIT_S) for _ in range(20))
    assert len(threads) <= 2


def test_one_that_does_not_compile_is_told_with_its_reason_and_the_others_are_made(caplog):
    made = threading.Event()

    def fails():
        raise RuntimeError("nvcc: no such wgmma")

    with compiling([missing("bad", fails), missing("good", made.set)]):
        assert made.wait(WAIT_S)
    (line,), (ended,) = told(caplog, "kernel not compiled"), told(caplog, "kernels compiled")
    assert (line["kernel"], line["reason"]) == ("bad", "nvcc: no such wgmma")
    assert (ended["kernels"], ended["failed"]) == (1, 1)


def test_an_error_of_the_steps_comes_out_as_it_is():
    with pytest.raises(ValueError, match="a step"), compiling([missing("a", lambda: None)]):
        raise ValueError("a step")


def test_nothing_is_done_or_said_where_all_is_compiled(caplog):
    with compiling([Compilation("there", lambda: True, pytest.fail)]):
        pass
    assert not caplog.records


def test_two_that_want_a_library_at_the_same_time_have_it_made_once(tmp_path, monkeypatch):
    asked, flock, made, got = threading.Semaphore(0), fcntl.flock, [], []

    def counted(*given):
        asked.release()
        flock(*given)

    def make(path):
        made.append(path)
        assert all(asked.acquire(timeout=WAIT_S) for _ in range(2))
        path.write_text("library")

    monkeypatch.setattr(fcntl, "flock", counted)
    library = tmp_path / "cache" / "one.so"
    wanting = [
        threading.Thread(target=lambda: got.append(cuda_build.once(library, make)))
        for _ in range(2)
    ]
    for thread in wanting:
        thread.start()
    for thread in wanting:
        thread.join(WAIT_S)
    assert got == [library] * 2
    assert len(made) == 1
    assert [path.name for path in library.parent.iterdir()] == ["one.so"]


def test_who_waited_for_one_that_failed_tries_itself_and_has_the_error(tmp_path):
    def make(path):
        raise RuntimeError(f"no room for {path.name}")

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no room for one\.so"):
            cuda_build.once(tmp_path / "one.so", make)
    assert not list(tmp_path.iterdir())


HELD = """
import sys, time
from pathlib import Path
from pdmesh.kernels import cuda_build

def make(path):
    print("making", flush=True)
    time.sleep(600)

cuda_build.once(Path(sys.argv[1]), make)
"""


def test_a_process_that_is_killed_while_it_compiles_holds_up_nobody(tmp_path):
    library = tmp_path / "one.so"
    command = [sys.executable, "-P", "-c", HELD, str(library)]
    env = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as child:
        assert child.stdout.readline() == "making\n"
        child.kill()
    assert cuda_build.once(library, lambda path: path.write_text("library")) == library
    assert library.read_text() == "library"


@pytest.fixture
def hopper(monkeypatch):
    """A model of full width as a device with every compiler computes it: what its products in
    clusters would compile, as they are called."""
    monkeypatch.setattr(dense, "_missing", lambda *_: {})
    monkeypatch.setattr(cuda_gate, "unavailable", lambda: None)
    dense.choose.cache_clear()
    model, used = shapes_only(full_width(4)), set()
    call = model.ops.fp8_gemm

    def counted(x, weight):
        m, (n, k) = x.values.shape[0], weight.values.shape
        one = dense.compilation(m, n, k)
        used.update([] if one is None else [one.name])
        return call(x, weight)

    monkeypatch.setattr(model.ops, "fp8_gemm", counted)
    monkeypatch.setattr(model, "logits", lambda _: torch.zeros(1))
    choices = [Choice(c.op, CHOSEN.get(c.op, c.backend), "", c.call) for c in model.ops.choices]
    monkeypatch.setattr(model.ops, "choices", tuple(choices))
    yield model, used
    dense.choose.cache_clear()


def noted(monkeypatch, where):
    """Names of what ``where`` compiles ahead, of each time."""
    given = []

    def note(work):
        given.append([one.name for one in work])
        return nullcontext()

    monkeypatch.setattr(where, "compiling", note)
    return given


@pytest.mark.parametrize("most", [64, 200, 1024, 4096])
def test_prompts_before_the_first_find_compiled_what_they_take(monkeypatch, hopper, most):
    model, used = hopper
    given = noted(monkeypatch, warming)
    warming.warm_up(model, model.new_latents(400, PAGE), most)
    (listed,) = given
    assert used
    assert set(listed) == used | {"gate"}
    assert len(listed) == len(used) + 1


@pytest.mark.parametrize(("most", "drafts"), [(1, 0), (64, 1), (200, 1)])
def test_captured_steps_find_compiled_what_they_take(monkeypatch, hopper, most, drafts):
    model, used = hopper
    given = noted(monkeypatch, capturing)
    on_a_gpu = SimpleNamespace(
        device=torch.device("cuda"),
        weights=model.weights,
        config=model.config,
        ops=model.ops,
        capture=lambda pool, rows, most, mtp_rows: captured(model, rows, most),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = SimpleNamespace(draft_tokens=drafts, max_batch=most)
    capturing.capture(on_a_gpu, model.new_latents(4, PAGE), config)
    (listed,) = given
    products = [name for name in listed if name.startswith("fp8_gemm")]
    assert used
    assert set(products) == used
    assert set(listed) - used == {"gate", "absorb_query", "project_values", "mla_decode_fp8"}
    assert len(listed) == len(set(listed))


def captured(model, rows, most):
    for count in rows:
        for size in graph_sizes(most):
            batch = batch_of([(2048, 2048 + count)] * size)
            model.forward(batch, model.new_latents(1, PAGE), "absorbed")


def test_a_rank_lists_halves_of_its_steps_too():
    assert capturing._step_rows({2}, 3) == [6, 4, 2]
    assert capturing._step_rows({2}, 3, halved=True) == [6, 4, 2]
    assert set(capturing._step_rows({1}, 5, halved=True)) == {5, 4, 2, 1, 3}


def test_nothing_is_listed_for_a_cpu():
    model = shapes_only(full_width(2))
    assert of_prompts(model, [16]) == []
    assert of_steps(model, [16]) == []


class Jit:
    """Of FlashInfer: modules that are asked for, and a build of them."""

    def __init__(self):
        self.asked, self.built = [], []

    def gen_batch_prefill_module(self, *given):
        self.asked.append(given)
        return SimpleNamespace(
            is_compiled=bool(self.built), build=lambda verbose: self.built.append(given)
        )


@pytest.fixture
def prompts_by_flashinfer():
    model = shapes_only(full_width(2))
    model.ops.choices = (
        *(c for c in model.ops.choices if c.op != "mla_prefill"),
        Choice("mla_prefill", "flashinfer", "", print),
    )
    return model


def test_the_module_of_prompts_is_asked_for_as_their_plan_does_and_built_later(
    monkeypatch, prompts_by_flashinfer
):
    jit = Jit()
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(jit=jit))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    (one,) = of_prompts(prompts_by_flashinfer, [16])
    bf16 = torch.bfloat16
    asked = ("fa3", bf16, bf16, bf16, torch.int32, 192, 128, 0, False, False, False)
    assert jit.asked == [asked]
    assert not jit.built
    assert not one.done()
    one.run()
    assert jit.built == [asked]


def test_a_library_of_another_version_leaves_it_to_the_first_use(
    monkeypatch, caplog, prompts_by_flashinfer
):
    def other(widths):
        raise TypeError("takes 12 arguments")

    monkeypatch.setattr(flashinfer_backend, "prefill_compilation", other)
    assert of_prompts(prompts_by_flashinfer, [16]) == []
    (line,) = told(caplog, "kernel not compiled")
    assert (line["kernel"], line["reason"]) == ("flashinfer", "takes 12 arguments")
    assert module.log.name == caplog.records[-1].name
