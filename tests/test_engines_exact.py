"""Tokens and logits of a sequence do not depend on what else the engines do, to the last bit.

In exact mode: not on the batch, its place there, chunks, page size, cached prefixes and who
computed them, drafts, trees, other answers of its request, or being preempted. In fast mode: not
on the batch, its place there, drafts or other answers.
"""

import pytest
from engine_cases import Ask, Engine, asks, engines, run_mix
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

QUICK, LARGE = 25, 400
CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""A failing mix is small enough; making it smaller takes minutes."""


def test_random_mixes_in_exact_mode_equal_each_request_alone():
    @settings(
        max_examples=QUICK,
        deadline=None,
        derandomize=True,
        suppress_health_check=CALM,
        phases=PHASES,
    )
    @given(engines(), asks(sharing=True))
    def check(engine, mix):
        run_mix("exact", engine, mix)

    check()


def test_random_mixes_in_fast_mode_equal_each_request_alone():
    @settings(
        max_examples=QUICK,
        deadline=None,
        derandomize=True,
        suppress_health_check=CALM,
        phases=PHASES,
    )
    @given(engines().filter(lambda e: not e.growth_tokens), asks(sharing=False))
    def check(engine, mix):
        run_mix("fast", engine, mix)

    check()


@pytest.mark.full
@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
def test_many_random_mixes_equal_each_request_alone(arithmetic):
    exact = arithmetic == "exact"

    @settings(max_examples=LARGE, deadline=None, suppress_health_check=CALM, phases=PHASES)
    @given(engines().filter(lambda e: exact or not e.growth_tokens), asks(sharing=exact))
    def check(engine, mix):
        run_mix(arithmetic, engine, mix)

    check()


@pytest.mark.parametrize("page_size", [8, 16])
def test_preempted_sequences_with_trees_of_drafts_and_shared_prefixes_lose_no_bit(page_size):
    """A mix that is known to preempt, so that the property above is not about calm pools only."""
    mix = [
        Ask(0, 64, own, 100 + own, 2, 24, kind, 0)
        for own, kind in enumerate(["greedy", "sampled", "penalties", "shaped", "sampled"], 1)
    ]
    facts = run_mix("exact", Engine(page_size, 40, 3, 2, 8, 1), mix)
    assert facts["preempted"] > 0


@given(st.integers(0, 3))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_an_answer_is_the_same_whatever_n_is(kind):
    names = ["greedy", "sampled", "penalties", "shaped"]
    for n in (1, 4):
        run_mix("fast", Engine(16, 64, 2, 1, 8, 0), [Ask(1, 0, 50, 7, n, 12, names[kind], 0)])
