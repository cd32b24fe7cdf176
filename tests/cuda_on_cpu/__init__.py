"""Runs the text of kernels/cuda/*.cu on a CPU: the same source, other instructions beneath.

`machine.hpp` says how. It shows indices, swizzles, the order of barriers, that nothing is read
before it is there or overwritten before it was read, that nobody waits for ever. It cannot show
whether the processor's memory model allows it, nor how long it takes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdmesh.kernels import cuda_absorbed, cuda_build, cuda_gate, cuda_gemm, hopper_mla

HERE = Path(__file__).parent


def headers() -> Path | None:
    """CUDA's headers beside its compiler."""
    found = cuda_build.nvcc()
    places = [Path(found).resolve().parent.parent, Path("/usr/local/cuda")] if found else []
    for place in places:
        if (place / "include" / "cuda_fp8.h").exists():
            return place / "include"
    return None


def needed() -> None:
    """Skips a test where the kernels cannot be compiled for the CPU."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs g++ on x86_64")
    if headers() is None:
        pytest.skip("needs CUDA's headers")


def device(columns: Sequence[int], kind: str, more: str | None = None) -> str:
    """Instead of `cuda_build.on_hopper`; what `more` has is in device.cuh here."""
    narrow = "true" if kind == "e4m3" else "false"
    products = (
        f"""
inline void multiply(float (&d)[{count // 2}], uint64_t a, uint64_t b, int add) {{
  cpu::me->products.push_back({{d, a, b, add, &multiply_now<{count}, {narrow}>}});
}}
"""
        for count in columns
    )
    return f'#include "{HERE}/device.cuh"\n' + "".join(products)


def attention() -> str:
    """The translation unit of attention over FP8 latents."""
    folder = cuda_build.SOURCES
    parts = ["hopper.cuh", "score.cuh", "one_scale.cuh", "mla_decode_fp8.cu"]
    hopper, score, kernel, entry = ((folder / name).read_text() for name in parts)
    kernel = kernel.replace('#include "score.cuh"', score)
    signature = re.search(r'extern "C" int pdmesh_mla_decode_fp8\(.*?\) \{', entry, re.DOTALL)
    filled = re.search(r"    CUtensorMap values, scales;.*?const dim3 grid[^;]*;", entry, re.DOTALL)
    assert signature is not None
    assert filled is not None
    text = f"""#define SHARED_BASE 1024
#include "{HERE}/device.cuh"
#include "{HERE}/latent_device.cuh"
{hopper}
{kernel}
{signature[0]}
    const Encode encode = &encode_here;
{filled[0]}
    cpu::run(grid, dim3(512), 1, one::BYTES_IN_ALL, [=] {{ one::decode(values, scales, a); }});
    return 0;
}}
"""
    return re.sub(r'#include "[a-z_]+\.cuh"|#pragma once', "", text)


@functools.cache
def library(text: str) -> ctypes.CDLL:
    """The library of a translation unit that has `device`'s instructions."""
    for kind in ("uint8_t raw", "__align__(1024) char shared"):
        own = kind.removeprefix("__align__(1024) ").split()
        cast = f"{own[0]}* const {own[1]} = reinterpret_cast<{own[0]}*>(shared_memory());"
        text = text.replace(f"extern __shared__ {kind}[];", cast)
    beneath = "".join(
        (HERE / name).read_text() for name in ("device.cuh", "latent_device.cuh", "machine.hpp")
    )
    mark = hashlib.sha256((text + beneath).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"pdmesh_on_cpu_{os.getuid()}_{mark}"
    folder.mkdir(exist_ok=True)
    made = folder / "unit.so"
    if not made.exists():
        source, fresh = folder / "unit.cpp", folder / f"fresh{id(text)}.so"
        source.write_text(text)
        command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{headers()}"]
        done = subprocess.run(
            [*command, "-o", str(fresh), str(source)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[:4000]
        fresh.replace(made)
    return ctypes.CDLL(str(made))


def entry_of_attention() -> ctypes._NamedFuncPointer:
    """Instead of `hopper_mla._entry`."""
    return hopper_mla.declared(library(attention()))


@pytest.fixture
def on_cpu(monkeypatch):
    """The wrappers of the CUDA kernels compute on CPU tensors; gives the libraries they load."""
    needed()
    loaded: list[ctypes.CDLL] = []

    def load(text: str) -> ctypes.CDLL:
        loaded.append(library(text))
        return loaded[-1]

    caches = [cuda_gemm._functions, cuda_absorbed._launcher, cuda_gate._launcher]
    monkeypatch.setattr(cuda_build, "on_hopper", device)
    monkeypatch.setattr(cuda_build, "loaded", load)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for cache in caches:
        cache.cache_clear()
    yield loaded
    for of in loaded:
        of.cpu_forget()
    for cache in caches:
        cache.cache_clear()


def late(of: ctypes.CDLL, *written_ahead: torch.Tensor) -> None:
    """These have their values only when the kernel ahead has ended: NaNs until then."""
    for tensor in written_ahead:
        storage = tensor.untyped_storage()
        of.cpu_late(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
