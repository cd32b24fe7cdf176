"""Tokens and logits of a sequence do not depend on what else the engines do, to the last bit.

In exact mode: not on the batch, its place there, chunks, page size, cached prefixes and who
computed them, drafts, trees, other answers of its request, or being preempted; nor do the pages
that are kept for others. In fast mode: not on the batch, its place there, drafts or other answers.
"""

from collections import Counter

import pytest
from engine_cases import KINDS, Ask, Engine, asks, engines, run_mix
from hypothesis import HealthCheck, Phase, example, given, settings

QUICK, LARGE = 20, 400
CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""A failing mix is small enough; making it smaller takes minutes."""


TIGHT = [Ask(0, 64, own, 100 + own, 2, 24, kind) for own, kind in enumerate([*KINDS, "sampled"], 1)]
"""More than a pool of scarce pages holds: some of them are preempted."""


def tight(page_size):
    return Engine(page_size, 40, 3, 2, 8, 1)


def random_mixes(arithmetic, count, *known, **more):
    """What happened, over all of them; `known`, pairs of an engine and a mix, come first."""
    exact, facts = arithmetic == "exact", Counter()

    @settings(max_examples=count, deadline=None, suppress_health_check=CALM, phases=PHASES, **more)
    @given(engines().filter(lambda e: exact or not e.growth_tokens), asks(sharing=exact))
    def check(engine, mix):
        facts.update(run_mix(arithmetic, engine, mix))

    for engine, mix in known:
        check = example(engine, mix)(check)
    check()
    return facts


def test_random_mixes_in_exact_mode_equal_each_request_alone():
    facts = random_mixes("exact", QUICK, derandomize=True)
    assert facts["accepted"] > 0
    assert facts["accepted on another branch"] > 0
    assert facts["tokens cached at prefill"] > 0
    assert facts["pages cached at decode"] > 0
    assert facts["pages compared"] > 0


def test_random_mixes_in_fast_mode_equal_each_request_alone():
    facts = random_mixes("fast", QUICK, derandomize=True)
    assert facts["accepted"] > 0
    assert facts["accepted on another branch"] > 0


@pytest.mark.full
@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
def test_many_random_mixes_equal_each_request_alone(arithmetic):
    known = [(tight(8), TIGHT), (tight(16), TIGHT)] if arithmetic == "exact" else []
    facts = random_mixes(arithmetic, LARGE, *known)
    assert facts["accepted on another branch"] > 0
    assert arithmetic == "fast" or facts["preempted"] > 0


@pytest.mark.parametrize("page_size", [8, 16])
def test_preempted_sequences_with_trees_of_drafts_and_shared_prefixes_lose_no_bit(page_size):
    """A mix that is known to preempt, so that the property above is not about calm pools only."""
    facts = run_mix("exact", tight(page_size), TIGHT)
    assert facts["preempted"] > 0
    assert facts["accepted on another branch"] > 0


@pytest.mark.parametrize("branches", [1, 3])
def test_a_talk_that_goes_on_finds_the_pages_of_its_answers_as_they_are_alone(branches):
    """The second prompt begins with pages that decode computed, drafts and all."""
    mix = [Ask(1, 40, 3, 5, 1, 24, "greedy"), Ask(0, 0, 9, 6, 1, 6, "sampled", follows=True)]
    facts = run_mix("exact", Engine(8, 64, 4, branches, 8, 0), mix)
    assert facts["pages cached at decode"] > 43 // 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_same_whatever_n_is(kind):
    for n in (1, 4):
        run_mix("fast", Engine(16, 64, 2, 1, 8, 0), [Ask(1, 0, 50, 7, n, 8, kind)])
