"""A worker's books and a router's view of partitions, over models and a real server."""

import secrets
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.layout import Layout, Row, mark_of, unpack_row, xor_of
from pdmesh.registry.ledger import Fenced, Ledger, Words, digests
from pdmesh.registry.partitions import Partitions
from pdmesh.registry.store import PageCall, Store, StoreUnavailable
from pdmesh.simulation.partition import PartitionModel
from pdmesh.wire.hashes import SEGMENT_PAGES, OwnedPage, placed

LAYOUT = Layout(4, 8)


def chain(name: int, size: int) -> list[OwnedPage]:
    return placed([blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(size)])


PAGES = [page for name in range(6) for page in chain(name, 20)]
words = st.tuples(
    st.just("words"), st.sets(st.integers(0, len(PAGES) - 1), min_size=1), st.booleans()
)
sends = st.tuples(st.just("send"), st.lists(st.sampled_from(["okay", "lost", "never"]), max_size=4))
losses = st.tuples(st.just("loss"), st.integers(0, 3), st.sampled_from(("wiped", "older")))


class Books:
    """A worker with four partitions that lose calls, answers and their last writes."""

    def __init__(self) -> None:
        self.parts = [PartitionModel() for _ in range(4)]
        self.owned: dict[int, OwnedPage] = {}
        self.words = Words(1_000)
        self.epoch = 10
        self.ledger = Ledger(LAYOUT, 3, self.epoch)

    def register(self, floor: int) -> None:
        self.epoch = max(self.epoch, floor) + 1
        self.words.begin(lambda: list(self.owned.values()))
        self.ledger = Ledger(LAYOUT, 3, self.epoch)

    def tell(self, numbers: set[int], owned: bool) -> None:
        changed = [n for n in sorted(numbers) if (n in self.owned) != owned]
        for n in changed:
            if owned:
                self.owned[n] = PAGES[n]
            else:
                del self.owned[n]
        self.words.add([PAGES[n] for n in changed], owned)

    def send(self, fates: list[str]) -> int:
        """One round; how many calls there were."""
        self.ledger.add(self.words.take())
        calls = self.ledger.calls()
        try:
            for i, call in enumerate(calls):
                fate = fates[i] if i < len(fates) else "okay"
                if fate == "never":
                    continue
                answer = self.parts[call.partition].call(call.name, call.buckets, call.args)
                if fate == "okay":
                    self.ledger.answered(call, answer)
        except Fenced as error:
            self.register(error.epoch)
            return 1
        return len(calls)

    def audit(self) -> bool:
        for call in self.ledger.audit_calls():
            answer = self.parts[call.partition].call(call.name, call.buckets, call.args)
            if self.ledger.differs(call, unpack_row(answer) if answer else None):
                self.register(0)
                return False
        return True


@settings(deadline=None)
@given(st.lists(st.one_of(words, words, sends, sends, losses), max_size=30))
def test_whatever_is_lost_the_store_ends_with_what_the_worker_owns(steps):
    books, before = Books(), [[] for _ in range(4)]
    for step in steps:
        if step[0] == "words":
            books.tell(step[1], step[2])
        elif step[0] == "send":
            books.send(step[1])
        elif step[2] == "wiped":
            books.parts[step[1]] = PartitionModel()
        elif before[step[1]]:
            books.parts[step[1]] = _copy(before[step[1]][0])
        for number, part in enumerate(books.parts):
            before[number] = [*before[number][-2:], _copy(part)]
    for _ in range(4):
        while books.send([]):
            pass
        if books.audit():
            break
    else:
        raise AssertionError("no rest")
    assert books.ledger.settled
    wanted: list[set[bytes]] = [set() for _ in range(4)]
    for page in books.owned.values():
        wanted[LAYOUT.place(page.anchor).partition].add(mark_of(page.page_hash))
    assert [part.owned(3) for part in books.parts] == wanted
    assert digests(LAYOUT, books.owned.values()) == [(len(own), xor_of(own)) for own in wanted]


def _copy(part: PartitionModel) -> PartitionModel:
    copy = PartitionModel()
    copy.rows = dict(part.rows)
    copy.records = {
        bucket: {mark: dict(owners) for mark, owners in pages.items()}
        for bucket, pages in part.records.items()
    }
    copy.events = list(part.events)
    return copy


def test_a_repeated_call_keeps_its_number_and_its_pages():
    books = Books()
    books.tell({0, 1}, True)
    books.send([])
    (first,) = books.ledger.calls()
    books.tell({2, 3}, True)
    books.ledger.add(books.words.take())
    assert books.ledger.calls() == [first]


def test_a_worker_that_retires_leaves_no_page():
    books = Books()
    books.tell(set(range(50)), True)
    while books.send([]):
        pass
    books.ledger.retire()
    while books.send([]):
        pass
    assert all(part.owned(3) == set() for part in books.parts)


def test_words_beyond_the_limit_are_dropped_and_that_is_said():
    found = Words(3)
    found.add(PAGES[:3], True)
    assert not found.overflowed
    found.add(PAGES[3:4], True, waiting=0)
    assert found.overflowed
    assert found.take() == []
    assert found.begin(lambda: PAGES[:9])
    assert [page for page, _ in found.take()] == PAGES[:9]


def test_a_partition_that_forgot_the_worker_or_has_other_pages_differs():
    ledger = Ledger(LAYOUT, 3, 10)
    call = PageCall("digest", 0, (), (3,))
    assert "forgotten" in ledger.differs(call, None)
    assert ledger.differs(call, Row(10, 1, 0, 0, 0)) == ""
    for row in (Row(11, 1, 0, 0, 0), Row(10, 1, 1, 0, 0), Row(10, 1, 0, 1, 0), Row(10, 1, 0, 0, 1)):
        assert ledger.differs(call, row)


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


@pytest.fixture
async def store(server):
    client = Store(f"{server.url}?partitions=4", secrets.token_hex(4))
    yield client
    await client.close()


async def told(store: Store, ledger: Ledger, pages: list[OwnedPage], owned: bool = True) -> None:
    ledger.add((page, owned) for page in pages)
    while calls := ledger.calls():
        for call, answer in zip(calls, await store.many(calls), strict=True):
            ledger.answered(call, answer)


async def warm(view: Partitions) -> None:
    while view.cold:
        await view.load()


def prompt(pages: list[OwnedPage]) -> tuple[bytes, ...]:
    return tuple(page.page_hash for page in pages)


async def test_prefixes_end_where_an_owner_stops_also_in_the_middle_of_a_segment(store):
    pages = chain(1, 40)
    for slot, size in ((1, 40), (2, 33), (3, 16), (4, 5)):
        await told(store, Ledger(store.layout, slot, 10), pages[:size])
    await told(store, Ledger(store.layout, 5, 10), pages[SEGMENT_PAGES:])  # lacks the beginning
    await told(store, Ledger(store.layout, 6, 9), pages)  # of an epoch that does not count
    view = Partitions(store, store.layout)
    owners = {slot: (f"w{slot}", 10) for slot in range(1, 7)}
    assert view.prefixes(prompt(pages), owners) == {}
    await warm(view)
    wanted = {"w1": 40, "w2": 33, "w3": 16, "w4": 5}
    assert view.prefixes(prompt(pages), owners) == wanted
    assert await view.lookup(prompt(pages), owners) == wanted
    assert view.prefixes(prompt(pages[:4]), owners) == dict.fromkeys(wanted, 4)
    assert view.prefixes(prompt(chain(2, 3)), owners) == {}


async def test_a_gap_makes_one_partition_be_read_afresh_and_what_was_known_stays_in_use(store):
    pages = chain(1, 8)
    ledger, owners = Ledger(store.layout, 1, 10), {1: ("w", 10)}
    await told(store, ledger, pages[:2])
    view = Partitions(store, store.layout)
    await warm(view)
    for page in pages[2:]:
        await told(store, ledger, [page])
    number = store.layout.place(pages[0].anchor).partition
    await store.execute("XTRIM", store.keys.page_events(number), "MAXLEN", 1)
    view.take(await store.read(view.cursors(), 0))
    assert view.cold == 1
    assert store.keys.page_events(number) not in view.cursors()
    assert view.prefixes(prompt(pages), owners) == {"w": 2}
    await warm(view)
    assert view.prefixes(prompt(pages), owners) == {"w": 8}


async def test_events_that_come_while_a_partition_is_read_are_not_lost(store):
    pages = chain(1, 8)
    ledger, owners = Ledger(store.layout, 1, 10), {1: ("w", 10)}
    await told(store, ledger, pages[:4])
    view, many = Partitions(store, store.layout), store.many

    async def many_and_more(calls):
        answers = await many(calls)
        if calls and calls[0].name == "position":
            store.many = many
            await told(store, ledger, pages[4:])
            await told(store, ledger, pages[6:], owned=False)
        return answers

    store.many = many_and_more
    await warm(view)
    view.take(await store.read(view.cursors(), 0))
    assert view.prefixes(prompt(pages), owners) == {"w": 6}


async def test_what_a_fenced_worker_owned_is_gone_at_once_and_cleared_a_little_at_a_time(store):
    """In the index of a router; the store has its own sweep."""
    pages = chain(1, 40)
    for slot, size in ((1, 40), (2, 20)):
        await told(store, Ledger(store.layout, slot, 10), pages[:size])
    view = Partitions(store, store.layout)
    await warm(view)
    indexes = [part.feed._index for part in view._parts]

    def held():
        return sum(index.size().pages for index in indexes)

    fences = [PageCall("fence", number, (), (1, 11)) for number in range(4)]
    await store.many(fences)
    view.take(await store.read(view.cursors(), 0))
    owners = {1: ("w1", 11), 2: ("w2", 10)}
    assert view.prefixes(prompt(pages), owners) == {"w2": 20}
    assert held() == 40
    view.tidy(10)
    assert held() in range(30, 41)
    for _ in range(20):
        view.tidy(10)
    assert held() == 20
    assert not any(index.unswept for index in indexes)
    assert view.prefixes(prompt(pages), owners) == {"w2": 20}


async def test_a_partition_that_does_not_answer_is_behind_and_in_use(store):
    pages = chain(1, 8)
    await told(store, Ledger(store.layout, 1, 10), pages)
    view, many = Partitions(store, store.layout), store.many
    await warm(view)
    assert view.behind == 0

    async def silent(calls):
        return [StoreUnavailable("no") for _ in calls]

    store.many = silent
    await view.check(4)
    assert (view.cold, view.behind) == (0, 4)
    assert view.prefixes(prompt(pages), {1: ("w", 10)}) == {"w": 8}
    store.many = many
    await view.check(4)
    assert view.behind == 0
