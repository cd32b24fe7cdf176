"""The table of GPU jobs: what its commands name is there, and needs what it says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from child_path import python_path

from pdmesh.tools import gpu_suite
from pdmesh.tools.gpu_jobs import JOBS, MESH

ROOT = Path(__file__).resolve().parent.parent


def test_every_job_names_what_is_there_and_options_that_its_script_has():
    """A wrong word in the table would be noticed on a device only, minutes after it began."""
    assert len({j.name for j in JOBS}) == len(JOBS)
    for one in JOBS:
        assert one.command[0] == "{python}"
        files = [word for word in one.command if word.endswith(".py")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
        text = "".join((ROOT / file).read_text() for file in files)
        if one.kind == "check":
            assert "mark.gpu" in text
            continue
        for option in (word for word in one.command if word.startswith("--")):
            assert f'"{option}"' in text, (one.name, option)


TELLS = """
import argparse, runpy, sys
script, *words = sys.argv[1:]
def parse(self, args=None, namespace=None, original=argparse.ArgumentParser.parse_args):
    print(original(self, args, namespace))
    raise SystemExit(77)
argparse.ArgumentParser.parse_args = parse
sys.argv[:] = [script, *words]
runpy.run_path(script, run_name="__main__")
"""
"""Ends where a script has read its words, with the path that it has when it is run by itself."""

WITH_OPTIONS = [j for j in JOBS if j.kind == "timing" and len(j.command) > 3]


def test_every_line_of_the_table_is_a_command_that_a_shell_takes():
    for line, job in zip(gpu_suite.table(JOBS).splitlines(), JOBS, strict=True):
        words = shlex.split(line)
        assert tuple(words[-len(job.command) :]) == job.command


IMPORTS = """
import importlib.util, sys
import pytest
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
for number, path in enumerate(sys.argv[2:]):
    spec = importlib.util.spec_from_file_location(f"file_{number}", path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except pytest.skip.Exception:
        pass
    except ImportError as error:
        print(path, error)
"""


def test_checks_that_name_no_package_of_a_mesh_import_none():
    paths = dict.fromkeys(
        str(ROOT / word)
        for job in JOBS
        if job.kind == "check" and not set(MESH) & set(job.needs)
        for word in job.command
        if word.startswith("tests/")
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS, ",".join(MESH), *paths],
        env={**os.environ, "PYTHONPATH": python_path("tests")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(paths) > 5
    assert done.stdout == ""


@pytest.mark.full
@pytest.mark.parametrize("one", WITH_OPTIONS, ids=lambda one: one.name)
def test_the_script_of_a_timing_takes_the_words_of_the_table(one):
    words = one.command[3:]
    for name, value in {"{out}": "/tmp/o", "{all}": "/tmp/a", "{left}": "300"}.items():
        words = tuple(word.replace(name, value) for word in words)
    done = subprocess.run(
        [sys.executable, "-P", "-c", TELLS, str(ROOT / one.command[2]), *words],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr[-1000:]


def test_a_timing_finds_its_modules_without_being_told_where():
    """`python -P bench/x.py` has neither its own folder nor the project's on the path."""
    beside = {path.stem for path in (ROOT / "bench").glob("*.py")}
    for one in JOBS:
        if one.kind == "check":
            continue
        text = (ROOT / one.command[2]).read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        needed = {".pythonpath"} if "pdmesh" in imported else set()
        needed |= {"bench"} if imported & beside else set()
        for folder in needed:
            assert f'ROOT / "{folder}"' in text, (one.name, folder)


def test_marked_tests_are_all_in_a_job():
    named = " ".join(word for one in JOBS for word in one.command)
    for path in (ROOT / "tests").glob("test_*.py"):
        if path.name != Path(__file__).name and "mark.gpu" in path.read_text():
            assert f"tests/{path.name}" in named
