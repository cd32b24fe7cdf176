"""Compiles the CUDA C++ kernels that the benches try, without a device and its time.

    PDMESH_KERNEL_CACHE=out/kernels python -P bench/gpu_prebuild.py [--rows 256,128,64] [--jobs 2]

Needs nvcc. Where the libraries can be carried to a device's machine, set the same variable there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

from gemm_tune import cluster_candidates  # noqa: E402 - the path is set above

from pdmesh.kernels import (  # noqa: E402
    cuda_absorbed,
    cuda_build,
    cuda_gate,
    cuda_gemm,
    hopper_mla,
)
from pdmesh.kernels.gemm_config import ClusterTile  # noqa: E402


def jobs(rows: list[int], compiler: str) -> list[Callable[[], Any]]:
    """One for each library."""
    tiles = dict.fromkeys(ClusterTile(*c.config[:-1]) for c in cluster_candidates(rows))
    forms = itertools.product(("absorb_query", "project_values"), (False, True))
    texts = [
        cuda_gate.source(),
        *itertools.starmap(cuda_absorbed.source, forms),
        *map(cuda_gemm.source, tiles),
    ]
    folder = cuda_build.cache_folder()
    made: list[Callable[[], Any]] = [partial(hopper_mla.build, form) for form in (False, True)]
    return made + [partial(cuda_build.build, text, folder, compiler) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="256,128,64")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    compiler = cuda_build.nvcc()
    if compiler is None:
        parser.error("nvcc was not found; set CUDA_HOME to where it is")
    began = time.perf_counter()
    with ThreadPoolExecutor(given.jobs) as pool:
        done = [pool.submit(job) for job in jobs([int(m) for m in given.rows.split(",")], compiler)]
        paths = [one.result() for one in done]
    size = sum(path.stat().st_size for path in paths) / 2**20
    took = time.perf_counter() - began
    print(f"{len(paths)} libraries, {size:.1f} MiB, in {cuda_build.cache_folder()}: {took:.0f} s")


if __name__ == "__main__":
    main()
