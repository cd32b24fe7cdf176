"""Figures of benchmarks in JSON, which has no NaN: one that is not there is null."""

import ast
import importlib
import json
import math
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
KEPT = sorted((ROOT / "docs" / "data").glob("*.json"))


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("figures")


def strict(text):
    """As a reader takes it that knows JSON only."""

    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.name)
def test_measurements_that_are_kept_are_json_for_every_reader(file):
    assert strict(file.read_text())


def test_figures_that_are_not_there_are_null_wherever_they_stand(figures):
    found = {
        "public_us": math.nan,
        "rows": [{"error": math.inf, "us": 1.5}, (-math.inf, 2, None)],
        "as text": "NaN",
        "right": True,
    }
    assert strict(figures.as_json(found)) == {
        "public_us": None,
        "rows": [{"error": None, "us": 1.5}, [None, 2, None]],
        "as text": "NaN",
        "right": True,
    }
    assert figures.as_json({"us": math.nan}, 1) == '{\n "us": null\n}'


def test_a_figure_that_is_not_there_is_a_dash(figures):
    assert figures.shown(1.25, ".1f") == "1.2"
    assert figures.shown(0.0, ".1%") == "0.0%"
    assert figures.shown(None, ".1f") == "-"


def test_a_figure_that_is_not_there_stays_so_rounded_and_in_a_sum(figures):
    assert figures.rounded(1.26, 1) == 1.3
    assert all(figures.rounded(one, 1) is None for one in (None, math.nan, math.inf))
    assert figures.total([1.0, 2.5]) == 3.5
    assert figures.total([1.0, None, 2.5]) is None


def writes(call):
    """Whether it prints or writes."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("print", "write", "write_text")


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.name)
def test_no_benchmark_writes_json_by_another_way_than_figures(path):
    own = [
        part.lineno
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and writes(call)
        for part in ast.walk(call)
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("json.dumps", "json.dump")
    ]
    assert not own, f"{path.name}, lines {own}: figures.as_json writes null for what is no number"


no_device_here = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")


@no_device_here
def test_a_step_with_no_public_kernel_has_no_time_of_one(figures, capsys):
    pytest.importorskip("triton")
    layer = importlib.import_module("gpu_layer")
    measured = importlib.import_module("gpu_timing").Measured
    ours = measured("ours", True, 3.0, 0.0)
    library = measured("a library", False, 4.0, 0.0)
    wrong = measured("another", False, error=1.0, why_not="wrong")
    tried = {"mla": [ours, library, wrong], "gate": [ours, wrong]}
    rows = layer.step_rows({}, {"mla": ours, "gate": ours}, tried)
    assert [row["public_us"] for row in rows] == [4.0, None]
    assert strict(figures.as_json(rows)) == rows
    whole = dict.fromkeys(layer.MODES, 9.0) | {"side": None, "rested": 9.0, "sustained": 9.5}
    whole |= {"best": "in_line", "sustained_clocks": {"clocks.sm": 1500}}
    result = {"layer": whole, "sum_of_steps_us": 8.0, "copies_us": 1.0, "bound_us": 5.0}
    layer.print_layer("tp8", result | {"public_us": None, "layer_error": 1e-3})
    said = capsys.readouterr().out
    for words in ("side -,", "public ones -;", "aim -;", "gaps - of - us, - kernels"):
        assert words in said


@no_device_here
def test_an_absorbed_form_that_fails_leaves_the_other_figures_of_a_prompt(figures):
    pytest.importorskip("triton")
    prefill = importlib.import_module("gpu_prefill")
    names = (*prefill.MULTI_HEAD, *prefill.ABSORBED, *prefill.DENSE, *prefill.MOE, "q_b")
    times = dict.fromkeys(names, 2.0)
    both = prefill.sums(4096, times)
    one = prefill.sums(4096, times | dict.fromkeys(prefill.ABSORBED))
    assert both["absorbed"] == 6.0
    assert both["form_ratio"] == 6 / 10
    assert one == both | {"absorbed": None, "form_ratio": None}
    assert both["moe_layer"] == 2.0 * (5 + 8 + 1)
    assert both["dense_layer"] == 2.0 * (5 + 3 + 1)
