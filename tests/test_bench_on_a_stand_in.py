"""The GPU benchmarks run to their end on a device that is none: names, shapes, files, words.

No figure of such a run means anything (`stand_in_device.py`).
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("there is a device to run them on", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
CLOCKS = '#!/bin/sh\nwhile :; do echo "1980, 3201, 600.1, 60"; sleep 0.05; done\n'


@pytest.fixture
def bench(tmp_path):
    """Runs a case; its output. What it may not say: that a candidate failed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(CLOCKS)
    (tools / "nvidia-smi").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-P", str(ROOT / "tests" / "stand_in_device.py"), *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if "Error" in line]
        assert not lines, lines
        assert "failed:" not in done.stdout, done.stdout[-3000:]
        return done.stdout

    return run


def test_an_engine_with_a_profile(bench, tmp_path):
    sizes = ("--layers", 3, "--experts", 8, "--batch", 2, "--keys", 70, "--prompt", 70)
    said = bench("gpu_engine", *sizes, "--profile")
    assert said.count("2 x a_kernel") == 2
    rows = json.loads((tmp_path / "gpu_engine.json").read_text())
    assert [row["what"] for row in rows] == ["decode", "decode worker's step", "prefill"]


def test_tiles_are_searched(bench, tmp_path):
    said = bench("gpu_gemm", "--tune", "--only", "cuda", "--rows", "130,2")
    tried, right = re.search(r"(\d+) of (\d+) right; 0 problems", said).groups()
    assert tried == right
    assert len((tmp_path / "tune.csv").read_text().splitlines()) == int(tried) > 10


@pytest.mark.full
def test_the_products_of_heads(bench, tmp_path):
    bench("gpu_gemm", "--only", "heads", "--rows", 64)
    with (tmp_path / "gemm.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 16


def test_decode_attention_by_every_backend(bench, tmp_path):
    said = bench("gpu_mla", "--out", tmp_path)
    assert said.count("CUDA-656") == 2
    with (tmp_path / "gpu_mla.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["us"]) > 0 for row in rows] == [True] * 10
    assert all(float(row["error"]) < 1e-2 for row in rows)


def test_prompt_attention_in_both_forms_and_in_chunks(bench):
    said = bench("gpu_mla_prefill")
    assert "256 tokens: MHA FlashInfer" in said
    assert "256 tokens in chunks of 64" in said


@pytest.mark.full
def test_a_layer_and_what_the_whole_model_makes_of_it(bench, tmp_path):
    found = tmp_path / "layer.json"
    bench(
        *("gpu_layer", "--warm", "--rest", "--ranks", "ep128", "tp8"),
        *("--latents", "plain", "fp8", "--json", found),
    )
    keys = {"ep128", "ep128_fp8", "tp8", "tp8_fp8", "rest"}
    rows = json.loads(found.read_text())
    assert keys <= set(rows)
    assert "failed" not in rows
    assert set(rows["tp8"]["layer"]["unlike"].values()) == {0.0}
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "project.py"), "--layer", str(found)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "EP128, FP8 latents, one after another" in done.stdout


@pytest.mark.full
def test_the_roofline_sweep(bench, tmp_path):
    bench("roofline", "--warm", "--csv", tmp_path / "roofline.csv")
    with (tmp_path / "roofline.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["family"] for row in rows} == {"mla", "dense", "grouped"}
    assert all(float(row["us"]) > 0 for row in rows)


@pytest.mark.full
def test_a_prompts_layer_in_both_forms(bench, tmp_path):
    bench("gpu_prefill", "--prompts", 64, "--json", tmp_path / "prefill.json")
    assert json.loads((tmp_path / "prefill.json").read_text())["64"]["form_ratio"] > 0


@pytest.mark.full
def test_the_modes_of_overlap(bench, tmp_path):
    words = ("--warm", "--batches", 2, 4, "--layers", 2, "--json", tmp_path / "overlap.json")
    bench("gpu_overlap", *words)
    assert set(json.loads((tmp_path / "overlap.json").read_text())["us"]) == {"2", "4"}


@pytest.mark.full
def test_small_kernels_with_every_launch_that_is_tried(bench, tmp_path):
    """Triton's own, in its interpreter."""
    bench("gpu_small", "--tune")
    rows = json.loads((tmp_path / "gpu_small.json").read_text())
    assert len(rows) == 19
    assert all(row["error"] <= row["limit"] for row in rows)
