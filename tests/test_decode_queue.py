"""The order of those who want pages, and who gives way: pure decisions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.decode.preempt import choose_victims
from pdmesh.decode.queue import Rank, WaitQueue, rank
from pdmesh.decode.scheduler import DecodeScheduler

AGEING = 10.0


def place(priority=0, arrived=0.0, number=0):
    return rank(priority, arrived, AGEING, number)


def test_the_higher_priority_goes_first_and_then_the_earlier_arrival():
    queue = WaitQueue()
    for name, where in [
        ("late", place(0, 2.0, 1)),
        ("early", place(0, 1.0, 2)),
        ("urgent", place(1, 5.0, 3)),
    ]:
        queue.add(where, name)
    order = []
    while queue.head():
        order.append(queue.head())
        queue.remove(
            {"late": place(0, 2.0, 1), "early": place(0, 1.0, 2)}.get(order[-1], place(1, 5.0, 3))
        )
    assert order == ["urgent", "early", "late"]
    assert len(queue) == 0


def test_who_had_pages_goes_before_a_new_one_of_the_same_rank():
    fresh = place(0, 1.0, 1)
    assert place(0, 1.0, 2).returning() < fresh


def test_only_what_goes_before_makes_others_wait():
    queue = WaitQueue()
    queue.add(place(0, 1.0, 1), "a")
    assert queue.goes_before(place(0, 1.0, 2))
    assert queue.goes_before(place(0, 3.0, 2))
    assert not queue.goes_before(place(1, 3.0, 2))
    assert not queue.remove(place(0, 1.0, 2))
    assert queue.remove(place(0, 1.0, 1))
    assert not queue.goes_before(place(0, 3.0, 2))


@given(
    st.integers(-5, 5),
    st.floats(0, 1000),
    st.lists(st.tuples(st.integers(-5, 5), st.floats(0, 1e6))),
)
def test_nobody_is_overtaken_by_what_comes_later_than_the_bound(priority, arrived, others):
    mine = place(priority, arrived, 0)
    for number, (other, when) in enumerate(others, 1):
        if when > arrived + max(0, other - priority) * AGEING:
            assert mine < place(other, when, number)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50)), max_size=30), st.data())
def test_the_queue_is_sorted_whatever_comes_and_goes(arrivals, data):
    queue, kept = WaitQueue(), []
    for number, (priority, arrived) in enumerate(arrivals):
        where = place(priority, arrived, number)
        queue.add(where, number)
        kept.append((where, number))
        if data.draw(st.booleans()):
            leaving = data.draw(st.sampled_from(kept))
            kept.remove(leaving)
            assert queue.remove(leaving[0])
        assert queue.head() == (min(kept)[1] if kept else None)


def test_sequences_wait_for_a_place_in_the_batch_by_rank_and_can_be_put_back():
    scheduler = DecodeScheduler(1, rank=lambda s: s)
    for number in (3, 1, 2):
        scheduler.add(number)
    assert scheduler.next_batch() == [1]
    scheduler.put_back(1)
    assert scheduler.next_batch(without={1}) == [2]
    assert scheduler.members() == [2, 1, 3]


# ---- giving way ---------------------------------------------------------------------------


def victims(missing, asker, holdings, arriving=()):
    del arriving
    return choose_victims(
        missing,
        Rank(asker),
        sorted(holdings),
        lambda name: Rank(name),
        lambda names: sum(holdings[name] for name in names),
    )


def test_the_lowest_ranked_give_way_and_no_more_of_them_than_needed():
    holdings = {1: 5, 3: 2, 4: 2, 5: 2}
    assert victims(1, 2, holdings) == [5]
    assert victims(3, 2, holdings) == [5, 4]
    assert victims(6, 2, holdings) == [5, 4, 3]


def test_nobody_takes_pages_from_a_higher_ranked_one():
    assert victims(7, 2, {1: 5, 3: 2, 4: 2, 5: 2}) is None
    assert victims(1, 9, {1: 5, 3: 2}) is None


class Model:
    """Sequences that grow by a page now and then, in a pool that does not hold them all."""

    def __init__(self, pool, sizes, promise):
        self.pool, self.promise = pool, promise
        self.total = dict(enumerate(sizes))  # the number is the rank
        self.used = {}  # pages that have contents
        self.held = {}  # pages held or promised
        self.outside = list(self.total)  # wait for room, strictly in order
        self.arriving = {}  # steps until they can run, and be preempted
        self.preempted = []

    @property
    def free(self):
        return self.pool - sum(self.held.values())

    def admit(self):
        while self.outside:
            name = min(self.outside)
            want = min(self.total[name], self.used.get(name, 1) + self.promise)
            if want > self.free:
                return
            self.outside.remove(name)
            self.held[name] = want
            self.arriving[name] = 0 if name in self.used else 3
            self.used.setdefault(name, 1)

    def step(self):
        self.admit()
        for name in list(self.arriving):
            self.arriving[name] -= 1
            if self.arriving[name] < 0:
                del self.arriving[name]
        moved = 0
        for name in sorted(set(self.held) - set(self.arriving)):
            if name in self.held and self.grow(name):
                moved += 1
        return moved or bool(self.arriving)

    def grow(self, name):
        if self.used[name] == self.held[name] and not self.room_for(name):
            return False
        self.used[name] += 1
        if self.used[name] >= self.total[name]:
            del self.held[name], self.used[name], self.total[name]
        return True

    def room_for(self, name):
        if self.free < 1:
            others = {n: self.held[n] for n in self.held if n != name and n not in self.arriving}
            chosen = victims(1 - self.free, name, others)
            if chosen is None:
                return False
            assert min(self.total) not in chosen, "the highest-ranked gave way"
            for victim in chosen:
                del self.held[victim]
                self.outside.append(victim)
                self.preempted.append(victim)
        self.held[name] += 1
        return True


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 12), st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_everybody_comes_to_an_end_in_a_pool_of_any_size(pool, sizes, promise):
    model = Model(pool, [min(size, pool) for size in sizes], promise)
    steps = 0
    while model.total:
        assert model.step(), "deadlock"
        assert model.free >= 0
        steps += 1
        assert steps <= sum(5 + size for size in sizes), "livelock: longer than one after another"
