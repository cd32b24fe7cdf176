"""Which processors need a strictly reproducible MKL, and who decides."""

import os
import subprocess
import sys

import pytest
from child_path import python_path

from pdmesh.kernels.reproducible import ask_for_strict_mode, strict_mode

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 avx avx2 {more}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "mode"),
    [
        (INTEL.format(more="avx512f avx512dq avx512vl amx_bf16"), "AVX512,STRICT"),
        (INTEL.format(more="avx512f"), "AVX2,STRICT"),
        (INTEL.format(more="fma"), "AVX2,STRICT"),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu sse2\n", None),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512f avx512dq\n", None),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n", None),
        ("", None),
    ],
)
def test_an_intel_processor_gets_the_strictest_mode_that_it_has(cpuinfo, mode, tmp_path):
    assert strict_mode(cpuinfo) == mode
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    environment: dict[str, str] = {}
    ask_for_strict_mode(environment, tmp_path / "cpuinfo")
    assert environment == ({} if mode is None else {"MKL_CBWR": mode})


def test_what_the_user_has_set_stays_and_a_system_without_cpuinfo_gets_nothing(tmp_path):
    (tmp_path / "cpuinfo").write_text(INTEL.format(more=""))
    environment = {"MKL_CBWR": "AUTO"}
    ask_for_strict_mode(environment, tmp_path / "cpuinfo")
    assert environment == {"MKL_CBWR": "AUTO"}
    ask_for_strict_mode(empty := {}, tmp_path / "absent")
    assert empty == {}


def test_every_process_that_computes_asks_before_its_first_product():
    code = "import os, pdmesh.model.deepseek; print(os.environ.get('MKL_CBWR'))"
    clean = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment = clean | {"PYTHONPATH": python_path()}
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    expected: dict[str, str] = {}
    ask_for_strict_mode(expected)
    assert told.stdout.strip() == str(expected.get("MKL_CBWR"))
