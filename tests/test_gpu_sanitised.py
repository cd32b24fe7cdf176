"""Kernels of the exchange under compute-sanitizer, ranks of one process on the device."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOUND = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
SCRIPT = str(ROOT / "tests" / "ep_sanitised.py")


def test_these_exchanges_are_right_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "cpu"])
    runpy.run_path(SCRIPT)
    assert capsys.readouterr().out == "right\n"


@pytest.mark.gpu
@pytest.mark.skipif(FOUND is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found_in_exchanges_of_ranks_in_one_process(tool):
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    if tool == "memcheck":  # libraries ask the driver for what may not be there
        options += ["--report-api-errors", "no"]
    done = subprocess.run(
        [FOUND, *options, sys.executable, "-P", SCRIPT],
        # Each tensor is an allocation of its own then, behind whose end memcheck looks.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right" in done.stdout.splitlines()
