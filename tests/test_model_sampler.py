"""The sampler: greedy, truncation, seeds, log-probabilities."""

import math
from collections import Counter

import pytest
import torch

from pdmesh.model.sampler import Choice, sample, uniform
from pdmesh.wire.sampling import SamplingParams


def rows(n, vocab=50, seed=0):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits, position=0, **params):
    ids, logprobs = sample(logits.unsqueeze(0), [Choice(SamplingParams(**params), position)])
    return ids[0], logprobs[0]


def test_temperature_zero_takes_the_most_likely_token():
    logits = rows(5)
    ids, _ = sample(logits, [Choice(SamplingParams(), i) for i in range(5)])
    assert ids == logits.argmax(-1).tolist()


def test_a_random_choice_depends_on_seed_and_position_alone():
    logits = rows(1)[0]
    alone = [one(logits, position=p, temperature=1.0, seed=7)[0] for p in range(30)]
    batch = [Choice(SamplingParams(temperature=1.0, seed=7), p) for p in reversed(range(30))]
    together, _ = sample(logits.expand(30, -1), batch)
    assert together[::-1] == alone
    assert alone != [one(logits, position=p, temperature=1.0, seed=8)[0] for p in range(30)]


def test_uniform_numbers_are_fixed_for_ever():
    """A change here changes every seeded answer: the values are part of the interface."""
    values = [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 5)]
    assert values == [0.011546754286331562, 0.5023796042735054, 0.46292535650502586]


def test_samples_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0])
    probabilities = torch.softmax(logits, -1).tolist()
    n = 4000
    counts = Counter(one(logits, position=p, temperature=1.0, seed=3)[0] for p in range(n))
    for token, p in enumerate(probabilities):
        assert abs(counts[token] / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    drawn = {one(logits, position=p, temperature=5.0, top_k=2)[0] for p in range(200)}
    assert drawn == {2, 3}
    nucleus = {one(logits, position=p, temperature=1.0, top_p=0.6)[0] for p in range(200)}
    assert nucleus == {3}
    both = {one(logits, position=p, temperature=1.0, top_p=0.7)[0] for p in range(200)}
    assert both == {2, 3}


def test_extreme_but_allowed_values_give_a_token_of_the_vocabulary():
    logits = rows(1)[0]
    for params in (
        {"temperature": 1e-6},
        {"temperature": 100.0, "top_k": 50},
        {"temperature": 1.0, "top_p": 1e-12},
        {"temperature": 1.0, "top_k": 1},
    ):
        assert 0 <= one(logits, **params)[0] < 50


def test_a_tiny_temperature_equals_greedy():
    logits = rows(1)[0]
    for temperature in (1e-6, 1e-300, 5e-324):
        assert one(logits, temperature=temperature)[0] == int(logits.argmax())


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_logprobs_are_those_of_the_unmodified_distribution(wanted):
    logits = rows(1)[0]
    token, answer = one(logits, temperature=2.0, top_k=3, logprobs=wanted)
    reference = torch.log_softmax(logits, -1)
    assert answer.logprob == pytest.approx(float(reference[token]), abs=1e-6)
    assert len(answer.top_ids) == len(answer.top_logprobs) == wanted
    assert list(answer.top_logprobs) == sorted(answer.top_logprobs, reverse=True)


def test_who_did_not_ask_gets_no_logprobs():
    assert one(rows(1)[0])[1] is None
