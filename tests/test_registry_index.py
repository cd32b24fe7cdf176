"""The index of owned prefixes, against a model that keeps a set of pages a worker."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.registry.index import PrefixIndex


def chain(*path: int) -> list[bytes]:
    """Hashes along a path of a tree of prefixes."""
    return [bytes(path[: i + 1]) for i in range(len(path))]


def depth(owned: set[bytes], hashes: list[bytes]) -> int:
    """How many leading hashes are owned."""
    return next((i for i, page in enumerate(hashes) if page not in owned), len(hashes))


LONG = chain(*range(200))


def test_each_owner_is_found_with_its_own_depth():
    index = PrefixIndex()
    for slot, pages in ((3, 1), (7, 60), (8, 60), (20, 199), (70, 200)):
        index.apply(slot, 1, True, LONG[:pages])
    assert index.match(LONG) == {3: 1, 7: 60, 8: 60, 20: 199, 70: 200}
    assert index.match(LONG[:40]) == {3: 1, 7: 40, 8: 40, 20: 40, 70: 40}
    assert index.match([]) == {}
    assert index.match(chain(9, 9)) == {}


def test_as_many_depths_as_pages_are_told_apart():
    index = PrefixIndex()
    for slot in range(200):
        index.apply(slot, 1, True, LONG[: slot + 1])
    assert index.match(LONG) == {slot: slot + 1 for slot in range(200)}


def test_a_worker_that_came_back_owns_nothing_at_once_and_its_old_events_are_ignored():
    index = PrefixIndex()
    index.apply(0, 10, True, LONG)
    index.apply(1, 10, True, LONG[:5])
    assert index.apply(0, 11, True, [])
    assert index.match(LONG) == {1: 5}
    assert not index.apply(0, 10, True, LONG)
    assert not index.apply(0, 10, False, LONG)
    assert index.match(LONG) == {1: 5}
    index.apply(0, 11, True, LONG[:3])
    assert index.match(LONG) == {0: 3, 1: 5}


def test_a_dropped_worker_stays_away_until_it_has_a_new_epoch():
    index = PrefixIndex()
    index.apply(0, 10, True, LONG)
    index.drop(0)
    assert index.match(LONG) == {}
    assert not index.apply(0, 10, True, LONG[:2]), "a late event brought it back"
    assert not index.apply(0, 9, True, LONG[:2])
    assert index.apply(0, 11, True, LONG[:2])
    assert index.match(LONG) == {0: 2}
    index.drop(99)


def test_a_batch_of_evictions_with_absent_pages_removes_the_others_and_may_be_repeated():
    index = PrefixIndex()
    index.apply(0, 1, True, LONG[:3])
    for _ in range(2):
        assert index.apply(0, 1, False, [LONG[2], b"absent", LONG[1]])
        assert index.match(LONG) == {0: 1}
        assert index.owned(0) == 1
    assert index.size().pages == 1


def test_events_told_twice_count_once():
    index = PrefixIndex()
    for _ in range(3):
        index.apply(0, 1, True, LONG[:4])
    assert index.owned(0) == 4
    index.apply(0, 1, False, LONG[:4])
    assert index.size().pages == 0


def test_memory_follows_what_is_owned():
    index = PrefixIndex()
    for epoch in range(1, 20):
        index.apply(0, epoch, True, [bytes([epoch]) + page for page in LONG])
    while not index.sweep(50):
        pass
    assert index.size().pages == len(LONG)
    index.apply(0, 99, True, [])
    while not index.sweep(50):
        pass
    assert index.size().pages == 0
    assert index.size().owners == 1


def test_a_bit_given_to_another_worker_brings_no_old_pages_with_it():
    index = PrefixIndex()
    for slot in range(70):
        index.apply(slot, 1, True, LONG[:slot])
    for slot in range(0, 70, 2):
        index.drop(slot)
    while not index.sweep(7):
        index.apply(100, 1, True, LONG[:3])
    for slot in range(200, 240):
        index.apply(slot, 1, True, [])
    expected = {slot: slot for slot in range(1, 70, 2)}
    assert index.match(LONG) == expected | {100: 3}


def test_sets_of_owners_that_nobody_has_any_more_are_forgotten():
    """Workers that come to a page one by one leave a set behind for each of them."""
    index, rng = PrefixIndex(), random.Random(1)
    for number in range(40_000):
        page = [bytes([number % 7])]
        index.apply(rng.randrange(60), 1, rng.random() < 0.5, page)
    assert len(index._known) < 5000
    assert index.size().pages <= 7


PATHS = [(0,) * 5, (0, 0, 1, 1, 1), (0, 2, 2, 2), (1,) * 6, (1, 1, 1, 0)]
OPERATION = st.tuples(
    st.sampled_from(["own", "own", "own", "evict", "drop", "restart", "sweep"]),
    st.integers(0, 5),
    st.sampled_from(PATHS),
    st.integers(0, 6),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(OPERATION, max_size=60))
def test_random_events_leave_what_a_set_of_pages_a_worker_would_hold(operations):
    index = PrefixIndex()
    epochs = dict.fromkeys(range(6), 1)
    model: dict[int, set[bytes]] = {slot: set() for slot in range(6)}
    gone: set[int] = set()
    for kind, slot, path, number in operations:
        hashes = chain(*path)
        if kind == "own" and slot not in gone:
            index.apply(slot, epochs[slot], True, hashes[:number])
            model[slot].update(hashes[:number])
        elif kind == "evict" and slot not in gone:  # leaf first: all that hang on it go as well
            dead = [p for p in model[slot] if p[: len(hashes[0])] and p.startswith(hashes[0])]
            index.apply(slot, epochs[slot], False, dead)
            model[slot].difference_update(dead)
        elif kind == "drop":
            index.drop(slot)
            model[slot] = set()
            if index.owned(slot) == 0 and epochs[slot]:
                epochs[slot] += 1
        elif kind == "restart":
            epochs[slot] += 1
            index.apply(slot, epochs[slot], True, [])
            model[slot] = set()
        elif kind == "sweep":
            index.sweep(number)
        for other in PATHS:
            hashes = chain(*other)
            expected = {s: d for s, owned in model.items() if (d := depth(owned, hashes))}
            assert index.match(hashes) == expected
        assert [index.owned(s) for s in model] == [len(owned) for owned in model.values()]


def test_a_map_with_holes_promises_no_more_than_the_prompt_has():
    rng = random.Random(7)
    index = PrefixIndex()
    for slot in range(8):
        index.apply(slot, 1, True, rng.sample(LONG, 60))
    for count in range(len(LONG)):
        found = index.match(LONG[:count])
        assert set(found) <= set(range(8))
        assert all(0 < pages <= count for pages in found.values())
