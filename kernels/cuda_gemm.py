"""The block-scaled FP8 product in CUDA C++ for few rows: clusters share a tile's sum and weights.

kernels/cuda/fp8_gemm.cu is compiled by nvcc for a tile when that tile is first used, and kept in
$PDMESH_KERNEL_CACHE (default ~/.cache/pdmesh/kernels). Compile before a CUDA graph is recorded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.kernels.fp8 import BLOCK
from pdmesh.kernels.gemm_config import ClusterTile, cluster_tile
from pdmesh.kernels.quantised import BlockWeight, Rows

SOURCE = Path(__file__).parent / "cuda" / "fp8_gemm.cu"
MOST_STEPS = 256
BUILD_TIMEOUT_S = 300


def nvcc() -> str | None:
    """The compiler's path: of $CUDA_HOME, of PATH, or where CUDA is usually put."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for place in filter(None, (home, "/usr/local/cuda")):
        path = Path(place) / "bin" / "nvcc"
        if path.exists():
            return str(path)
    return shutil.which("nvcc")


@functools.cache
def unavailable() -> str | None:
    """Why it cannot be used here, in a sentence; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the CUDA product is written for capability 9.0"
    if nvcc() is None:
        return "nvcc, which compiles the CUDA product, was not found"
    return None


def unsupported(n: int, k: int) -> str | None:
    """Why it does not take a weight [n, k]; None if it does."""
    if n % 8 or k % 16 or k > MOST_STEPS * BLOCK:
        return f"it takes n in 8s and k in 16s up to {MOST_STEPS * BLOCK}, not {n} x {k}"
    return None


def instruction(columns: int) -> str:
    """C++ of `multiply`: a product of 64 x 32 and 32 x columns e4m3, added to d if `add`."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], unsigned long long a,
                                         unsigned long long b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 "
      "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1;\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(add));
}}
"""


def source(tile: ClusterTile) -> str:
    """The whole translation unit."""
    sizes = {"BLOCK_N": tile.block_n, "SPLIT": tile.split, "PAIR": tile.pair}
    sizes["STAGES"] = tile.stages
    defines = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    return defines + instruction(tile.block_n) + SOURCE.read_text()


def build(tile: ClusterTile, folder: Path, compiler: str) -> Path:
    """Compiles the tile's library into the folder if it is not there yet.

    Raises:
        RuntimeError: the compiler's message.
    """
    text = source(tile)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    library = folder / f"fp8_gemm_{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unit, made = Path(scratch) / "fp8_gemm.cu", Path(scratch) / "made.so"
        unit.write_text(text)
        command = [compiler, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
        command += ["-gencode=arch=compute_90a,code=sm_90a", "-o", str(made), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr[-2000:]}")
        made.replace(library)  # whole or not at all, though several processes build it
    return library


def cache_folder() -> Path:
    given = os.environ.get("PDMESH_KERNEL_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "pdmesh" / "kernels"


class _Functions(NamedTuple):
    launch: Callable[..., int]
    clusters: Callable[[], int]


@functools.cache
def _functions(block_n: int, split: int, pair: int, stages: int) -> _Functions:
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found")
    path = build(ClusterTile(block_n, split, pair, stages), cache_folder(), compiler)
    library = ctypes.CDLL(str(path))
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.fp8_gemm_launch.argtypes = [
        *(pointer, pointer, wide, pointer, pointer, number, pointer, wide),
        *(number, number, number, number, pointer),
    ]
    return _Functions(library.fp8_gemm_launch, library.fp8_gemm_clusters)


def clusters(tile: ClusterTile) -> int:
    """How many clusters of the tile a device runs at a time."""
    return _functions(*tile[:4]).clusters()


def fp8_gemm(
    x: Rows, weight: BlockWeight, *, out: Tensor | None = None, tile: ClusterTile | None = None
) -> Tensor:
    """`quantised.fp8_gemm`: [m, n] bfloat16, in `out` if given, whose rows are contiguous.

    Args:
        tile: by default `gemm_config.cluster_tile` of the shape.

    Raises:
        ValueError: the scales of x do not lie as `quantised.new_scales` lays them.
        RuntimeError: it does not compile or cannot be launched.
    """
    (m, k), n = x.values.shape, weight.values.shape[0]
    if out is None:
        out = x.values.new_empty((m, n), dtype=torch.bfloat16)
    if m == 0:
        return out
    tile = tile or cluster_tile(m, n, k)
    step = x.scales.stride(1)
    if (m > 1 and x.scales.stride(0) != 1) or step % 4:
        raise ValueError(f"the scales of x have strides {x.scales.stride()}, not column by column")
    code = _functions(*tile[:4]).launch(
        x.values.data_ptr(),
        x.scales.data_ptr(),
        step,
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        weight.scales.stride(0),
        out.data_ptr(),
        out.stride(0),
        m,
        n,
        k,
        int(tile.dependent),
        torch.cuda.current_stream().cuda_stream,
    )
    if code:
        raise RuntimeError(f"the product [{m}, {k}] x [{n}, {k}] by {tile} failed with code {code}")
    return out
