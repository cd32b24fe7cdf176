"""Ranks of a bench: one that fails ends all, and is named; none of the others waits for ever."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from bench_ranks import FOR_EVER, doubles, second_fails

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("rank_processes")


def test_what_every_rank_found_comes_in_their_order(ranks):
    assert ranks.found_by(doubles, 2, 21) == [(0, 42), (1, 42)]


def test_a_rank_that_ends_with_nothing_found_ends_those_that_wait_for_it(ranks):
    with pytest.raises(SystemExit, match="rank 1 ended with 3 and without its figures"):
        ranks.found_by(second_fails, 2, 3)


def started(*programs):
    return [
        subprocess.Popen([sys.executable, "-c", one], stdout=subprocess.PIPE, text=True)
        for one in programs
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_those_that_wait_for_it(ranks, failing):
    programs = [f"import time; print(1, flush=True); time.sleep({FOR_EVER})"] * 2
    programs[failing] = "print(1, flush=True); raise SystemExit(5)"
    processes = started(*programs)
    with (
        pytest.raises(SystemExit, match=f"rank {failing} ended with 5"),
        ranks.together(processes),
    ):
        assert processes[0].stdout.read() == "1\n"
    assert all(process.returncode is not None for process in processes)


LACKS = "raise ModuleNotFoundError(\"No module named 'nvshmem'\", name='nvshmem')"


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise ValueError('no NCCL here')", 1, "ValueError: no NCCL here\n"),
        (f"command_line.install(); {LACKS}", 2, "pip install -e '.[gpu]' installs it\n"),
    ],
)
def test_a_rank_that_is_over_does_not_wait_for_others_as_its_libraries_would(work, code, said):
    program = f"""
import atexit, sys, time
sys.path[:0] = [{str(ROOT / "bench")!r}, {str(ROOT / ".pythonpath")!r}]
import command_line
from rank_processes import ends_at_once
atexit.register(time.sleep, {FOR_EVER})
with ends_at_once():
    {work}
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


def test_a_failure_of_a_rank_of_the_exchange_ends_it_with_its_error(monkeypatch, ranks):
    processes = importlib.import_module("ep_processes")
    ended = []

    def fails(*_):
        raise ValueError("no NCCL here")

    monkeypatch.setattr(processes.dist, "init_process_group", fails)
    monkeypatch.setattr(processes.os, "dup2", lambda *_: None)
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    processes.member(0, 2, "", "", [1], False, "")
    assert ended == [1]


def test_nor_does_a_rank_of_a_node_wait_for_others_when_it_fails(monkeypatch, ranks):
    rank = importlib.import_module("node_rank")
    ended = []

    def fails(*_):
        raise ValueError("no NCCL here")

    monkeypatch.setattr(rank, "Rank", fails)
    monkeypatch.setattr(rank.os, "dup2", lambda *_: None)
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    rank.run(None)
    assert ended == [1]


def test_processes_that_end_well_are_left_to(ranks):
    processes = started("print(7)", "import time; time.sleep(0.5)")
    with ranks.together(processes):
        assert processes[0].stdout.read() == "7\n"
    assert [process.returncode for process in processes] == [0, 0]


def test_a_reader_that_gives_up_leaves_no_process(ranks):
    processes = started(*[f"import time; time.sleep({FOR_EVER})"] * 2)
    with pytest.raises(ZeroDivisionError), ranks.together(processes):
        raise ZeroDivisionError
    assert [process.returncode for process in processes] == [-9, -9]
