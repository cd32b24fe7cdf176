"""Files that run on a device alone call functions with the arguments that these have."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("tests/nvshmem_*", "tests/ep_peer", "tests/test_gpu_*", "bench/gpu_*", "bench/node_*")
FILES = sorted(path for name in (*NAMES, "bench/ep*") for path in ROOT.glob(f"{name}.py"))


def taken_from(tree: ast.Module) -> dict[str, object]:
    """What a file imports by name from this project, as far as that loads without a device."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        beside = any((ROOT / part / f"{node.module}.py").exists() for part in ("tests", "bench"))
        if not beside and not node.module.startswith("pdmesh."):
            continue
        try:
            module = importlib.import_module(node.module)
        except (ImportError, pytest.skip.Exception):
            continue
        for alias in node.names:
            found[alias.asname or alias.name] = getattr(module, alias.name, None)
    return found


def mistaken(path: Path) -> list[str]:
    """Calls whose arguments their function does not take; those that unpack are not looked at."""
    tree, wrong = ast.parse(path.read_text()), []
    known = taken_from(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        called = known.get(node.func.id)
        unpacks = any(isinstance(one, ast.Starred) for one in node.args)
        if unpacks or any(one.arg is None for one in node.keywords):
            continue
        if inspect.isfunction(called) or inspect.isclass(called):
            try:
                inspect.signature(called).bind(*node.args, **{str(k.arg): k for k in node.keywords})
            except TypeError as error:
                wrong.append(f"{path.name}:{node.lineno} {node.func.id}: {error}")
            except ValueError:  # a class of C has no signature
                continue
    return wrong


def test_calls_in_files_for_devices_have_the_arguments_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    assert len(FILES) > 30
    assert [line for path in FILES for line in mistaken(path)] == []
