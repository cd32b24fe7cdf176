"""CUDA C++ kernels compiled ahead are found under the names that a first use looks for."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.kernels import cuda_absorbed, cuda_gemm, hopper_mla
from pdmesh.kernels.gemm_config import CLUSTERS
from pdmesh.tools import prebuild_kernels

ROOT = Path(__file__).resolve().parent.parent
WRITES = 'while [ "$1" != -o ]; do shift; done; echo compiled >"$2"'


@pytest.fixture
def run(tmp_path):
    """Runs the tool with a compiler whose body is given."""

    def run(*words, body=WRITES):
        compiler = tmp_path / "cuda" / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True, exist_ok=True)
        compiler.write_text(f"#!/bin/sh\n{body}\n")
        compiler.chmod(0o755)
        environment = {**os.environ, "CUDA_HOME": str(tmp_path / "cuda")}
        environment.pop("PDMESH_KERNEL_CACHE", None)
        return subprocess.run(
            [sys.executable, "-P", str(ROOT / "tools" / "prebuild_kernels.py"), *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def library(text):
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"


def test_what_is_unpacked_over_there_is_what_a_first_use_looks_for(run, tmp_path):
    done = run("--out", tmp_path / "kernels.tar.xz")
    assert done.returncode == 0, done.stderr
    done = run("--unpack", tmp_path / "kernels.tar.xz", "--target", tmp_path / "there")
    assert done.stdout.strip() == f"export PDMESH_KERNEL_CACHE={tmp_path / 'there'}"
    names = {path.name for path in (tmp_path / "there").iterdir()}
    chosen = {tile for by_rows in CLUSTERS.values() for tile in by_rows.values()}
    wanted = {library(cuda_gemm.source(tile)) for tile in chosen}
    wanted |= {library(cuda_absorbed.source(n)) for n in ("absorb_query", "project_values")}
    assert wanted | {hopper_mla.library_path().name} <= names


def test_a_search_of_tiles_finds_its_own_compiled():
    more = set(prebuild_kernels.tiles(tune=True))
    assert set(prebuild_kernels.tiles(tune=False)) < more


def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_kept(run, tmp_path):
    fails = f"grep -q 'define BLOCK_N 72' \"$9\" && {{ echo no room >&2; exit 1; }}; {WRITES}"
    done = run("--out", tmp_path / "kernels.tar.xz", body=fails)
    assert done.returncode == 1
    bad = [line for line in done.stdout.splitlines() if "no room" in line]
    assert bad
    assert all("fp8_gemm (72," in line for line in bad)
    assert (tmp_path / "kernels.tar.xz").stat().st_size > 0
