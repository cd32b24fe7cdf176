"""Every benchmark says what it measures and what it takes, and what the machine lacks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_path import python_path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(
    path.name
    for path in (ROOT / "bench").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text()
)
HELPS = """
import argparse, contextlib, io, json, runpy, sys
from pathlib import Path

names, path, told = sys.argv[1:], list(sys.path), {}

class Asked(Exception):
    pass

def parse(parser, *_):
    silent = [a.option_strings or [a.dest] for a in parser._actions if not a.help]
    raise Asked(parser.format_help(), silent)

argparse.ArgumentParser.parse_args = parse
for name in names:
    sys.path[:], sys.argv = path, [name]
    try:
        runpy.run_path(str(Path("bench") / name), run_name="__main__")
    except Asked as asked:
        told[name] = asked.args
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def command_line():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("command_line")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def child(*arguments):
    env = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_every_benchmark_says_what_it_measures_what_it_takes_and_where_results_go():
    done = child("-c", HELPS, *PROGRAMS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert sorted(told) == PROGRAMS
    for name, (text, silent) in told.items():
        first = (ROOT / "bench" / name).read_text().removeprefix('"""').splitlines()[0]
        assert first.removesuffix('"""') in text, name
        assert "Results go to standard output" in " ".join(text.split()), name
        assert silent == [], f"{name}: no word about {silent}"


def test_a_default_is_shown_once(command_line):
    parser = command_line.parser("What.")
    parser.add_argument("--a", default=3, help="things (3)")
    parser.add_argument("--b", default=[1, 2], help="more things")
    parser.add_argument("--c", default="50%")
    parser.add_argument("--d", default=4, help="default: what fits")
    parser.add_argument("--e", action="store_true", help="a flag")
    shown = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert {"--a A things (default: 3)", "--b B more things (default: 1 2)"} <= set(shown)
    assert {"--c C default: 50%", "--d D default: what fits", "--e a flag"} <= set(shown)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ModuleNotFoundError("no", name="triton.language"),
            "this benchmark needs triton, which is not installed; make setup-dev installs it",
        ),
        (
            ModuleNotFoundError("no", name="deep_gemm"),
            "this benchmark needs deep_gemm, which is not installed; pip install -e '.[gpu]'",
        ),
        (
            ModuleNotFoundError("no", name="msgspec"),
            "this benchmark needs msgspec, which is not installed; make setup installs what",
        ),
        (
            FileNotFoundError(2, "No such file", "nvidia-smi"),
            "this benchmark needs a CUDA device, and torch finds none",
        ),
        (
            AssertionError("Torch not compiled with CUDA enabled"),
            "this benchmark needs a CUDA device, and torch finds none",
        ),
    ],
)
def test_what_a_machine_lacks_is_a_sentence_with_the_fix(command_line, error, sentence):
    assert command_line.lacking(error).startswith(sentence)


def test_other_errors_are_shown_as_they_are(command_line):
    assert command_line.lacking(AssertionError("rows differ")) == ""
    assert command_line.lacking(ValueError("No CUDA GPUs")) == ""


@pytest.mark.parametrize("name", ["gpu_overlap.py", "gpu_transfer.py"])
def test_a_benchmark_without_what_it_needs_ends_with_that_sentence_alone(name):
    program = f"""
import runpy, sys
sys.modules["triton"] = sys.modules["pytest"] = None
sys.modules["__main__"].__file__ = sys.argv[0] = "bench/{name}"
runpy.run_path("bench/{name}", run_name="__main__")
"""
    done = child("-c", program)
    assert done.returncode == 2
    assert done.stderr.startswith("this benchmark needs ")
    assert len(done.stderr.splitlines()) == 1
