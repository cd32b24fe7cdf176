"""MLA decode over 656-byte FP8 latents on Hopper, queries and weights in FP8 too (CUDA C++).

The kernel (`kernels/cuda/`) is compiled by nvcc at first use and kept in a folder:
`$PDMESH_KERNEL_CACHE`, or pdmesh/kernels in the user's cache folder. It is for latents whose four
scales are the same, as `pack_latents` and a model's pages hold them, and reads the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pdmesh.kernels import cuda_build
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.quantised import LATENT_BYTES

PAGE, RANK, WIDTH = 64, 512, 576
PAIRS = 64
"""(row, head) pairs of a thread block."""
SOURCE = Path(__file__).parent / "cuda" / "mla_decode_fp8.cu"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-Xcompiler",
    "-fPIC",
)
LOG2_E = 1.4426950408889634


def compiler() -> str | None:
    """nvcc's path, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home) / "bin" / "nvcc"
    return str(beside) if beside.exists() else shutil.which("nvcc")


def library_path() -> Path:
    """Where the compiled kernel of this source belongs."""
    folder = os.environ.get("PDMESH_KERNEL_CACHE")
    base = Path(folder) if folder else Path.home() / ".cache" / "pdmesh" / "kernels"
    sources = sorted(SOURCE.parent.glob("*.cu*"))
    parts = [path.read_bytes() for path in sources] + [" ".join(FLAGS).encode()]
    mark = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    return base / f"mla_decode_fp8-{mark}.so"


def build() -> Path:
    """Compiles the kernel unless that has been done.

    Raises:
        RuntimeError: there is no nvcc, or it fails; with what it printed.
    """
    return cuda_build.once(library_path(), _compile)


def _compile(made: Path) -> None:
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError("no nvcc to compile the FP8 latent kernel with")
    command = [nvcc, *FLAGS, "-o", str(made), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed on {SOURCE.name}: {done.stderr[-2000:]}")


def compilation() -> Compilation:
    """What a first use compiles."""
    return Compilation("mla_decode_fp8", library_path().exists, build)


def declared(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """The launching function of a compiled kernel, with its types."""
    function = library.pdmesh_mla_decode_fp8
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        *(pointer,) * 5,
        ctypes.c_long,
        ctypes.c_long,
        pointer,
        whole,
        pointer,
        *(whole,) * 5,
        ctypes.c_float,
        pointer,
    ]
    function.restype = whole
    return function


@cache
def _entry() -> ctypes._NamedFuncPointer:
    return declared(ctypes.CDLL(str(build())))


@cache
def unavailable() -> str | None:
    """Why this kernel cannot be used here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the FP8 latent kernel needs compute capability 9.0"
    if not library_path().exists() and compiler() is None:
        return "no nvcc to compile the FP8 latent kernel with"
    return None


def supports(pages: Tensor) -> str | None:
    """Why a layer's pages are not this kernel's, or None."""
    if pages.dtype != torch.uint8 or pages.shape[1:] != (PAGE, LATENT_BYTES):
        return f"takes pages [n, {PAGE}, {LATENT_BYTES}] uint8, not {tuple(pages.shape)}"
    if pages.stride()[1:] != (LATENT_BYTES, 1) or pages.stride(0) % LATENT_BYTES:
        return f"takes whole rows of {LATENT_BYTES} bytes, not strides {pages.stride()}"
    return None


def split_tokens(max_length: int, sequences: int, pairs: int, processors: int = 132) -> int:
    """Tokens a split for a batch of at most `sequences`; depends on its bounds only.

    A multiple of 128; one split where there are blocks for all processors without.
    """
    blocks = sequences * -(-pairs // PAIRS)
    splits = min(max(1, processors // blocks), max(1, max_length // 256))
    return max(128, -(-max_length // splits // 128) * 128)


def mla_decode(
    query: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    rows: int,
    scale: float,
    *,
    split: int | None = None,
    max_length: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """As `kernels.mla_reference.mla_decode` for packed pages; the query is quantised inside.

    Of a latent's four scales, which are the same (`pack_latents`), the first is read.

    Args:
        split: tokens a split, a multiple of 128; results depend on it. Default: `split_tokens`.
        max_length: a bound of `lengths`; default: what the page table can hold.
        out: [m, heads, 512] bfloat16.
        workspace: float32, splits * m * heads * 513; unused with a single split.

    Raises:
        ValueError: pages that `supports` refuses, or a split that is no multiple of 128.
        RuntimeError: the launch failed, or the kernel could not be compiled.
    """
    if why := supports(pages):
        raise ValueError(f"the FP8 latent kernel {why}")
    m, heads, _ = query.shape
    n = lengths.shape[0]
    max_length = page_table.shape[1] * PAGE if max_length is None else max_length
    split = split_tokens(max_length, n, rows * heads) if split is None else split
    if split % 128:
        raise ValueError(f"a split of {split} tokens is no multiple of 128")
    splits = max(1, -(-max_length // split))
    out = query.new_empty((m, heads, RANK)) if out is None else out
    if m == 0:
        return out
    query = query.contiguous()
    partial = sums = out
    if splits > 1:
        size = splits * m * heads * (RANK + 1)
        if workspace is None:
            workspace = query.new_empty(size, dtype=torch.float32)
        partial, sums = workspace, workspace[splits * m * heads * RANK : size]
    page_rows = pages.stride(0) // LATENT_BYTES
    code = _entry()(
        query.data_ptr(),
        out.data_ptr(),
        partial.data_ptr(),
        sums.data_ptr(),
        pages.data_ptr(),
        (pages.shape[0] - 1) * page_rows + PAGE,
        page_rows,
        page_table.data_ptr(),
        page_table.stride(0),
        lengths.data_ptr(),
        n,
        rows,
        heads,
        split,
        splits,
        scale * LOG2_E,
        torch.cuda.current_stream().cuda_stream,
    )
    if code:
        raise RuntimeError(f"the FP8 latent kernel failed with CUDA error {code}")
    if splits > 1:
        from pdmesh.kernels.triton.mla_decode import combine

        combine(partial, sums, lengths, out, rows, split, splits)
    return out
