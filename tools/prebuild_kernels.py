"""Compiles the CUDA C++ kernels for Hopper where there is no GPU, for hosts that should not wait.

    python tools/prebuild_kernels.py --out kernels.tar.xz [--tune] [--jobs 2]
    eval "$(python3 tools/prebuild_kernels.py --unpack kernels.tar.xz --target /tmp/kernels)"

Needs nvcc 13 here ($CUDA_HOME, /usr/local/cuda or PATH), no GPU. A library carries its sources'
mark in its name, so one that a changed source has left behind is not used over there but compiled
anew. Without `--tune` these are the tiles that `kernels/gemm_config.py` chooses for DeepSeek-V3's
products, with it also those that `bench/gpu_gemm.py --tune` and the other benches try. `--unpack`
needs no compiler and prints the line that sets PDMESH_KERNEL_CACHE.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

if TYPE_CHECKING:
    from pdmesh.kernels.gemm_config import ClusterTile

PROJECTIONS = (
    *((2112, 7168), (1536, 7168), (576, 7168), (4096, 7168), (36864, 7168)),
    *((7168, 2048), (7168, 18432), (32768, 512)),
    *((192 * heads, 1536) for heads in (16, 32, 64, 128)),
    *((7168, 128 * heads) for heads in (16, 32, 64, 128)),
)
"""(n, k) of DeepSeek-V3's products, all heads and those of a rank that shares them."""
ROWS = (1, 16, 64, 128, 256, 4096)
MIB = 1 << 20


def tiles(tune: bool) -> list[ClusterTile]:
    """Of the product in clusters: what these shapes take, and what a search tries."""
    from pdmesh.kernels.gemm_config import ClusterTile, cluster_tile

    found = {cluster_tile(m, n, k) for m in ROWS for n, k in PROJECTIONS}
    if tune:
        from gemm_tune import cluster_candidates

        found |= {ClusterTile(*c.config[:-1]) for c in cluster_candidates([256, 128, 64, 16])}
    return sorted(found)


def texts(tune: bool) -> dict[str, str]:
    """Translation units by name."""
    from pdmesh.kernels import cuda_absorbed, cuda_gate, cuda_gemm, hopper_mla

    found = {"mla_decode_fp8": f'#include "{hopper_mla.SOURCE}"'}
    found |= {f"fp8_gemm {tuple(tile)}": cuda_gemm.source(tile) for tile in tiles(tune)}
    forms = cuda_gate.FORMS if tune else cuda_gate.FORMS[:1]
    found |= {f"gate {tuple(form)}": cuda_gate.source(form) for form in forms}
    absorbed = ("absorb_query", "project_values")
    return found | {name: cuda_absorbed.source(name) for name in absorbed}


def builds(folder: Path, tune: bool) -> dict[str, Callable[[], Path]]:
    """By name, what compiles a kernel into the folder unless it is there.

    Raises:
        RuntimeError: there is no nvcc.
    """
    from pdmesh.kernels import cuda_build, hopper_mla

    compiler = cuda_build.nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found: set CUDA_HOME")
    found: dict[str, Callable[[], Path]] = {
        name: partial(cuda_build.build, text, folder, compiler)
        for name, text in texts(tune).items()
    }
    found["mla_decode_fp8"] = hopper_mla.build  # has a name of its own, and flags
    return found


def build(work: dict[str, Callable[[], Path]], jobs: int) -> list[str]:
    """Compiles, a line each; the names of those that failed."""
    failed = []

    def run(name: str) -> tuple[str, float, str]:
        began = time.monotonic()
        try:
            work[name]()
        except (RuntimeError, OSError) as error:
            return name, time.monotonic() - began, str(error)
        return name, time.monotonic() - began, ""

    with ThreadPoolExecutor(jobs) as pool:
        for name, took, problem in pool.map(run, work):
            print(f"{took:7.1f} s  {name}  {problem}", flush=True)
            if problem:
                failed.append(name)
    return failed


def pack(libraries: Iterable[Path], archive: Path) -> None:
    """One compressed file of the libraries, which have the CUDA runtime in common."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(libraries):
            tar.add(path, path.name)


def unpack(archive: Path, target: Path) -> None:
    """Unpacks and prints the line that makes the kernels found."""
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(target, filter="data")
    print(f"export PDMESH_KERNEL_CACHE={shlex.quote(str(target.resolve()))}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the archive to write")
    parser.add_argument("--tune", action="store_true", help="also the tiles that a search tries")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="names of the kernels, and end")
    parser.add_argument("--unpack", type=Path, metavar="ARCHIVE")
    parser.add_argument("--target", type=Path, help="where to unpack to")
    args = parser.parse_args(given)
    if (args.unpack is None) != (args.target is None):
        parser.error("--unpack and --target go together")
    if args.unpack is None and args.out is None and not args.list:
        parser.error("name an archive to write with --out, or one to --unpack")
    try:
        if args.unpack is not None:
            unpack(args.unpack, args.target)
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(os.environ.get("PDMESH_KERNEL_CACHE") or scratch)
            os.environ["PDMESH_KERNEL_CACHE"] = str(folder)
            work = builds(folder, args.tune)
            if args.list:
                print("\n".join(work))
                return 0
            failed = build(work, args.jobs)
            made = [work[name]() for name in work if name not in failed]
            pack(made, args.out)
            whole = sum(path.stat().st_size for path in made)
    except (OSError, RuntimeError) as error:
        print(f"prebuild_kernels: {error}", file=sys.stderr)
        return 2
    size = args.out.stat().st_size
    print(f"{args.out}: {len(made)} kernels, {size / MIB:.1f} MiB of {whole / MIB:.1f} unpacked")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
