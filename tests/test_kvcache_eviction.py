"""Which cached page goes: both policies under the same books, and what the second one learns."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kvcache_manager import Oracle

from pdmesh.kvcache.eviction import WINDOW, Lru, Returns, make_eviction, no_replicas
from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.replicas import ReplicaHints
from pdmesh.kvcache.returns import BUCKETS, ReturnRecord
from pdmesh.wire.errors import InternalError


class Cache:
    """A page manager that whole prompts pass through one by one."""

    def __init__(self, pages: int, eviction: str = "returns", replicated=no_replicas) -> None:
        self.owned: set[bytes] = set()
        self.manager = KvManager(
            pages,
            64,
            lambda found: self.owned.update(page.page_hash for page in found),
            lambda found: self.owned.difference_update(page.page_hash for page in found),
            eviction,
            replicated,
        )

    def use(self, *path: int) -> int:
        """Serves the prompt along a path of a tree; pages that were cached."""
        hashes = [bytes(f"{path[: i + 1]}", "ascii") for i in range(len(path))]
        held = self.manager.reserve(hashes, len(hashes), len(hashes))
        assert held is not None
        held.grow(held.remaining)
        held.publish(0, hashes)
        held.release()
        return held.matched


class ReturnsOracle(Oracle):
    """The manager's property test, on a manager that evicts by returns."""

    def __init__(self) -> None:
        super().__init__()
        self.manager._cache._eviction = Returns(self.manager.num_pages)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(min_size=600, max_size=900))
def test_random_operations_keep_the_books_right_under_returns(program):
    oracle = ReturnsOracle()
    oracle.run(program)
    oracle.finish()


@pytest.mark.parametrize("name", ["lru", "returns"])
def test_a_long_random_load_leaves_right_books_and_no_growing_memory(name):
    cache, rng = Cache(64, name), random.Random(3)
    for i in range(3000):
        chat = rng.randrange(40)
        cache.use(chat, *range(rng.randrange(1, 9)), *([1000 + i] if rng.random() < 0.3 else []))
    assert cache.manager.check_integrity() == []
    assert set(cache.manager.owned_hashes()) == cache.owned
    eviction = cache.manager._cache._eviction
    if isinstance(eviction, Returns):
        entries = sum(len(leaves.oldest) for leaves in eviction._leaves.values())
        assert entries <= 2 * 64 + 64 + 1
        assert len(eviction._ghosts) <= 8 * 64
    else:
        assert len(eviction._leaves) <= 2 * 64 + 65


def mixed(name: str, seed: int = 1) -> float:
    """Hits of chats that go on for a while among prompts that never come back."""
    cache, rng = Cache(400, name), random.Random(seed)
    chats = dict.fromkeys(range(12), 4)
    turn = dict.fromkeys(chats, 0)
    hits = total = 0
    for step in range(4000):
        if step % 4 == 0:
            chat = step // 4 % 12
            if turn[chat] == 0 or chats[chat] > 24:
                turn[chat] = 1 + step
                chats[chat] = 4
            hits += cache.use(chat, turn[chat], *range(chats[chat]))
            total += chats[chat] + 2
            chats[chat] += 4
        else:
            length = rng.randrange(4, 24)
            cache.use(10**6 + step, *range(length))
            total += length + 1
    assert cache.manager.check_integrity() == []
    return hits / total


def test_chats_that_go_on_are_kept_from_prompts_that_never_come_back():
    assert mixed("returns") > 1.5 * mixed("lru")


def test_pages_leave_from_the_leaves():
    cache, rng = Cache(30), random.Random(5)
    for _ in range(500):
        path = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        cache.use(*path)
        for page in cache.manager.owned_hashes():
            steps = page.decode().strip("(,)").split(", ")
            parents = [tuple(map(int, steps[:i])) for i in range(1, len(steps))]
            assert all(bytes(f"{p}", "ascii") in cache.owned for p in parents)


def test_a_chat_is_known_again_after_its_pages_are_gone():
    eviction = Returns(4)
    for page, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b")):
        eviction.inserted(page, parent)
    eviction.start_release()
    for page in (b"c", b"b", b"a"):
        eviction.released(page)
    for page in (b"c", b"b", b"a"):
        eviction.removed(page)
    for page, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"c")):
        eviction.inserted(page, parent)
    assert eviction._pages[b"d"].turn == 2
    assert eviction._pages[b"a"].turn == 1


def test_where_nothing_can_go_it_says_so():
    for eviction in (Lru(), Returns(4), make_eviction("returns", 9)):
        eviction.inserted(b"a", None)
        with pytest.raises(InternalError, match="no cached page can be evicted"):
            eviction.victim(lambda _: True)
        eviction.start_release()
        eviction.released(b"a")
        eviction.leaf(b"a")
        assert eviction.victim(lambda _: True) == b"a"
        with pytest.raises(InternalError, match="no cached page can be evicted"):
            eviction.victim(lambda _: False)


def test_kinds_that_come_back_more_often_are_worth_more_and_the_overdue_nothing():
    record = ReturnRecord()
    often, seldom = (3, 1), (1, 1)
    for i in range(400):
        for kind, every in ((often, 2), (seldom, 10)):
            record.released(kind)
            if i % every == 0:
                record.returned(kind, 10 + i % 5, with_tip=True)
    assert record.chance(often) == pytest.approx(0.5, abs=0.1)
    assert record.chance(seldom) == pytest.approx(0.1, abs=0.05)
    for age in range(BUCKETS):
        assert record.index(often, age) > record.index(seldom, age) >= 0
    assert record.index(often, BUCKETS) == 0
    assert record.index(often, 9) > record.index(often, 0), "it is about to come back"
    assert record.index(often, 9) > 3 * record.index(often, 20), "it is late"


def pages_of(*path: int) -> set[bytes]:
    return {bytes(f"{path[: i + 1]}", "ascii") for i in range(len(path))}


def with_copies(pages: int, copies: set[bytes]) -> Cache:
    """A cache of which a whole window's leaves count as old."""
    cache = Cache(pages, "lru")
    cache.manager._cache._eviction = Lru(lambda: copies)
    return cache


def test_of_old_pages_those_that_others_have_go_before_last_copies():
    copies: set[bytes] = set()
    cache = with_copies(6, copies)
    for path in ((1, 1), (2, 2), (3, 3)):
        cache.use(*path)
    copies |= pages_of(2, 2) | pages_of(3, 3)
    cache.use(4)
    assert pages_of(2, 2) - cache.owned == {b"(2, 2)"}, "the older copy, from its leaf"
    assert pages_of(1, 1) | pages_of(3, 3) <= cache.owned
    cache.use(5, 5, 5)
    assert pages_of(1, 1) <= cache.owned
    assert not (pages_of(2, 2) | pages_of(3, 3)) & cache.owned
    cache.use(6)
    assert pages_of(1, 1) - cache.owned == {b"(1, 1)"}, "without copies it is the oldest leaf"


def test_a_page_that_others_have_stays_while_a_page_of_its_own_hangs_on_it():
    cache = with_copies(5, pages_of(1, 1))
    cache.use(1, 1, 1)
    for number in (2, 3, 4):
        cache.use(number)
    assert pages_of(1, 1, 1) - cache.owned == {b"(1, 1, 1)"}
    assert cache.manager.check_integrity() == []


@pytest.mark.parametrize(
    ("pages", "window"), [(8, 1), (320, 10), (64 * 32, WINDOW), (4096, WINDOW)]
)
def test_a_copy_used_lately_is_not_given_up_for_an_old_last_copy(pages, window):
    copies: set[bytes] = set()
    cache = Cache(pages, "lru", lambda: copies)
    for number in range(pages):
        cache.use(number)
    copies |= pages_of(window)
    cache.use(pages)
    assert pages_of(0) - cache.owned
    assert pages_of(window) <= cache.owned, "it was not among the oldest"
    cache.use(pages + 1)
    assert pages_of(window) - cache.owned, "now it is"


def test_where_no_copies_are_known_the_order_is_that_of_last_use():
    plain, asked, rng = Cache(40, "lru"), Cache(40, "lru", lambda: {b"unknown"}), random.Random(1)
    for _ in range(1500):
        path = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
        assert plain.use(*path) == asked.use(*path)
        assert plain.owned == asked.owned


class ReplicaOracle(Oracle):
    """The manager's property test, where every other page is said to be elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        cache = self.manager._cache
        cache._eviction = Lru(lambda: {page for page in cache._entries if sum(page) % 2}, window=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(min_size=600, max_size=900))
def test_random_operations_keep_the_books_right_whatever_the_hints_say(program):
    oracle = ReplicaOracle()
    oracle.run(program)
    oracle.finish()


def test_hints_that_are_too_old_say_nothing():
    now = [0.0]
    hints = ReplicaHints(max_age_s=10.0, clock=lambda: now[0])
    assert hints() == frozenset()
    hints.learn([b"a"])
    now[0] = 10.0
    assert hints() == {b"a"}
    now[0] = 10.1
    assert hints() == frozenset()
    hints.learn([])
    assert hints() == frozenset()


def test_nobody_is_asked_about_pages_while_there_is_room():
    cache = Cache(16, "lru")
    for number in range(14):
        cache.use(number)
    assert cache.manager.coming() == []
    cache.use(14)
    assert {page.page_hash for page in cache.manager.coming()} == cache.owned


def test_the_oldest_leaves_and_what_would_follow_them_are_asked_about():
    cache = Cache(1000, "lru")
    cache.use(1, *range(40))
    cache.use(2, 1, 1)
    cache.use(2, 2, 2)
    for number in range(3, 940):
        cache.use(number)
    held = cache.manager.reserve([b"(2,)", b"(2, 1)", b"(2, 1, 1)"], 3, 3)
    found = [page.page_hash for page in cache.manager.coming()]
    assert len(found) == len(set(found))
    path = (1, *range(40))
    assert found[:41] == [bytes(f"{path[:i]}", "ascii") for i in range(41, 0, -1)]
    assert {b"(2, 2, 2)", b"(2, 2)", b"(3,)"} <= set(found)
    assert not {b"(2,)", b"(2, 1)", b"(2, 1, 1)"} & set(found), "in use, or needed by another"
    assert b"(900,)" not in found
    held.release()
    assert Cache(1).manager.coming() == []


def test_of_a_large_cache_a_bounded_number_of_pages_is_asked_about():
    cache = Cache(6000, "lru")
    for chat in range(2):
        cache.use(chat, *range(2999))
    assert len(cache.manager.coming()) == 4096
