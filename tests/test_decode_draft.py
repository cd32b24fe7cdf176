"""How many tokens to draft: what was measured decides, and only the speed depends on it."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.decode.draft import PROBE_EVERY, DraftPolicy, batch_bucket

MOST = 4


class World:
    """Steps that cost ``base``, ``row`` seconds a row and ``mtp`` a pass of the MTP layer.

    The draft of depth d hits with q[d].
    """

    def __init__(self, shares, base=1.0, row=0.0, seed=0, noise=0.0, mtp=0.0):
        self.shares, self.base, self.row, self.noise = list(shares), base, row, noise
        self.mtp = mtp
        self.random = random.Random(seed)
        self.policy = DraftPolicy(MOST)

    def step(self, sequences):
        """One step with what the policy chooses; tokens and seconds."""
        drafts = self.policy.choose(sequences)
        tried, right = [0] * MOST, [0] * MOST
        for _ in range(sequences):
            for depth in range(drafts):
                tried[depth] += 1
                if self.random.random() >= self.shares[depth]:
                    break
                right[depth] += 1
        seconds = self.seconds(sequences, drafts)
        seconds *= 1.0 + self.noise * (self.random.random() - 0.5)
        self.policy.observe(sequences, drafts, tried, right, seconds)
        return sequences + sum(right), seconds

    def run(self, sequences, steps):
        for _ in range(steps):
            self.step(sequences)
        return self.policy.best(sequences)

    def rate(self, sequences, steps):
        total = [self.step(sequences) for _ in range(steps)]
        return sum(t for t, _ in total) / sum(s for _, s in total)

    def seconds(self, sequences, drafts):
        return self.base + self.row * sequences * (1 + drafts) + self.mtp * drafts

    def true_rate(self, sequences, drafts):
        tokens = 1.0 + sum(itertools.accumulate(self.shares[:drafts], lambda a, b: a * b))
        return sequences * tokens / self.seconds(sequences, drafts)

    def share_of_best(self, sequences, steps):
        """The rate that the next steps' numbers of drafts are good for, by that of the best one."""
        chosen = []
        for _ in range(steps):
            chosen.append(self.policy.choose(sequences))
            self.step(sequences)
        seconds = [self.seconds(sequences, k) for k in chosen]
        tokens = sum(s * self.true_rate(sequences, k) for s, k in zip(seconds, chosen, strict=True))
        best = max(self.true_rate(sequences, k) for k in range(MOST + 1))
        return tokens / sum(seconds) / best


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
def test_drafts_that_never_hit_are_given_up(sequences):
    assert World([0.0] * MOST, row=0.05).run(sequences, 200) == 0


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
def test_drafts_that_always_hit_are_drafted_to_the_limit_where_rows_cost_little(sequences):
    assert World([1.0] * MOST, row=0.001).run(sequences, 300) == MOST


def test_rows_that_cost_as_much_as_steps_leave_no_room_for_doubtful_drafts():
    assert World([0.5] * MOST, base=0.0, row=1.0).run(16, 300) == 0


def test_depths_are_judged_one_by_one():
    assert World([0.9, 0.9, 0.0, 0.0], row=0.01).run(8, 300) == 2


def test_a_small_batch_may_draft_more_than_a_large_one():
    world = World([0.7] * MOST, base=1.0, row=0.05)
    few, many = world.run(1, 400), world.run(64, 400)
    assert few > many
    assert world.policy.best(1) == few, "the other size changed nothing"


@pytest.mark.parametrize("sequences", [1, 16])
def test_it_follows_text_that_becomes_harder_and_easier(sequences):
    world = World([0.9] * MOST, row=0.05)
    assert world.run(sequences, 300) >= 2
    world.shares = [0.0] * MOST
    assert world.run(sequences, 300) == 0
    world.shares = [1.0] * MOST
    assert world.run(sequences, 60 * PROBE_EVERY) >= 3


def test_it_follows_a_machine_on_which_rows_become_dear_and_cheap():
    world = World([0.8] * MOST, row=0.0)
    assert world.run(4, 300) == MOST
    world.row = 1.0
    assert world.run(4, 300) <= 1
    world.row = 0.0
    assert world.run(4, 60 * PROBE_EVERY) == MOST


def test_a_single_slow_step_changes_nothing_for_long():
    world = World([1.0] * MOST, row=0.02)
    best = world.run(4, 300)
    world.policy.observe(4, best, [0] * MOST, [0] * MOST, 1000.0)
    assert world.run(4, 4 * PROBE_EVERY) == best


def test_choosing_changes_nothing_and_needs_no_chance():
    one, other = World([0.6] * MOST, row=0.05), World([0.6] * MOST, row=0.05)
    for _ in range(100):
        asked = [one.policy.choose(n) for n in (1, 5, 5, 64)]
        assert asked[1] == asked[2]
        one.step(5)
        other.step(5)
    assert one.policy == other.policy


def test_neighbours_of_the_best_are_tried_now_and_then():
    world = World([0.9, 0.9, 0.0, 0.0], row=0.01)
    world.run(8, 200)
    tried = []
    for _ in range(2 * PROBE_EVERY):
        tried.append(world.policy.choose(8))
        world.step(8)
    assert sorted(k for k in tried if k != 2) == [1, 3]


def test_the_first_step_of_all_may_be_chosen_freely():
    assert 0 <= DraftPolicy(MOST).choose(3) <= MOST


@pytest.mark.parametrize("most", [0, 1])
def test_a_limit_on_drafts_holds(most):
    policy = DraftPolicy(most)
    for _ in range(100):
        k = policy.choose(2)
        assert 0 <= k <= most
        policy.observe(2, k, [2] * most, [2] * most, 1.0)


def test_sizes_that_count_as_the_same_differ_little():
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 49)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 16, 24, 48, 64)
    ]
    for n in range(1, 300):
        assert n <= batch_bucket(n) < 1.5 * n


REAL = {"row": 0.12, "mtp": 0.1}
"""Parts of a small model's step on a CPU."""
TEXTS = {
    "usual": [0.8, 0.7, 0.65, 0.6],
    "hard": [0.2] * MOST,
    "half": [0.5] * MOST,
    "easy": [0.95] * MOST,
}


def mean_shares(shares, sequences, noise, seeds=8):
    """Share of the best fixed number's rate, mean of several runs: steps 1-50, steps 51-150."""
    early, later = [], []
    for seed in range(seeds):
        world = World(shares, seed=seed, noise=noise, **REAL)
        early.append(world.share_of_best(sequences, 50))
        later.append(world.share_of_best(sequences, 100))
    return sum(early) / seeds, sum(later) / seeds


@pytest.mark.parametrize("text", TEXTS)
def test_one_chat_gets_the_best_fixed_numbers_rate_but_for_a_twentieth_within_50_steps(text):
    early, later = mean_shares(TEXTS[text], 1, noise=0.0)
    assert early >= 0.95
    assert later >= 0.98


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("text", TEXTS)
def test_a_machine_whose_steps_vary_by_a_tenth_costs_little(text, sequences):
    early, later = mean_shares(TEXTS[text], sequences, noise=0.2)
    assert early >= 0.88
    assert later >= 0.95


def test_a_size_never_met_begins_with_what_its_neighbours_taught():
    for shares, at_8 in (TEXTS["hard"], 0), (TEXTS["easy"], MOST):
        world = World(shares, row=0.01, mtp=0.25 if not at_8 else 0.01)
        assert world.run(8, 100) == at_8
        assert [world.policy.choose(n) for n in (6, 4, 3, 2)] == [at_8] * 4


def test_a_first_step_that_warmed_something_up_is_forgotten_when_its_number_comes_again():
    world = World(TEXTS["usual"], **REAL)
    first = world.policy.choose(1)
    world.policy.observe(1, first, [1] * MOST, [1, 0, 0, 0], 50.0)
    assert world.share_of_best(1, 50) >= 0.9


@settings(max_examples=30, deadline=None)
@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=MOST, max_size=MOST),
    row=st.floats(0.0, 1.0),
    sequences=st.integers(1, 64),
    seed=st.integers(0, 100),
)
def test_it_is_never_far_below_the_best_fixed_number(shares, row, sequences, seed):
    """Over a long run with noise, probes included."""
    world = World(shares, row=row, seed=seed, noise=0.1)
    world.run(sequences, 300)
    best = max(world.true_rate(sequences, k) for k in range(MOST + 1))
    assert world.rate(sequences, 600) >= 0.8 * best


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 100),
            st.integers(0, MOST),
            st.lists(st.integers(0, 50), min_size=MOST, max_size=MOST),
            st.floats(0.0, 1e6),
        ),
        max_size=30,
    )
)
def test_any_measurements_give_a_number_in_range(steps):
    policy = DraftPolicy(MOST)
    for sequences, drafts, tried, seconds in steps:
        policy.observe(sequences, drafts, tried, [t // 2 for t in tried], seconds)
        for n in (1, 7, 64):
            assert 0 <= policy.choose(n) <= MOST
            assert policy.expected_tokens(0) == 1.0
    assert all(0.0 <= share <= 1.0 for share in policy.acceptance())
