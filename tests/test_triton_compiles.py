"""Every Triton kernel compiles for sm_90 and fits into a multiprocessor's shared memory.

Needs no device, and a process of its own: where TRITON_INTERPRET is set nothing is compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_path import python_path

pytest.importorskip("triton")

from pdmesh.kernels.triton import launch  # noqa: E402
from pdmesh.kernels.triton.ahead import SHARED_LIMIT  # noqa: E402
from pdmesh.kernels.triton.catalogue import ENTRIES  # noqa: E402
from pdmesh.kernels.triton.catalogue_exchange import PUTS  # noqa: E402
from pdmesh.kernels.triton.entry import Entry  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    path.stem
    for path in (ROOT / "kernels" / "triton").glob("*.py")
    if "_kernel(" in path.read_text() and path.stem != "ep_put"
)
"""`ep_put` is linked with NVSHMEM's library for devices, which is only there with its wheel."""


def ahead_of_time(*arguments):
    """What `python -m pdmesh.kernels.triton.ahead` says of each entry; by name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, "-P", "-m", "pdmesh.kernels.triton.ahead", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def compiled():
    return ahead_of_time()


def test_no_two_entries_have_one_name():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_kernel_compiles_and_its_shared_memory_fits(entry, compiled):
    line = compiled[entry.name]
    assert "error" not in line, line["error"]
    assert 0 <= line["shared"] <= SHARED_LIMIT


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_of_a_module_has_an_entry(module):
    text = (ROOT / "kernels" / "triton" / f"{module}.py").read_text()
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for line in text.splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    listed = {entry.kernel for entry in ENTRIES if entry.module == module}
    assert kernels <= listed, f"not in the catalogue: {sorted(kernels - listed)}"


def test_an_entry_that_is_not_the_kernels_is_refused():
    from pdmesh.kernels.triton import ahead

    with pytest.raises(ValueError, match="types and constants"):
        ahead.compiled(Entry("place", "place_kernel", "*i32", {"BLOCK": 16}))


@pytest.mark.full
def test_puts_compile_where_the_library_for_devices_is():
    from torch.distributed._symmetric_memory import _nvshmem_triton

    try:
        _nvshmem_triton.NvshmemLibFinder.find_device_library()
    except RuntimeError as error:
        pytest.skip(str(error))
    lines = ahead_of_time("puts")
    assert set(lines) == {entry.name for entry in PUTS}
    assert not any("error" in line or line["shared"] > SHARED_LIMIT for line in lines.values())


@pytest.mark.parametrize(
    ("ptx", "said"),
    [
        (".const .b8 nvshmemi_device_state_d[776];", "no nvshmemi_device_state_d"),
        (
            ".visible .const .b8 nvshmemi_device_state_d[776];\n"
            ".visible .const .b8 nvshmemi_device_lib_version_d[12];\n"
            ".extern .func nvshmemx_putmem_signal_block(",
            "not linked in: .extern .func nvshmemx_putmem",
        ),
    ],
)
def test_a_module_without_the_librarys_state_or_code_is_refused(ptx, said):
    from pdmesh.kernels.triton import ahead

    with pytest.raises(ValueError, match=said):
        ahead._linked("put", ptx)


def test_what_comes_next_begins_early_only_where_that_was_asked_for():
    assert not launch.lets_next_begin()
    with launch.next_may_begin():
        assert launch.lets_next_begin()
        with launch.next_may_begin():
            pass
        assert launch.lets_next_begin()
    assert not launch.lets_next_begin()
