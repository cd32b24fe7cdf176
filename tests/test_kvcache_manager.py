"""The page manager: reservations, sharing, eviction, quarantine."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.reservation import Reservation
from pdmesh.wire.errors import InternalError, InvalidRequest, LeaseGone


class Log:
    """A manager and what its callbacks told."""

    def __init__(self, num_pages: int) -> None:
        self.events: list[tuple[str, bytes]] = []
        self.manager = KvManager(
            num_pages,
            64,
            lambda pages: self.events.extend(("publish", p.page_hash) for p in pages),
            lambda pages: self.events.extend(("evict", p.page_hash) for p in pages),
        )

    def owned(self) -> set[bytes]:
        owned: set[bytes] = set()
        for kind, page_hash in self.events:
            assert (page_hash in owned) == (kind == "evict"), "told twice or out of order"
            (owned.add if kind == "publish" else owned.discard)(page_hash)
        return owned


def chain(*path: int) -> list[bytes]:
    """Hashes along a path of a tree of prefixes."""
    return [bytes(path[: i + 1]) for i in range(len(path))]


def taken(manager: KvManager, hashes: list[bytes], prompt: int, total: int) -> Reservation:
    reservation = manager.reserve(hashes, prompt, total)
    assert reservation is not None
    return reservation


def filled(manager: KvManager, hashes: list[bytes], extra: int = 0) -> Reservation:
    """A reservation whose pages are physical and published."""
    reservation = taken(manager, hashes, len(hashes), len(hashes) + extra)
    reservation.grow(len(hashes) - reservation.matched)
    reservation.publish(0, hashes)
    return reservation


def test_a_second_prompt_matches_the_published_pages_of_the_first():
    log = Log(8)
    first = filled(log.manager, chain(1, 2, 3))
    second = taken(log.manager, chain(1, 2, 9), 3, 4)
    assert second.matched == 2
    assert second.pages == first.pages[:2]
    assert second.remaining == 2
    assert log.manager.check_integrity() == []


def test_no_more_pages_are_matched_than_the_prompt_has():
    log = Log(8)
    filled(log.manager, chain(1, 2, 3)).release()
    assert taken(log.manager, chain(1, 2, 3), 2, 3).matched == 2


def test_match_pins_nothing():
    log = Log(2)
    filled(log.manager, chain(1, 2)).release()
    assert log.manager.match(chain(1, 2, 3)) == 2
    assert log.manager.status().cached == 2


def test_a_reservation_is_all_or_nothing():
    log = Log(4)
    held = taken(log.manager, [], 1, 3)
    before = log.manager.status()
    assert log.manager.reserve([], 1, 2) is None
    assert log.manager.status() == before
    held.release()
    assert log.manager.reserve([], 1, 2) is not None


def test_a_request_larger_than_the_pool_is_refused_for_good():
    with pytest.raises(InvalidRequest, match="needs 5 pages of 64 tokens, this worker has 4"):
        Log(4).manager.reserve([], 1, 5)


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(InvalidRequest):
        Log(4).manager.reserve([], 3, 2)


def test_growth_within_a_reservation_never_fails_while_others_fill_the_pool():
    log = Log(6)
    filled(log.manager, chain(1, 2, 3)).release()
    promised = taken(log.manager, [], 0, 4)
    assert log.manager.match(chain(1, 2, 3)) == 3, "a promise alone evicts nothing"
    other = taken(log.manager, [], 0, 2)
    assert log.manager.reserve([], 0, 1) is None
    other.grow(2)
    assert len(promised.grow(4)) == 4
    assert log.manager.match(chain(1)) == 0
    assert log.owned() == set()


def test_cached_pages_behind_a_promise_are_not_pinned_by_a_new_prompt():
    log = Log(3)
    filled(log.manager, chain(1, 2, 3)).release()
    promised = taken(log.manager, [], 0, 2)
    assert log.manager.reserve(chain(1, 2, 3), 3, 3) is None
    assert len(promised.grow(2)) == 2


def test_pages_are_evicted_from_the_leaves_in_order_of_last_use():
    log = Log(6)
    filled(log.manager, chain(1, 2, 3)).release()
    filled(log.manager, chain(4, 5)).release()
    taken(log.manager, chain(1, 2, 3), 3, 3).release()
    log.events.clear()
    taken(log.manager, [], 0, 6).grow(6)
    order = [page_hash for _, page_hash in log.events]
    assert order == [*reversed(chain(4, 5)), *reversed(chain(1, 2, 3))]


def test_a_prefix_used_again_outlives_its_old_branches():
    log = Log(5)
    filled(log.manager, chain(1, 2)).release()
    filled(log.manager, chain(7, 8)).release()
    taken(log.manager, chain(1), 1, 1).release()
    taken(log.manager, [], 0, 4).grow(4)
    assert log.owned() == set(chain(1))


def test_publishing_twice_tells_once():
    log = Log(4)
    reservation = filled(log.manager, chain(1, 2))
    reservation.publish(0, chain(1, 2))
    reservation.publish(1, chain(1, 2)[1:])
    assert len(log.events) == 2


def test_a_page_computed_twice_stays_private_and_is_freed_at_release():
    log = Log(4)
    first = taken(log.manager, chain(1), 1, 1)
    second = taken(log.manager, chain(1), 1, 1)
    for reservation in (first, second):
        reservation.grow()
        reservation.publish(0, chain(1))
    assert first.pages != second.pages
    assert len(log.events) == 1
    second.release()
    status = log.manager.status()
    assert (status.used, status.free) == (1, 3)
    assert log.manager.check_integrity() == []


def test_a_page_computed_twice_is_held_once_when_its_first_owner_has_left():
    manager = Log(4).manager
    first, second, third = (taken(manager, chain(1), 1, 1) for _ in range(3))
    for reservation in (first, second, third):
        reservation.grow()
        reservation.publish(0, chain(1))
    assert manager.available == 1
    assert manager.releasable([first]) == manager.releasable([second]) == 1
    first.release()
    assert manager.available == 2
    assert manager.reserve(chain(1), 1, 1).pages in (second.pages, third.pages)
    assert manager.check_integrity() == []
    second.release()
    third.release()
    assert manager.check_integrity() == []


def test_the_last_of_several_that_computed_the_same_pages_can_use_the_whole_pool():
    manager = Log(6).manager
    first, second = (taken(manager, chain(1, 2), 2, 3) for _ in range(2))
    for reservation in (first, second):
        reservation.grow(3)
        reservation.publish(0, chain(1, 2))
    assert not second.extend(1)
    first.release()
    assert second.extend(3)
    assert len(second.grow(3)) == 3
    assert manager.check_integrity() == []
    assert manager.match(chain(1, 2)) == 2


def test_a_child_of_a_page_computed_twice_keeps_its_parent():
    log = Log(4)
    first = taken(log.manager, chain(1), 1, 1)
    second = taken(log.manager, chain(1, 2), 2, 2)
    first.grow()
    second.grow(2)
    first.publish(0, chain(1))
    second.publish(0, chain(1, 2))
    first.release()
    assert log.manager.check_integrity() == []
    taken(log.manager, [], 0, 1).grow()
    assert log.owned() == set(chain(1, 2)), "the parent of a used page was evicted"
    second.release()
    assert log.manager.check_integrity() == []


def test_a_page_computed_again_takes_the_place_of_a_cached_one():
    log = Log(4)
    late = taken(log.manager, chain(1), 1, 1)
    late.grow()
    filled(log.manager, chain(1)).release()
    late.publish(0, chain(1))
    assert len(log.events) == 1
    assert log.manager.status().free == 3
    late.release()
    assert log.manager.match(chain(1)) == 1


def test_parents_are_published_before_children():
    reservation = taken(Log(4).manager, chain(1, 2), 2, 2)
    reservation.grow(2)
    with pytest.raises(InternalError, match="cannot publish"):
        reservation.publish(1, chain(1, 2)[1:])


def test_a_page_has_one_hash():
    log = Log(4)
    reservation = filled(log.manager, chain(1))
    with pytest.raises(InternalError, match="another hash"):
        reservation.publish(0, chain(2))


def test_a_page_that_does_not_exist_yet_is_not_published():
    reservation = taken(Log(4).manager, chain(1), 1, 1)
    with pytest.raises(InternalError, match="cannot publish"):
        reservation.publish(0, chain(1))


def test_growing_past_the_reservation_is_refused():
    reservation = taken(Log(4).manager, [], 0, 1)
    with pytest.raises(InternalError, match="cannot grow"):
        reservation.grow(2)


def test_release_is_idempotent_and_ends_the_reservation():
    log = Log(4)
    reservation = filled(log.manager, chain(1), extra=2)
    reservation.release()
    reservation.release()
    status = log.manager.status()
    assert (status.free, status.cached) == (3, 1)
    with pytest.raises(LeaseGone):
        reservation.grow()
    with pytest.raises(LeaseGone):
        reservation.publish(0, chain(1))
    assert log.manager.num_reservations == 0


def test_quarantined_pages_are_given_to_nobody_until_the_quarantine_ends():
    log = Log(4)
    reservation = taken(log.manager, [], 3, 3)
    pages = reservation.grow(3)
    token = reservation.quarantine(pages[:2])
    reservation.release()
    assert log.manager.status().quarantined == 2
    assert log.manager.reserve([], 0, 3) is None
    assert not set(pages[:2]) & set(taken(log.manager, [], 0, 2).grow(2))
    assert log.manager.end_quarantine(token) == 2
    assert log.manager.end_quarantine(token) == 0
    assert log.manager.status().quarantined == 0
    assert log.manager.check_integrity() == []


def test_a_quarantine_that_ends_before_release_leaves_the_pages_in_use():
    log = Log(4)
    reservation = taken(log.manager, [], 2, 2)
    pages = reservation.grow(2)
    token = reservation.quarantine(pages)
    assert log.manager.end_quarantine(token) == 0
    assert log.manager.status().used == 2
    reservation.release()
    assert log.manager.status().free == 4


def test_a_page_in_two_quarantines_waits_for_both():
    log = Log(4)
    reservation = taken(log.manager, [], 1, 1)
    pages = reservation.grow()
    tokens = [reservation.quarantine(pages), reservation.quarantine(pages)]
    reservation.release()
    assert log.manager.end_quarantine(tokens[0]) == 0
    assert log.manager.status().quarantined == 1
    assert log.manager.end_quarantine(tokens[1]) == 1


def test_a_quarantined_page_cannot_be_published_nor_a_published_one_quarantined():
    log = Log(4)
    reservation = filled(log.manager, chain(1), extra=1)
    with pytest.raises(InternalError, match="unpublished"):
        reservation.quarantine(reservation.pages)
    reservation.quarantine(reservation.grow())
    with pytest.raises(InternalError, match="still be written"):
        reservation.publish(1, chain(1, 2)[1:])


def test_clear_forgets_everything_and_frees_what_is_not_in_use():
    log = Log(6)
    filled(log.manager, chain(1, 2)).release()
    busy = filled(log.manager, chain(3), extra=1)
    log.manager.clear()
    assert log.owned() == set()
    assert log.manager.owned_hashes() == []
    busy.grow()
    busy.publish(1, chain(3, 4)[1:])
    assert log.owned() == set(), "a child was published without its parent"
    busy.release()
    assert log.manager.status().free == 6
    assert log.manager.check_integrity() == []


def test_threads_reserving_at_once_leave_the_books_right():
    log = Log(16)
    done: list[int] = []

    def work(seed: int) -> None:
        for i in range(60):
            path = chain(seed % 2, i % 3, i % 2)
            reservation = log.manager.reserve(path, 3, 4)
            if reservation is None:
                continue
            reservation.grow(reservation.remaining)
            reservation.publish(0, path)
            reservation.release()
        done.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 4
    assert log.manager.check_integrity() == []
    assert log.owned() == set(log.manager.owned_hashes())
    assert log.manager.status().used == 0


def test_a_fork_shares_pages_and_takes_part_of_the_promise():
    log = Log(8)
    parent = filled(log.manager, chain(1, 2), extra=4)
    parent.grow()
    child = parent.fork(2, 2)
    assert child.pages == parent.pages[:2]
    assert (parent.remaining, child.remaining) == (1, 2)
    assert not set(child.grow(2)) & set(parent.pages)
    parent.release()
    assert log.manager.check_integrity() == []
    assert log.manager.match(chain(1, 2)) == 2
    assert log.manager.status().used == 4
    child.publish(2, chain(1, 2, 3)[2:])
    child.release()
    assert log.manager.status().cached == 3


def test_a_fork_keeps_what_its_parents_private_pages_hang_on():
    log = Log(8)
    first, second = taken(log.manager, chain(1), 1, 1), taken(log.manager, chain(1), 1, 3)
    for reservation in (first, second):
        reservation.grow()
        reservation.publish(0, chain(1))
    child = second.fork(1, 1)
    first.release()
    second.release()
    child.grow()
    child.publish(1, chain(1, 2)[1:])
    taken(log.manager, [], 0, 5).grow(5)
    assert log.manager.check_integrity() == []
    assert log.owned() == set(chain(1, 2))
    child.release()
    assert log.manager.check_integrity() == []


def test_a_fork_is_refused_for_unpublished_pages_or_where_too_much_is_asked():
    log = Log(6)
    parent = filled(log.manager, chain(1, 2), extra=2)
    parent.grow()
    with pytest.raises(InternalError, match="cannot share 4 of 3"):
        parent.fork(4, 0)
    with pytest.raises(InternalError, match="1 are reserved"):
        parent.fork(1, 2)
    with pytest.raises(InternalError, match="only published"):
        parent.fork(3, 0)
    log.manager.clear()
    token = parent.quarantine(parent.pages[2:])
    with pytest.raises(InternalError, match="still be written"):
        parent.fork(3, 0)
    log.manager.end_quarantine(token)
    child = parent.fork(3, 1)
    parent.release()
    child.release()
    assert log.manager.status().free == 6


def test_a_promise_grows_where_there_is_room_and_shrinks():
    log = Log(4)
    one, two = taken(log.manager, [], 0, 1), taken(log.manager, [], 0, 2)
    assert one.extend(1)
    assert not two.extend(1)
    assert (one.remaining, two.remaining) == (2, 2)
    one.shrink(2)
    assert two.extend(2)
    with pytest.raises(InternalError):
        one.shrink(1)
    assert log.manager.check_integrity() == []


def test_what_a_release_would_make_available_counts_shared_pages_for_all_holders_together():
    log = Log(8)
    parent = filled(log.manager, chain(1, 2), extra=3)
    parent.grow()
    child = parent.fork(2, 1)
    assert log.manager.releasable([child]) == 1
    assert log.manager.releasable([parent]) == 2
    assert log.manager.releasable([parent, child]) == 5
    before = log.manager.available
    parent.release()
    child.release()
    assert log.manager.available == before + 5


def test_the_page_table_follows_growth():
    reservation = taken(Log(4).manager, [], 0, 3)
    for count in (1, 2):
        reservation.grow(count)
        assert list(reservation.page_table) == reservation.pages
        assert reservation.num_pages == len(reservation.pages)


def test_pages_are_unchanged_only_while_nobody_else_had_them():
    log = Log(3)
    reservation = filled(log.manager, chain(1, 2))
    stamps = log.manager.stamps(reservation.pages)
    reservation.release()
    assert log.manager.unchanged(chain(1, 2), stamps) == 2
    taken(log.manager, [], 0, 2).grow(2)  # evicts the leaf
    assert log.manager.unchanged(chain(1, 2), stamps) == 1
    log = Log(1)
    first = filled(log.manager, chain(1))
    stamps = log.manager.stamps(first.pages)
    first.release()
    taken(log.manager, [], 0, 1).grow()
    log.manager._live.copy().pop().release()
    filled(log.manager, chain(1)).release()  # the same page, the same hash, computed anew
    assert log.manager.match(chain(1)) == 1
    assert log.manager.unchanged(chain(1), stamps) == 0


PATHS = [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (1,), (1, 0), (1, 0, 0)]


class Oracle:
    """Random operations on a manager; knows what each page holds, and so what it may be used for.

    An operation is three bytes: which one, and two arguments.
    """

    def __init__(self) -> None:
        self.log = Log(9)
        self.manager = self.log.manager
        self.live: list[tuple[Reservation, list[bytes]]] = []
        self.contents: dict[int, bytes | None] = {}
        self.quarantined: dict[int, set[int]] = {}

    def run(self, program: bytes) -> None:
        operations = [self.reserve] * 3 + [self.grow] * 4 + [self.publish] * 4
        operations += [self.release] * 3 + [self.quarantine, self.end_quarantine]
        operations += [self.fork] * 2 + [self.extend, self.shrink]
        for kind, first, second in zip(*[iter(program)] * 3, strict=False):
            if kind == 255:
                self.manager.clear()
                assert self.manager.owned_hashes() == []
            else:
                operations[kind % len(operations)](first, second)
            self.check()

    def pick(self, index: int) -> tuple[Reservation, list[bytes]]:
        return self.live[index % len(self.live)]

    def barred(self) -> set[int]:
        return set().union(*self.quarantined.values())

    def reserve(self, path: int, growth: int) -> None:
        hashes = chain(*PATHS[path % len(PATHS)])
        prompt = len(hashes) + growth % 2
        total = prompt + growth % 3
        before = self.manager.status()
        owned = self.manager.match(hashes)
        reservation = self.manager.reserve(hashes, prompt, total)
        if reservation is None:
            assert before.free + before.cached < total, "refused with room left"
            assert self.manager.status() == before
            return
        assert reservation.matched == owned
        assert [self.contents[page] for page in reservation.pages] == hashes[:owned]
        self.live.append((reservation, hashes))

    def grow(self, index: int, count: int) -> None:
        if not self.live:
            return
        reservation, _ = self.pick(index)
        in_use = {page for other, _ in self.live for page in other.pages}
        pages = reservation.grow(min(1 + count % 4, reservation.remaining))
        assert not (in_use | self.barred()) & set(pages), "a page in use was given away"
        self.contents.update(dict.fromkeys(pages))

    def publish(self, index: int, count: int) -> None:
        if not self.live:
            return
        reservation, hashes = self.pick(index)
        pages, start, barred = reservation.pages, reservation.published, self.barred()
        end = start
        while end < min(len(pages), len(hashes), start + 1 + count % 4):
            if pages[end] in barred:
                break
            self.contents[pages[end]] = hashes[end]
            end += 1
        reservation.publish(start, hashes[start:end])

    def fork(self, index: int, count: int) -> None:
        if not 0 < len(self.live) < 6:
            return
        reservation, hashes = self.pick(index)
        pages = reservation.pages
        shared = min(reservation.published, count % 4)
        child = reservation.fork(shared, min(reservation.remaining, count // 4 % 3))
        assert child.pages == pages[:shared]
        self.live.append((child, hashes))

    def extend(self, index: int, count: int) -> None:
        if self.live:
            reservation, _ = self.pick(index)
            room = self.manager.available
            assert reservation.extend(count % 3) == (count % 3 <= room)

    def shrink(self, index: int, count: int) -> None:
        if self.live:
            reservation, _ = self.pick(index)
            reservation.shrink(min(count % 3, reservation.remaining))

    def quarantine(self, index: int, count: int) -> None:
        if not self.live:
            return
        reservation, _ = self.pick(index)
        pages = reservation.pages[reservation.published :][count % 2 :]
        pool, cache = self.manager._pool, self.manager._cache
        pages = [p for p in pages if pool.pins(p) == 1 and cache.hash_of(p) is None]
        self.quarantined[reservation.quarantine(pages)] = set(pages)

    def end_quarantine(self, index: int, _: int) -> None:
        if self.quarantined:
            token = sorted(self.quarantined)[index % len(self.quarantined)]
            del self.quarantined[token]
            self.manager.end_quarantine(token)

    def release(self, index: int, twice: int) -> None:
        if not self.live:
            return
        reservation, hashes = self.pick(index)
        self.live.remove((reservation, hashes))
        room = self.manager.available + self.manager.releasable([reservation])
        for _ in range(1 + twice % 2):
            reservation.release()
        assert self.manager.available == room

    def check(self) -> None:
        assert self.manager.check_integrity() == []
        owned = set(self.manager.owned_hashes())
        assert owned == self.log.owned()
        assert all(len(h) == 1 or h[:-1] in owned for h in owned), "a child without its parent"

    def finish(self) -> None:
        for reservation, _ in self.live:
            reservation.release()
        for token in self.quarantined:
            self.manager.end_quarantine(token)
        self.check()
        status = self.manager.status()
        assert status.free + status.cached == status.total, "pages were lost"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(min_size=600, max_size=900))
def test_random_operations_keep_the_books_right_and_never_share_wrong_contents(program):
    oracle = Oracle()
    oracle.run(program)
    oracle.finish()
