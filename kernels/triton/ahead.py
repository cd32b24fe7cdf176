"""Compiles the kernels of this package for sm_90 on a machine that needs no device.

    python -P -m pdmesh.kernels.triton.ahead      (without TRITON_INTERPRET)

prints a line of JSON for each entry of the catalogue: name, bytes of shared memory, seconds; or
`error` where it does not compile. Triton keeps what it compiled in its cache. With the argument
`puts` it compiles those that are linked with NVSHMEM's library for devices, which it looks for in
$NVSHMEM_LIB_DIR and where the wheel puts it; that takes some ten seconds a kernel. Of these it is
an error too if the library's state, which its host side looks up by name, is not in the module, or
if a call leads nowhere.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

from pdmesh.kernels.triton.catalogue import ENTRIES
from pdmesh.kernels.triton.catalogue_exchange import PUTS
from pdmesh.kernels.triton.entry import Entry

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a program can have on sm_90 (CUDA C++ programming guide, table of
compute capabilities)."""
CAPABILITY = 90
STATE = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d")
"""What `nvshmemx_cumodule_init` of NVSHMEM 3.4 looks up in a module by name."""


def compiled(entry: Entry) -> dict[str, Any]:
    """Compiles for sm_90: name, shared (bytes), seconds.

    Raises:
        ValueError: `types` and `constants` are not the kernel's arguments.
    """
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"{__package__}.{entry.module}"), entry.kernel)
    options = dict(entry.options)
    if hasattr(kernel, "extern_libs"):
        kernel, options["extern_libs"] = kernel.jit_func, kernel.extern_libs
    types = entry.types.split()
    names = list(kernel.arg_names)
    plain = [name for name in names if name not in entry.constants]
    if len(plain) != len(types) or set(entry.constants) - set(names):
        raise ValueError(f"{entry.name}: {len(types)} types and constants for {names}")
    given = dict(zip(plain, types, strict=True))
    signature = {name: given.get(name, "constexpr").rstrip("!") for name in names}
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in entry.constants.items()},
        attrs={(i,): divisible for i, n in enumerate(names) if given.get(n, "").endswith("!")},
    )
    begin = time.perf_counter()
    done = compile_kernel(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    took = time.perf_counter() - begin
    if "extern_libs" in options:
        _linked(entry.name, done.asm["ptx"])
    return {"name": entry.name, "shared": done.metadata.shared, "seconds": round(took, 2)}


def _linked(name: str, ptx: str) -> None:
    """Whether NVSHMEM's library is in a module, whole.

    Raises:
        ValueError: it is not.
    """
    lines = ptx.splitlines()
    for state in STATE:
        if not any(line.startswith(".visible") and f" {state}[" in line for line in lines):
            raise ValueError(f"{name}: no {state} that the library could find")
    lost = [line for line in lines if line.startswith(".extern .func") and "nvshmem" in line]
    if lost:
        raise ValueError(f"{name}: not linked in: {lost[0]}")


def main() -> None:
    """Compiles every entry; a line of JSON for each, with `error` where it did not compile."""
    puts = sys.argv[1:] == ["puts"]
    if puts:
        from torch.utils import _triton

        # torch has NVSHMEM's calls only where it sees a device to compile for.
        vars(_triton)["has_triton"] = lambda: True
    for entry in PUTS if puts else ENTRIES:
        try:
            line = compiled(entry)
        except Exception as error:  # noqa: BLE001 - the line says what the compiler said
            line = {"name": entry.name, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
