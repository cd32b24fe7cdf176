"""The bench of a step's turns at Python, small, with readers in a process of their own."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def step_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = sys.getswitchinterval()
    yield importlib.import_module("step_turns")
    sys.setswitchinterval(before)


def test_every_interval_is_measured_while_answers_are_read(step_turns, capsys):
    small = "--streams 3 --steps 4 --rounds 2 --step-ms 1 --python-ms 0.1 --turn-ms 5 0.5"
    assert step_turns.main(small.split()) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["turn_ms"] for one in found] == [5.0, 0.5]
    for one in found:
        assert 0 < one["median_ms"] <= one["p90_ms"]
        assert 0 < one["part"] < 1
