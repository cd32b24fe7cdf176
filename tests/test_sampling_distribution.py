"""Draws follow the distribution they are drawn from, with drafts and without."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from sampling_cases import distribution, fits, quantile, shaped

from pdmesh.model.sampler import SamplingState, sample
from pdmesh.wire.sampling import SamplingParams

LOGITS = [0.5, 2.0, -1.0, 1.25, 0.0, 2.0, -3.0, 0.75, 1.0, -0.5]
DRAWS = 20_000
PENALTIES = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
    "logit_bias": ((4, 1.5),),
}


def draws(params, n=DRAWS, index=0, prompt=(1, 2), answer=(5, 5, 3)):
    """Counts of the choices at n positions, all with the same tokens before them."""
    choice = SamplingState(params, prompt, index=index, output=answer).choice()
    choices = [replace(choice, position=position) for position in range(n)]
    ids, _ = sample(torch.tensor(LOGITS).expand(n, -1), choices)
    return Counter(ids)


def expected(params, prompt=(1, 2), answer=(5, 5, 3)):
    return distribution(shaped(LOGITS, params, prompt, answer), params)


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 8, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=lambda cut: "+".join(cut) or "all",
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_over_positions_follow_the_distribution(temperature, cut, penalties):
    params = SamplingParams(temperature=temperature, seed=11, **cut, **penalties)
    assert fits(draws(params), expected(params))


def test_draws_of_different_answers_and_seeds_follow_it_too():
    base = {"temperature": 1.0}
    counts = Counter()
    for index, seed in itertools.product(range(20), range(5)):
        counts += draws(SamplingParams(seed=seed, **base), 200, index)
    assert fits(counts, expected(SamplingParams(**base)))


def test_answers_of_one_request_are_independent():
    params = SamplingParams(temperature=1.0, seed=3)
    first, second = (SamplingState(params, [], index=i).choice() for i in (0, 1))
    n = DRAWS
    pairs = []
    for choice in (first, second):
        choices = [replace(choice, position=p) for p in range(n)]
        pairs.append(sample(torch.tensor(LOGITS[:4]).expand(n, -1), choices)[0])
    single = distribution(LOGITS[:4], params)
    shares = {(a, b): single[a] * single[b] for a in range(4) for b in range(4)}
    assert fits(Counter(zip(*pairs, strict=True)), shares)


def test_the_measure_tells_a_wrong_distribution():
    params = SamplingParams(temperature=1.0, seed=11)
    counts = draws(params)
    for other in ({"temperature": 1.1}, {"temperature": 1.0, "top_p": 0.99}):
        assert not fits(counts, expected(SamplingParams(**other)))


def test_the_quantile_is_that_of_tables():
    """99.9 % points of chi-square tables."""
    for degrees, value in ((5, 20.515), (10, 29.588), (30, 59.703)):
        assert quantile(degrees, 3.0902) == pytest.approx(value, rel=0.02)


# A target over four tokens whose logits depend on the last token; penalties add a longer memory.
TABLE = torch.tensor(
    [[0.0, 1.0, -0.5, 0.5], [1.5, 0.0, 0.5, -1.0], [0.0, 0.25, 0.0, 2.0], [-1.0, 0.5, 1.0, 0.0]]
)
PROMPT = (2, 1)
LENGTH = 3
KINDS = {
    "temperature": {},
    "top_p": {"top_p": 0.85},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "top_k": 3},
    "bad words": {"bad_words": ((1, 0), (3, 3, 2)), "min_p": 0.05},
}


def parameters(kind, seed):
    return SamplingParams(temperature=1.0, seed=seed, **KINDS[kind])


def sequence_shares(kind):
    """Probability of every answer of LENGTH tokens."""
    params = parameters(kind, 0)
    shares = {}

    def extend(answer, share):
        if len(answer) == LENGTH:
            shares[answer] = share
            return
        last = (*PROMPT, *answer)[-1]
        values = shaped(TABLE[last].tolist(), params, PROMPT, answer)
        for token, p in distribution(values, params).items():
            extend((*answer, token), share * p)

    extend((), 1.0)
    return shares


def direct(kind, seeds):
    """Answers by one token a step."""
    states = [SamplingState(parameters(kind, seed), PROMPT) for seed in seeds]
    answers = [[] for _ in seeds]
    for _ in range(LENGTH):
        logits = TABLE[[([*PROMPT, *answer])[-1] for answer in answers]]
        ids, _ = sample(logits, [state.choice() for state in states])
        for state, answer, token in zip(states, answers, ids, strict=True):
            state.advance([token])
            answer.append(token)
    return [tuple(answer) for answer in answers]


def random_tree(chooser, width):
    """Paths of draft tokens, each after its beginning; all children of a node differ."""
    paths = [()]
    for depth in range(LENGTH):
        for path in [p for p in paths if len(p) == depth]:
            for token in chooser.sample(range(4), chooser.randint(0, width)):
                paths.append((*path, token))
    return paths


def verify(state, answer, paths, chosen):
    """Walks down the tree as long as a draft equals the target's choice; the tokens to accept."""
    picked = dict(zip(paths, chosen, strict=True))
    path = ()
    while path in picked:
        path = (*path, picked[path])
    tokens = list(path)[: LENGTH - len(answer)]
    state.advance(tokens)
    return [*answer, *tokens]


def speculative(kind, seeds, width):
    """The same answers by verification of random drafts: a chain for width 1, else a tree."""
    chooser = random.Random(5)
    states = {seed: SamplingState(parameters(kind, seed), PROMPT) for seed in seeds}
    answers = {seed: [] for seed in seeds}
    steps = accepted = 0
    while open_ones := [seed for seed in seeds if len(answers[seed]) < LENGTH]:
        trees = {}
        for seed in open_ones:
            paths = random_tree(chooser, width)
            trees[seed] = [p for p in paths if states[seed].allowed(p) == len(p)]
        rows = [(seed, path) for seed in open_ones for path in trees[seed]]
        last = [(*PROMPT, *answers[seed], *path)[-1] for seed, path in rows]
        ids, _ = sample(TABLE[last], [states[seed].choice(path) for seed, path in rows])
        chosen = iter(ids)
        for seed in open_ones:
            before = len(answers[seed])
            ids_here = [next(chosen) for _ in trees[seed]]
            answers[seed] = verify(states[seed], answers[seed], trees[seed], ids_here)
            steps += 1
            accepted += len(answers[seed]) - before - 1
    return [tuple(answers[seed]) for seed in seeds], accepted / steps


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_verified_drafts_are_token_for_token_the_answers_without_drafts(kind, width):
    seeds = range(600)
    answers, accepted = speculative(kind, seeds, width)
    assert accepted > 0.05
    assert answers == direct(kind, seeds)


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["temperature", "penalties", "bad words"])
def test_verified_drafts_follow_the_targets_distribution_of_whole_answers(kind, width):
    answers, _ = speculative(kind, range(10_000, 13_000), width)
    assert fits(Counter(answers), sequence_shares(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_without_drafts_follow_the_targets_distribution(kind):
    assert fits(Counter(direct(kind, range(20_000, 26_000))), sequence_shares(kind))
