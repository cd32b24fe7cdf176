"""Whether a device can compute a model at all, before anything is put on it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pdmesh.kernels.backends import (
    VARIABLE,
    Backends,
    Shapes,
    check_named,
    choose_backends,
    named_backends,
)
from pdmesh.kernels.cuda_build import nvcc
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import Precision

HOPPER = (9, 0)
"""Compute capability from which on there are kernels for FP8."""


@dataclass(frozen=True)
class Machine:
    """What a process sees of this machine.

    Attributes:
        torch: its version.
        cuda: the version of CUDA that torch was built with; None: it was built without.
        devices: names and compute capabilities of the CUDA devices.
        triton: whether it is installed.
        compiler: whether there is a C compiler, with which triton makes its launchers.
        nvcc: whether there is a compiler for the kernels in CUDA C++.
        visible: the variable CUDA_VISIBLE_DEVICES.
        backends: the variable PDMESH_BACKENDS.
    """

    torch: str
    cuda: str | None
    devices: tuple[tuple[str, tuple[int, int]], ...]
    triton: bool
    compiler: bool
    nvcc: bool
    visible: str | None = None
    backends: str = ""


def this_machine() -> Machine:
    """Looks at the machine at hand. No memory of a device is taken."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        torch.__version__,
        torch.version.cuda,
        tuple(
            (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
            for i in range(count)
        ),
        importlib.util.find_spec("triton") is not None,
        bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")),
        nvcc() is not None,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        os.environ.get(VARIABLE, ""),
    )


def backends_for(device: torch.device, shapes: Shapes) -> Backends:
    """`choose_backends` of a model that is served.

    Raises:
        ConfigError: $PDMESH_BACKENDS names what there is not, or what cannot be used here.
    """
    with _blamed_on_variable():
        return choose_backends(device, shapes)


def check_backends(device: torch.device, shapes: Shapes) -> None:
    """Whether `backends_for` will find what $PDMESH_BACKENDS names; no memory is taken for it.

    Raises:
        ConfigError: as `backends_for`.
    """
    with _blamed_on_variable():
        check_named(device, shapes)


@contextlib.contextmanager
def _blamed_on_variable() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        named = os.environ.get(VARIABLE)
        raise ConfigError(
            f"{error}; ${VARIABLE} is {named!r}: name another backend there, or none"
        ) from error


def check_machine(machine: Machine, device: str, precision: Precision) -> None:
    """Pure.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        precision: that products are to be computed in.

    Raises:
        ConfigError: a model cannot be computed there so; one sentence with the fix.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    try:
        named_backends(machine.backends)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if machine.cuda is None:
        raise ConfigError(
            f"{device} was asked for, and torch {machine.torch} is built for the CPU alone; "
            "install a build of torch with CUDA, or compute on the cpu"
        )
    if not machine.devices:
        among = "" if machine.visible is None else f" (CUDA_VISIBLE_DEVICES={machine.visible})"
        raise ConfigError(
            f"{device} was asked for, and there is no CUDA device that torch can use{among}; see "
            "what nvidia-smi says of devices and driver, or compute on the cpu"
        )
    number = int(index or 0)
    if number >= len(machine.devices):
        names = ", ".join(f"cuda:{i}" for i in range(len(machine.devices)))
        raise ConfigError(f"there is no {device}; this machine has {names}")
    if precision != "fp8":
        return
    name, capability = machine.devices[number]
    if capability < HOPPER:
        has = ".".join(map(str, capability))
        raise ConfigError(
            f"FP8 is computed by kernels for compute capability 9.0 (Hopper) or later, and "
            f"{device} is a {name} of {has}; add --precision plain"
        )
    if not machine.triton:
        raise ConfigError(
            "FP8 on a GPU is computed by triton, which is not installed; install pdmesh[gpu], or "
            "add --precision plain"
        )
    if not machine.compiler:
        raise ConfigError(
            "triton starts its kernels by way of a C compiler, and there is none; install gcc or "
            "clang, or name one in CC"
        )


def remarks(machine: Machine, device: str, precision: Precision) -> list[str]:
    """What is missing and only costs time, one sentence each."""
    if not device.startswith("cuda") or precision != "fp8":
        return []
    missing = {
        "nvcc": None if machine.nvcc else "nvcc, with which kernels in CUDA C++ are compiled",
        "flash_mla": "FlashMLA (sgl-flash-mla)",
        "flashinfer": "FlashInfer (flashinfer-python)",
        "deep_gemm": "DeepGEMM (sgl-deep-gemm)",
    }
    absent = [
        words
        for package, words in missing.items()
        if words and (package == "nvcc" or importlib.util.find_spec(package) is None)
    ]
    if not absent:
        return []
    return [
        f"not here: {'; '.join(absent)}: slower kernels take their place (pdmesh doctor says which)"
    ]
