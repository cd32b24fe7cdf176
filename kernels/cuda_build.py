"""Compiles this package's CUDA C++ for sm_90a with nvcc, when a kernel is first used.

Libraries are kept in $PDMESH_KERNEL_CACHE (default ~/.cache/pdmesh/kernels), one a source text.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from pdmesh.kernels.compiling import Compilation

SOURCES = Path(__file__).parent / "cuda"
BUILD_TIMEOUT_S = 300


def nvcc() -> str | None:
    """The compiler's path: of $CUDA_HOME, where CUDA is usually put, or of PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for place in filter(None, (home, "/usr/local/cuda")):
        path = Path(place) / "bin" / "nvcc"
        if path.exists():
            return str(path)
    return shutil.which("nvcc")


@functools.cache
def unavailable() -> str | None:
    """Why CUDA C++ cannot be used here, in a sentence; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the CUDA C++ kernels are written for capability 9.0"
    if nvcc() is None:
        return "nvcc, which compiles the CUDA C++ kernels, was not found"
    return None


def instruction(columns: int, kind: str) -> str:
    """C++ of `multiply`: one wgmma of 64 rows and so many columns, added to d if `add`.

    Args:
        kind: "e4m3" (32 values deep) or "bf16" (16 deep), sums in float32.
    """
    count = columns // 2
    depth, layout = (32, "") if kind == "e4m3" else (16, ", 0, 0")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], unsigned long long a,
                                         unsigned long long b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} "
      "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1{layout};\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(add));
}}
"""


def on_hopper(columns: Sequence[int], kind: str, more: str | None = None) -> str:
    """The instructions of sm_90a: device.cuh, the header `more`, `multiply` (see `instruction`)."""
    headers = "".join((SOURCES / name).read_text() for name in ("device.cuh", more) if name)
    return headers + "".join(instruction(count, kind) for count in columns)


def unit(
    name: str,
    columns: int | Sequence[int],
    kind: str,
    constants: Mapping[str, int],
    more: str | None = None,
) -> str:
    """A whole translation unit: constants, instructions, common parts, and the source `name`.cu.

    Args:
        columns: of one product, or of several that differ in them.
        kind: see `instruction`.
        more: a header of instructions beside device.cuh.
    """
    widths = (columns,) if isinstance(columns, int) else columns
    defines = "".join(f"#define {key} {value}\n" for key, value in constants.items())
    common, own = (SOURCES / n for n in ("common.cuh", f"{name}.cu"))
    return "\n".join([defines, on_hopper(widths, kind, more), common.read_text(), own.read_text()])


def once(library: Path, make: Callable[[Path], None]) -> Path:
    """The library, written by `make` to the path that it gets unless it is there already.

    Of all threads and processes that want it one makes it, and the others wait. It is there whole
    or not at all.
    """
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with _alone(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                made = Path(scratch) / library.name
                make(made)
                made.replace(library)
    return library


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        with contextlib.suppress(OSError):  # a file system without locks: work is done twice
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def build(text: str, folder: Path, compiler: str) -> Path:
    """Compiles the text into a library of the folder if it is not there yet.

    Raises:
        RuntimeError: the compiler's message.
    """

    def make(made: Path) -> None:
        source = made.with_name("unit.cu")
        source.write_text(text)
        command = [compiler, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
        command += ["-gencode=arch=compute_90a,code=sm_90a", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr[-2000:]}")

    return once(_library(text, folder), make)


def _library(text: str, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"


def cache_folder() -> Path:
    given = os.environ.get("PDMESH_KERNEL_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "pdmesh" / "kernels"


def made(text: str) -> Path:
    """The library of a translation unit, compiled now if need be.

    Raises:
        RuntimeError: there is no compiler, or what it says.
    """
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found")
    return build(text, cache_folder(), compiler)


def loaded(text: str) -> ctypes.CDLL:
    """`made`, loaded into this process."""
    return ctypes.CDLL(str(made(text)))


def compilation(name: str, text: str) -> Compilation:
    """What `loaded` compiles."""
    return Compilation(name, _library(text, cache_folder()).exists, partial(made, text))
