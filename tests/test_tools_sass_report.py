"""What a compiler made of a kernel, read from its messages and instructions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.tools import sass_report

ROOT = Path(__file__).resolve().parent.parent
LOG = """ptxas info    : (C7512) Potential Performance Loss: wgmma instructions are serialized
ptxas info    : Compiling entry function '_ZN3abc3one6decodeE11CUtensorMap' for 'sm_90a'
ptxas info    : Function properties for _ZN3abc3one6decodeE11CUtensorMap
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers
"""
PRODUCTS = (
    "QGMMA.64x72x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24",
    "HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR12], RZ, !UPT",
)


def sass(*lines):
    """As nvdisasm prints: labels end in a colon."""
    numbered = [
        line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    ]
    return "\n".join(['        .section\t.text.kernel,"ax",@progbits', *numbered])


def test_a_product_costs_half_a_cycle_a_column_and_reads_what_is_not_in_registers():
    of = sass_report.cost(PRODUCTS)
    assert (of.products, of.tensor) == (2, 36 + 32)
    assert of.shared == (64 + 72) / 4 + 64 / 4


def test_a_warpgroup_s_accesses_to_shared_memory_are_counted_by_their_width():
    texts = ["LDS R1, [R2]", "STS.128 [R2], R4", "LDSM.16.MT88.4 R8, [R16+0x3000]"]
    assert sass_report.cost(texts).shared == 4 * (1 + 4 + 4)


def test_pipes_are_charged_by_their_rates():
    of = sass_report.cost(["MUFU.EX2 R1, R2", "FFMA R1, R2, R3, R4", "ISETP.NE R1", "STL [R1], R2"])
    assert (of.instructions, of.mufu, of.fma, of.alu, of.spills) == (4, 8, 1, 2, 1)


def test_a_loop_is_counted_without_the_one_inside_of_it():
    text = sass(
        ".L_x_1:",
        PRODUCTS[0],
        ".L_x_2:",
        PRODUCTS[1],
        "@P0 BRA `(.L_x_2)",
        "FADD R1, R2, R3",
        "@!P1 BRA `(.L_x_1)",
        "EXIT",
    )
    (outer, inner) = sass_report.loops(text)
    assert (outer.depth, outer.cost.products, outer.cost.tensor) == (0, 1, 36)
    assert (inner.depth, inner.cost.instructions, inner.cost.tensor) == (1, 2, 32)


def test_a_wait_that_is_tried_again_behind_the_end_is_no_loop():
    text = sass(".L_x_1:", PRODUCTS[0], "EXIT", ".L_x_2:", "@P0 BRA `(.L_x_1)")
    assert sass_report.loops(text) == []


@pytest.fixture
def run(tmp_path):
    """Runs the tool with compilers that say what is given."""

    def run(log):
        (tmp_path / "said").write_text(log)
        loop = (".L_x_1:", PRODUCTS[0], "@P0 BRA `(.L_x_1)", "EXIT")
        (tmp_path / "sass").write_text(sass(*loop))
        nvcc, nvdisasm = tmp_path / "bin" / "nvcc", tmp_path / "nvdisasm"
        nvcc.parent.mkdir()
        nvcc.write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\n")
        nvdisasm.write_text(f"#!/bin/sh\ncat {tmp_path}/sass\n")
        for path in (nvcc, nvdisasm):
            path.chmod(0o755)
        environment = {**os.environ, "CUDA_HOME": str(tmp_path), "NVDISASM": str(nvdisasm)}
        command = [sys.executable, "-P", str(ROOT / "tools" / "sass_report.py")]
        return subprocess.run(
            [*command, "--only", "mla"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_products_that_wait_for_each_other_are_named_and_end_with_1(run):
    done = run(LOG)
    assert done.returncode == 1, done.stderr
    assert "WARNING (C7512) Potential Performance Loss" in done.stdout
    assert "one::decode: 168 registers, 12 bytes spilled" in done.stdout
    assert done.stdout.endswith("1 kernels, 1 with something wrong mla_decode_fp8\n")


def test_a_kernel_without_a_warning_is_shown_and_ends_with_0(run):
    done = run("\n".join(LOG.splitlines()[1:]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("local\n")[1].split()[:4] == ["kernel", "2", "1", "36"]
