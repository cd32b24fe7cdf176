"""What the bench of the engine on a GPU refuses to publish; nothing here needs a GPU."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdmesh.wire.errors import InternalError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("gpu_engine")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_hidden_states_that_are_not_finite_have_an_error_and_no_figures(bench, value):
    hidden = torch.zeros(5, 4, dtype=torch.bfloat16)
    hidden[3, 1] = hidden[4, 0] = value

    def measure():
        return {"graph_ms": 1.0} if len(bench.checked(hidden, "a step")) else {}

    result = bench.measured("decode", 5, measure)
    assert result == {
        "what": "decode",
        "batch": 5,
        "error": "a step: 2 of 5 rows are not finite, the first is row 3",
    }


def test_finite_hidden_states_are_passed_on(bench):
    hidden = torch.full((2, 4), 3e38, dtype=torch.bfloat16)
    assert bench.checked(hidden, "a step") is hidden
    with pytest.raises(InternalError, match="1 of 1 rows"):
        bench.checked(hidden[:1] * 4, "a step")


def test_the_first_operation_that_gives_what_is_not_finite_is_named(bench):
    ops = SimpleNamespace(
        choices=[SimpleNamespace(op=op) for op in ("rope_append", "masked_x", "mla_decode", "add")],
        rope_append=lambda x: x,
        masked_x=lambda x: x * torch.nan,
        mla_decode=lambda x: x / 0,
        add=lambda x: x * torch.nan,
    )
    model = SimpleNamespace(ops=ops, _pool="a pool")
    untouched = dict(vars(ops))

    def step():
        assert model._pool is None
        x = torch.ones(2)
        ops.masked_x(x)
        return ops.add(ops.mla_decode(ops.rope_append(ops.rope_append(x))))

    given, first = bench.one_by_one(model, step)
    assert given.isnan().all()
    assert first == "mla_decode, rope_append call 2 being the last one"
    assert vars(ops) == untouched
    assert model._pool == "a pool"


def test_an_error_of_any_type_costs_its_own_measurement_and_no_other(bench, capsys):
    result = bench.measured("prefill", 4, lambda: {"ms": 1 / 0})
    assert result == {
        "what": "prefill",
        "batch": 4,
        "error": "ZeroDivisionError: division by zero",
    }
    assert "Traceback" in capsys.readouterr().err


def test_a_profiler_that_does_not_work_costs_no_times(bench, monkeypatch, capsys):
    def broken(call):
        raise RuntimeError("no permission")

    monkeypatch.setattr(bench, "shares", broken)
    bench.print_shares(lambda: None)
    assert "no profile: RuntimeError: no permission" in capsys.readouterr().out
