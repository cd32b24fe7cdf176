"""Whole meshes on virtual time: seeds that must hold, repeat exactly, and say what failed."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulation_mistakes as mistakes
from child_path import python_path

from pdmesh.simulation.command import run, seeds_of
from pdmesh.simulation.model import EOS, Oracle, latents_of, latents_of_one
from pdmesh.simulation.run import simulate
from pdmesh.simulation.scenario import draw_scenario
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
BLOCK, BIG_BLOCK = 20, 100
FEW, ALL = range(0, 200, BLOCK), range(200, 10_000, BIG_BLOCK)


def hold(first, count):
    for seed in range(first, first + count):
        outcome = simulate(seed)
        if outcome.problems:
            said = [outcome.summary, *outcome.problems, outcome.again]
            pytest.fail("\n".join(said), pytrace=False)


@pytest.mark.parametrize("first", FEW)
def test_every_seed_of_a_sample_holds(first):
    hold(first, BLOCK)


@pytest.mark.parametrize("seed", [2242, 6325])
def test_a_router_behind_a_slow_client_may_come_too_late_for_a_moved_answer(seed):
    hold(seed, 1)


@pytest.mark.full
@pytest.mark.parametrize("first", ALL)
def test_every_seed_of_the_whole_set_holds(first):
    hold(first, BIG_BLOCK)


def trace_of(seed, hash_seed):
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "PYTHONHASHSEED": hash_seed,
    }
    command = [sys.executable, "-P", "-m", "pdmesh.launch.cli"]
    done = subprocess.run(
        [*command, "simulate", "--seed", str(seed), "--trace"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [3, 13])
def test_a_seed_gives_the_same_trace_in_every_process(seed):
    one, other = trace_of(seed, "1"), trace_of(seed, "2")
    assert one == other
    assert one.count(b"\n") > 100


def test_another_seed_is_another_run():
    assert simulate(0).trace != simulate(1).trace


def test_runs_one_after_another_do_not_touch_each_other():
    alone = simulate(4).trace
    simulate(2)
    assert simulate(4).trace == alone


def test_the_seeds_of_the_sample_hold_every_kind_of_fault_and_calm_ones_too():
    drawn = [draw_scenario(seed) for seed in range(200)]
    kinds = {fault.kind for scenario in drawn for fault in scenario.faults}
    assert {"kill", "pause", "cut", "partition", "slow", "router_restart", "drain"} <= kinds
    assert {"migrate", "store_down", "store_wiped", "store_wrong"} <= kinds
    assert sum(scenario.calm for scenario in drawn) >= 10
    assert {scenario.mesh.one_sided for scenario in drawn} == {True, False}


def test_the_oracle_of_the_simulated_model_is_one_function():
    assert latents_of_one(12345) == latents_of_array(12345)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    first, second = (Oracle().answer((1, 2, 3), params, index) for index in (0, 1))
    assert first == Oracle().answer((1, 2, 3), params, 0)
    assert first.tokens != second.tokens
    assert EOS not in first.tokens


def latents_of_array(word):
    import numpy as np

    return [int(value) for value in latents_of(np.array([word], np.uint64)).reshape(-1)]


def arguments(**given):
    return argparse.Namespace(
        **{"seed": None, "seeds": None, "requests": 10, "trace": False} | given
    )


def test_the_command_says_what_failed_and_how_to_repeat_it(monkeypatch, capsys):
    mistakes.drafts_are_taken_unverified(monkeypatch)
    assert run(arguments(seeds="0..1")) == 1
    said = capsys.readouterr().out
    assert "seed 1: FAILED" in said
    assert "is wrong" in said
    assert "pdmesh simulate --seed 1 --trace" in said
    assert "2 seeds, " in said


def test_the_command_sums_a_good_seed_up_in_one_line(capsys):
    assert run(arguments(seed=4, requests=3)) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 4: ok; ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["a", "3..", "5..2", "-1"])
def test_a_range_that_is_none_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--seeds"):
        seeds_of(text)
