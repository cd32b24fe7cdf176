"""What launches of Triton kernels have in common, and what they leave to kernels."""

import ast
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from pdmesh.kernels.triton.launch import power_of_two  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"cdiv", "next_power_of_2"}
"""Functions of kernels that the host may call too, for microseconds each."""


def test_a_power_of_two_is_that_of_triton():
    sizes = [*range(5000), *(2**n + d for n in range(13, 31) for d in (-1, 0, 1))]
    assert [power_of_two(n) for n in sizes] == [triton.next_power_of_2(n) for n in sizes]


def slow_calls(tree):
    """Calls in functions that are no kernels, by their lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            continue
        if isinstance(node, ast.Attribute) and node.attr in SLOW:
            yield node.lineno
        yield from slow_calls(node)


def test_no_launch_calls_what_triton_has_for_kernels():
    files = sorted((ROOT / "kernels" / "triton").glob("*.py"))
    found = {
        path.name: lines for path in files if (lines := [*slow_calls(ast.parse(path.read_text()))])
    }
    assert files
    assert found == {}
