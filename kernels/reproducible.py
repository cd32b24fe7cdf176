"""A math library that gives a row the same bits whatever stands around it.

The rows of a product are padded to a multiple of four (see ``pdmesh.kernels.linear``). Intel's MKL,
which torch uses on a CPU, then still picks another inner loop for few rows than for many on Intel
processors, unless it is told to be strictly reproducible ("strict conditional numerical
reproducibility", MKL developer guide). It reads that wish from the environment at its first call.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "MKL_CBWR"
_CPUINFO = Path("/proc/cpuinfo")


def strict_mode(cpuinfo: str) -> str | None:
    """The value of MKL_CBWR for the processor that ``cpuinfo`` (Linux) describes; None: none.

    Processors of other makers take one inner loop for all sizes already.
    """
    lines = cpuinfo.splitlines()
    if not any(line.startswith("vendor_id") and "GenuineIntel" in line for line in lines):
        return None
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if "avx512f" in flags and "avx512dq" in flags:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else None


def ask_for_strict_mode(environment: MutableMapping[str, str], cpuinfo: Path = _CPUINFO) -> None:
    """Sets MKL_CBWR in ``environment`` where the processor needs it; a value that is there stays.

    Has no effect on a process that has multiplied matrices already.
    """
    if VARIABLE in environment:
        return
    try:
        mode = strict_mode(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return
    if mode is not None:
        environment[VARIABLE] = mode
