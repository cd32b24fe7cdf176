"""How ranks agree on a step: any order of events, any losses; pure, by seeds."""

import random

import pytest

from pdmesh.model.parallel.assembly import Assembly, Begin


class Network:
    """Ranks that want to compute now and then, connections that fail and come back.

    Frames of a connection keep their order; anything else happens in any order. A step is entered
    once a rank agrees to it. It ends for a rank when all its members have entered it (then every
    message has come), or when one of them has left it or is lost.
    """

    def __init__(self, seed, size, connected=True):
        self.rng = random.Random(seed)
        self.ranks = [Assembly(rank) for rank in range(size)]
        self.frames = {}
        self.up = set()
        self.wants = dict.fromkeys(range(size), 0)
        self.inside = {}
        self.entered = {}
        self.done = []
        self.down = set()
        if connected:
            for one in range(size):
                for other in range(one):
                    self.connect(one, other)
            for rank in range(size):
                self.ranks[rank].form(range(size))

    def connect(self, one, other):
        if (one, other) in self.up or {one, other} & self.down:
            return
        for a, b in ((one, other), (other, one)):
            self.up.add((a, b))
            self.frames[a, b] = []
            self.ranks[a].connected(b)

    def cut(self, one, other):
        for a, b in ((one, other), (other, one)):
            if (a, b) in self.up:
                self.up.discard((a, b))
                del self.frames[a, b]
                self.ranks[a].lost(b)

    def say(self, rank, word):
        for other in word.members:
            if other != rank and (rank, other) in self.up:
                self.frames[rank, other].append(word)

    def deliver(self, pair):
        source, target = pair
        word = self.frames[pair].pop(0)
        for gone in self.ranks[target].hear(source, word):
            self.cut(target, gone)

    def actions(self):
        found = [lambda p=p: self.deliver(p) for p in sorted(self.up) if self.frames[p]]
        for rank, assembly in enumerate(self.ranks):
            if rank in self.down:
                continue
            if rank in self.inside:
                if self.over(rank):
                    found.append(lambda r=rank: self.leave(r))
            elif assembly.said:
                found.append(lambda r=rank: self.agree(r))
            elif self.wants[rank] or assembly.wanted:
                found.append(lambda r=rank: self.begin(r))
        return found

    def begin(self, rank):
        kind = "forward" if self.wants[rank] else "idle"
        self.say(rank, self.ranks[rank].begin(kind, self.wants[rank]))

    def agree(self, rank):
        agreed = self.ranks[rank].agree()
        if agreed is None:
            return
        self.inside[rank] = agreed
        self.entered.setdefault(agreed.step, {})[rank] = agreed

    def over(self, rank):
        step = self.inside[rank]
        if step.kind == "idle":
            return True
        there = self.entered[step.step]
        if set(there) == set(step.members):
            return True
        waited = [r for r in step.members if r not in there]
        return any(self.ranks[rank].left(other) or other in self.inside for other in waited)

    def leave(self, rank):
        step = self.inside.pop(rank)
        whole = set(self.entered[step.step]) == set(step.members)
        if step.kind == "idle":
            return
        if whole and self.wants[rank]:
            self.wants[rank] -= 1
            self.done.append((rank, step))
        elif not whole and not self.wants[rank] and not self.ranks[rank].said:
            # It left a step that the others may still be in: they have to hear from it.
            self.say(rank, self.ranks[rank].begin("idle", 0))

    def run(self, steps=20_000):
        """Until nothing more can happen; says whether it came to that. Who lost a connection
        dials again, later than much else happens."""
        size = range(len(self.ranks))
        for _ in range(steps):
            actions = self.actions()
            missing = [(a, b) for a in size for b in range(a) if (a, b) not in self.up]
            if missing and (not actions or self.rng.random() < 0.02):
                self.connect(*self.rng.choice(missing))
            elif not actions:
                return True
            else:
                self.rng.choice(actions)()
        return False


def agreements(network):
    for there in network.entered.values():
        assert len(set(there.values())) == 1, there


@pytest.mark.parametrize("seed", range(40))
def test_all_who_want_compute_and_all_agree_on_each_step(seed):
    network = Network(seed, 2 + seed % 5)
    for rank in network.wants:
        network.wants[rank] = network.rng.randrange(4)
    assert network.run()
    assert not any(network.wants.values())
    agreements(network)
    size = len(network.ranks)
    assert {step.members for _, step in network.done} <= {tuple(range(size))}


FEW = [*range(60), 2522, 2886]
"""The last two take long to come together again."""


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(s, marks=pytest.mark.full) for s in range(60, 2500))]
)
def test_losses_and_returns_stop_nobody_for_good(seed):
    network = Network(seed, 2 + seed % 4)
    size = len(network.ranks)
    for _ in range(30):
        rank = network.rng.randrange(size)
        network.wants[rank] += network.rng.randrange(2)
        match network.rng.randrange(4):
            case 0:
                other = network.rng.randrange(size)
                if other != rank:
                    network.cut(rank, other)
            case 1:
                other = network.rng.randrange(size)
                if other != rank:
                    network.connect(rank, other)
        for _ in range(network.rng.randrange(12)):
            if actions := network.actions():
                network.rng.choice(actions)()
    for one in range(size):
        for other in range(one):
            network.connect(one, other)
    assert network.run()
    assert not any(network.wants.values())
    agreements(network)
    everyone = tuple(range(size))
    for _ in range(60):  # once all are connected, all compute together again
        network.wants[0] += 1
        assert network.run()
        if [step.members for rank, step in network.done if rank == 0][-1] == everyone:
            break
    else:
        raise AssertionError("they do not come together again")


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_meet_one_after_the_other_end_up_together(seed):
    network = Network(seed, 4, connected=False)
    pairs = [(a, b) for a in range(4) for b in range(a)]
    network.rng.shuffle(pairs)
    for pair in pairs:
        network.connect(*pair)
        for rank in range(4):
            network.wants[rank] += 1
        for _ in range(network.rng.randrange(40)):
            if actions := network.actions():
                network.rng.choice(actions)()
    assert network.run()
    for _ in range(20):
        network.wants = dict.fromkeys(range(4), 1)
        assert network.run()
        agreements(network)
    assert {step.members for _, step in network.done[-4:]} == {(0, 1, 2, 3)}
    agreements(network)


def test_the_main_model_the_largest_batch_and_the_newest_plan_of_all_count():
    one, two = Assembly(0), Assembly(1)
    for a, b in ((one, 1), (two, 0)):
        a.connected(b)
        a.form([b])
    one.hear(1, Begin((0, 1), 7, (0, 0), (0, 1), (0, 3, 5, 9), "mtp", 3))
    assert one.wanted
    said = one.begin("forward", 2, (0, 4, 5))
    two.hear(0, said)
    agreed = one.agree()
    assert (agreed.kind, agreed.most_rows, agreed.plan) == ("forward", 3, 5)
    again = one.begin("idle", 0)
    assert again.number > said.number
    assert again.used == (0, 7)


def test_a_word_of_a_rank_that_is_not_connected_is_nobodys():
    one = Assembly(0)
    assert one.hear(1, Begin((0, 1), 1, (0, 0), (0, 1), (0,), "forward", 1)) == ()
    assert not one.wanted
    assert one.left(1)
