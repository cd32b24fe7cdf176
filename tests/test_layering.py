"""Who may import whom."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_path import python_path

ROOT = Path(__file__).resolve().parent.parent

ALLOWED: dict[str, set[str]] = {
    "wire": set(),
    "kernels": set(),
    "text": {"wire"},
    "registry": {"wire"},
    "kvcache": {"kernels", "wire"},
    "kvtransfer": {"kvcache", "kernels", "wire"},
    "model": {"kernels", "wire"},
    "prefill": {"registry", "kvtransfer", "kvcache", "model", "kernels", "wire"},
    "decode": {"registry", "kvtransfer", "kvcache", "model", "kernels", "wire"},
    "router": {"registry", "text", "wire"},
}
ALLOWED["simulation"] = set(ALLOWED)
ALLOWED["launch"] = set(ALLOWED)
EXTRA: dict[str, set[str]] = {"router": {"pdmesh.kvtransfer.protocol.migration_gateway"}}
"""Single modules that a package may import besides."""
NO_TORCH = ("wire", "text", "registry", "router", "launch")
SOURCES = sorted(path for name in ALLOWED for path in (ROOT / name).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def ours(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("pdmesh.")}


def beyond(modules: set[str], extra: set[str]) -> set[str]:
    """The modules without those in ``extra``, their names, and the packages they are in."""
    used = {m for m in extra if any(f"{name}.".startswith(f"{m}.") for name in modules)}
    around = {m.rpartition(".")[0] for m in used}
    return {
        name
        for name in modules
        if name not in around and not any(f"{name}.".startswith(f"{m}.") for m in used)
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path):
    package = path.relative_to(ROOT).parts[0]
    wrong = ours(beyond(imported(path), EXTRA.get(package, set()))) - ALLOWED[package] - {package}
    assert not wrong, f"{package} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_that_needs_no_torch_names_none(path):
    if path.relative_to(ROOT).parts[0] in NO_TORCH:
        assert not [name for name in imported(path) if name.split(".")[0] == "torch"]


def test_every_package_of_the_tree_has_its_place_in_the_table():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tools", "tests", "bench"} == set(ALLOWED)


def test_the_check_sees_a_wrong_import(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from pdmesh import decode\n    import pdmesh.kvcache.pool\n")
    assert ours(imported(path)) == {"decode", "kvcache"}


def test_the_router_may_use_the_migration_machine_and_no_more_of_transfer(tmp_path):
    extra, path = EXTRA["router"], tmp_path / "x.py"
    path.write_text("from pdmesh.kvtransfer.protocol import migration_gateway as g\n")
    assert not ours(beyond(imported(path), extra))
    path.write_text("from pdmesh.kvtransfer.protocol.migration_gateway import step\n")
    assert not ours(beyond(imported(path), extra))
    for wrong in ("protocol import pull", "protocol.migration import Capsule", "sender import X"):
        package, name = wrong.split(" import ")
        path.write_text(f"from pdmesh.kvtransfer.{package} import {name}\n")
        assert ours(beyond(imported(path), extra)) == {"kvtransfer"}, wrong


def test_the_packages_around_the_migration_machine_are_empty():
    for package in ("kvtransfer", "kvtransfer/protocol"):
        assert (ROOT / package / "__init__.py").read_text() == ""


MODULES = {
    name: sorted(
        ".".join(("pdmesh", *path.relative_to(ROOT).with_suffix("").parts))
        for path in (ROOT / name).rglob("*.py")
        if path.name != "__init__.py"
    )
    for name in NO_TORCH
}


@pytest.mark.parametrize("package", NO_TORCH)
def test_torch_is_not_loaded_even_indirectly(package):
    program = (
        f"import sys\nfor name in {MODULES[package]!r}:\n    __import__(name)\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr


def test_a_process_that_a_test_starts_finds_packages_where_the_test_does():
    """Where packages are on PYTHONPATH alone, a child with another one would have none."""
    free = re.compile(r'"PYTHONPATH"(?:: |\] = )(?!python_path\()')
    found = {p.name for p in (ROOT / "tests").glob("*.py") if free.search(p.read_text())}
    assert found == {
        "test_tiny_training.py",  # the standard library alone
        "test_tools_wheelhouse.py",  # a site of its own
    }
