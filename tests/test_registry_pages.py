"""The functions of a partition against a plain model, on a real server."""

import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.feed import EventsMissing, PartitionFeed, Position, read_position
from pdmesh.registry.index import PrefixIndex
from pdmesh.registry.layout import (
    Layout,
    PageEvent,
    Row,
    mark_of,
    pack_event,
    pack_group,
    pack_owner,
    pack_row,
    split,
    unpack_event,
    unpack_hits,
    unpack_owner,
    unpack_row,
    xor_of,
)
from pdmesh.registry.partitions import dump_calls
from pdmesh.registry.store import PageCall, Store, StoreUnavailable
from pdmesh.simulation.partition import PartitionModel
from pdmesh.wire.errors import ConfigError

SLOTS, BUCKETS, MARKS = (0, 1, 65_535), (0, 99, 1_000), 12
EMPTY = Position("0-0", {}, b"")


def mark(number: int) -> bytes:
    return bytes([number * 17 % 256]) * 3 + number.to_bytes(4, "big")


EVERY_PAGE = tuple(
    pack_group(bucket, [mark(bucket + n) for n in range(MARKS)]) for bucket in BUCKETS
)


PATIENT = "socket_connect_timeout=60&socket_timeout=60"
"""For a loaded machine."""


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


marks = st.lists(st.integers(0, MARKS - 1), min_size=1, max_size=MARKS, unique=True)
groups = st.dictionaries(st.sampled_from(BUCKETS), marks, min_size=1)
epochs = st.sampled_from(("stale", "future", "current", "current", "current", "current"))
seqs = st.sampled_from((-1, 0, 1, 1, 1, 1, 1, 2))
operations = st.one_of(
    st.tuples(st.just("fence"), st.sampled_from(SLOTS), st.integers(-1, 2)),
    st.tuples(st.just("publish"), st.sampled_from(SLOTS), epochs, seqs, groups),
    st.tuples(st.just("evict"), st.sampled_from(SLOTS), epochs, seqs, groups),
    st.tuples(st.just("sweep"), st.sets(st.sampled_from(BUCKETS), min_size=1)),
)


def call_of(operation, model: PartitionModel) -> PageCall:
    """The call that an operation means now."""
    if operation[0] == "sweep":
        chosen = tuple(sorted(operation[1]))
        return PageCall("sweep", 3, chosen, chosen)
    op, slot = operation[:2]
    row = model.rows.get(slot, Row(10, 0, 0, 0, 0))
    if op == "fence":
        return PageCall("fence", 3, (), (slot, row.epoch + operation[2]))
    _, _, epoch, seq, pages = operation
    epoch = row.epoch + {"stale": -1, "future": 1, "current": 0}[epoch]
    packed = [pack_group(bucket, [mark(bucket + n) for n in own]) for bucket, own in pages.items()]
    return PageCall(op, 3, tuple(pages), (slot, epoch, row.seq + seq, *packed))


async def state_of(store: Store) -> tuple[Position, dict[int, set[bytes]]]:
    """Position of partition 3, and slot -> marks of its live records."""
    position = read_position(await store.one(PageCall("position", 3)))
    found: dict[int, set[bytes]] = {}
    for answer in await store.many(dump_calls(3, position, Layout(16))):
        for slot, owned in zip(answer[::2], answer[1::2], strict=True):
            own = set(split(owned))
            assert not found.setdefault(slot, set()) & own
            found[slot] |= own
    return position, found


async def records(store: Store, buckets) -> dict[int, dict[bytes, dict[int, int]]]:
    """All records, dead ones too, as the model keeps them."""
    found: dict[int, dict[bytes, dict[int, int]]] = {}
    for bucket in buckets:
        flat = await store.execute("HGETALL", store.keys.bucket(3, bucket))
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        for page, value in pairs:
            owners = [unpack_owner(value[i : i + 4]) for i in range(0, len(value), 4)]
            assert len(dict(owners)) == len(owners)
            found.setdefault(bucket, {})[page] = dict(owners)
    return found


async def follow(store: Store, feed: PartitionFeed) -> None:
    key = store.keys.page_events(3)
    while entries := (await store.read({key: feed.cursor}, 0)).get(key):
        for entry_id, fields in entries:
            feed.apply(entry_id, unpack_event(fields[b"b"]))


async def feed_from(store: Store) -> PartitionFeed:
    position = read_position(await store.one(PageCall("position", 3)))
    feed = PartitionFeed(position, PrefixIndex())
    for answer in await store.many(dump_calls(3, position, Layout(16))):
        feed.load(answer)
    return feed


def known(feed: PartitionFeed) -> dict[int, set[bytes]]:
    """Slot -> marks; each is asked for by itself, so no order of pages is assumed."""
    found: dict[int, set[bytes]] = {}
    for page in (mark(bucket + n) for bucket in BUCKETS for n in range(MARKS)):
        for slot, _, _ in feed.match([page]):
            found.setdefault(slot, set()).add(page)
    return found


async def check(server: EmbeddedStore, steps: list, cold_at: set[int]) -> None:
    """Runs the operations on server and model; compares all there is to see."""
    store, model = Store(f"{server.url}?{PATIENT}", secrets.token_hex(4)), PartitionModel()
    feeds = [PartitionFeed(EMPTY, PrefixIndex())]
    try:
        for number, operation in enumerate(steps):
            if number in cold_at:
                feeds.append(await feed_from(store))
            call = call_of(operation, model)
            assert await store.one(call) == model.call(call.name, call.buckets, call.args)
            count = PageCall("copies", 3, BUCKETS, EVERY_PAGE)
            assert await store.one(count) == model.call(count.name, count.buckets, count.args)
            position, owned = await state_of(store)
            assert position.rows == model.rows
            assert owned == {s: own for s in model.rows if (own := model.owned(s))}
            for slot, row in position.rows.items():
                own = owned.get(slot, set())
                assert (row.pages, row.xor) == (len(own), xor_of(own))
            assert sorted(Layout(16).buckets(position.bitmap)) == sorted(model.records)
            for feed in feeds[:2]:
                await follow(store, feed)
                feed.expect(position)
                assert known(feed) == owned
        for feed in feeds:
            await follow(store, feed)
            feed.expect(position)
            assert known(feed) == owned
        everything = tuple(sorted(model.records))
        if everything:
            await store.one(PageCall("sweep", 3, everything, everything))
        live = {
            bucket: pages
            for bucket, before in model.records.items()
            if (
                pages := {
                    page: kept
                    for page, owners in before.items()
                    if (kept := {s: t for s, t in owners.items() if model.rows[s].tag == t})
                }
            )
        }
        assert await records(store, BUCKETS) == live
    finally:
        await store.close()


slow_is_fine = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@slow_is_fine
@given(st.lists(operations, min_size=1, max_size=40), st.sets(st.integers(0, 39), max_size=3))
async def test_random_calls_leave_answers_state_digests_and_events_as_a_plain_model_says(
    server, steps, cold_at
):
    await check(server, steps, cold_at)


@pytest.mark.full
@settings(parent=slow_is_fine, max_examples=400)
@given(st.lists(operations, min_size=1, max_size=120), st.sets(st.integers(0, 119), max_size=5))
async def test_many_more_random_calls(server, steps, cold_at):
    await check(server, steps, cold_at)


@pytest.fixture
async def store(server):
    client = Store(f"{server.url}?{PATIENT}", secrets.token_hex(4))
    yield client
    await client.close()


async def publish(store: Store, slot: int, epoch: int, seq: int, *numbers: int, op="publish"):
    group = pack_group(9, [mark(n) for n in numbers])
    return await store.one(PageCall(op, 3, (9,), (slot, epoch, seq, group)))


async def fence(store: Store, slot: int, epoch: int):
    return await store.one(PageCall("fence", 3, (), (slot, epoch)))


async def test_every_refusal_has_its_name(store):
    assert await publish(store, 1, 10, 1, 1) == [b"UNREGISTERED"]
    assert await fence(store, 1, 10) == [b"OK"]
    assert await fence(store, 1, 10) == [b"SAME"]
    assert await fence(store, 1, 9) == [b"FENCED", b"10"]
    assert await publish(store, 1, 10, 1, 1) == [b"OK"]
    assert await publish(store, 1, 10, 1, 1) == [b"DUP", b"1"]
    assert await publish(store, 1, 10, 3, 1) == [b"GAP", b"1"]
    assert await publish(store, 1, 9, 2, 1) == [b"FENCED", b"10"]
    assert await publish(store, 1, 11, 2, 1) == [b"FUTURE", b"10"]


async def leading(store: Store, *numbers: int) -> dict[int, tuple[int, int]]:
    group = pack_group(9, [mark(n) for n in numbers])
    hits = unpack_hits(await store.one(PageCall("lookup", 3, (9,), (group,))))
    return {hit.slot: (hit.epoch, hit.pages) for hit in hits}


async def test_a_lookup_tells_each_owner_and_how_far_it_goes(store):
    for slot, epoch, owned in ((1, 10, (1, 2, 3)), (2, 20, (1, 2)), (3, 30, (2, 3)), (4, 40, (1,))):
        await fence(store, slot, epoch)
        await publish(store, slot, epoch, 1, *owned)
    assert await leading(store, 1, 2, 3, 4) == {1: (10, 3), 2: (20, 2), 4: (40, 1)}
    assert await leading(store, 1) == {1: (10, 1), 2: (20, 1), 4: (40, 1)}
    assert await leading(store, 7, 1) == {}


async def test_the_living_owners_of_each_page_are_counted(store):
    for slot, owned in ((1, (1, 2, 3)), (2, (1, 2)), (3, (1,))):
        await fence(store, slot, 10)
        await publish(store, slot, 10, 1, *owned)
    groups = (pack_group(9, [mark(n) for n in (3, 1, 7)]), pack_group(4, [mark(1)]))
    assert list(await store.one(PageCall("copies", 3, (9, 4), groups))) == [1, 3, 0, 0]
    await fence(store, 1, 11)
    assert list(await store.one(PageCall("copies", 3, (9, 4), groups))) == [0, 2, 0, 0]


async def test_a_fence_ends_all_records_of_a_slot_and_of_no_other(store):
    for slot in (1, 2):
        await fence(store, slot, 10)
        await publish(store, slot, 10, 1, *range(8))
    await fence(store, 1, 11)
    assert await leading(store, 0, 1) == {2: (10, 2)}
    await publish(store, 1, 11, 1, 0)
    assert await leading(store, 0, 1) == {1: (11, 1), 2: (10, 2)}


async def test_the_largest_batch_fits_in_one_call(store):
    await fence(store, 1, 10)
    assert await publish(store, 1, 10, 1, *range(1_000)) == [b"OK"]
    assert await publish(store, 1, 10, 2, *range(10, 1_000), op="evict") == [b"OK"]
    _, owned = await state_of(store)
    assert owned == {1: {mark(n) for n in range(10)}}


async def test_a_page_of_one_owner_takes_no_more_than_20_bytes(store):
    """Without the key of its bucket, which 48 pages share when the store is full."""
    await fence(store, 1, 10)
    for bucket in range(50):
        group = pack_group(bucket, [secrets.token_bytes(7) for _ in range(48)])
        await store.one(PageCall("publish", 3, (bucket,), (1, 10, bucket + 1, group)))
    sizes = [
        await store.execute("MEMORY", "USAGE", store.keys.bucket(3, bucket)) for bucket in range(50)
    ]
    assert sum(sizes) / (50 * 48) <= 20


async def test_a_reader_whose_events_are_trimmed_notices(store):
    feed = await feed_from(store)
    await fence(store, 1, 10)
    for seq in range(1, 4):
        await publish(store, 1, 10, seq, seq)
    await store.execute("XTRIM", store.keys.page_events(3), "MAXLEN", 1)
    with pytest.raises(EventsMissing):
        await follow(store, feed)


async def test_a_reader_notices_a_history_that_is_not_the_one_it_saw(store):
    await fence(store, 1, 10)
    feed = await feed_from(store)
    await publish(store, 1, 10, 1, 1)
    await follow(store, feed)
    feed.expect(read_position(await store.one(PageCall("position", 3))))
    await store.execute("DEL", *store.keys.partition(3))
    with pytest.raises(EventsMissing):
        feed.expect(read_position(await store.one(PageCall("position", 3))))


async def test_a_reader_notices_that_only_events_of_another_slot_were_trimmed(store):
    feed = await feed_from(store)
    await fence(store, 1, 10)
    await fence(store, 2, 10)
    await store.execute("XTRIM", store.keys.page_events(3), "MAXLEN", 1)
    await follow(store, feed)
    with pytest.raises(EventsMissing):
        feed.expect(read_position(await store.one(PageCall("position", 3))))


async def test_a_check_that_is_ahead_of_the_events_waits_for_them(store):
    feed = await feed_from(store)
    await fence(store, 1, 10)
    feed.expect(read_position(await store.one(PageCall("position", 3))))
    await follow(store, feed)
    assert feed.epoch_of(1) == 10


async def test_the_functions_of_partitions_come_back_after_the_store_forgot_them(store):
    await fence(store, 1, 10)
    await store.execute("FUNCTION", "FLUSH")
    answers = await store.many([PageCall("fence", p, (), (1, 11)) for p in range(4)])
    assert answers == [[b"OK"]] * 4


async def test_a_store_that_is_down_gives_an_error_in_place_of_each_answer():
    client = Store("redis://127.0.0.1:1", "m")
    answers = await client.many([PageCall("position", number) for number in range(3)])
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
    await client.close()


@given(
    st.sampled_from(("fence", "publish", "evict")),
    st.integers(0, 65_535),
    st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.binary(max_size=64),
)
def test_packed_events_rows_and_owners_come_back(op, slot, epoch, seq, owned):
    event = PageEvent(op, slot, epoch, seq, owned)
    assert unpack_event(pack_event(event)) == event
    row = Row(epoch, slot, seq, len(owned), seq)
    assert unpack_row(pack_row(row)) == row
    assert unpack_owner(pack_owner(slot, slot)) == (slot, slot)


@pytest.mark.parametrize("count", [1, 2, 16, 256, 4_096])
def test_a_segment_lies_in_one_bucket_and_prompts_that_share_pages_find_them(count):
    layout = Layout(count)
    chain = [secrets.token_bytes(16) for _ in range(40)]
    segments = list(layout.segments(chain))
    assert [len(segment.marks) for segment in segments] == [16, 16, 8]
    assert [m for segment in segments for m in segment.marks] == [mark_of(h) for h in chain]
    assert [s.place for s in segments] == [layout.place(chain[i]) for i in (0, 16, 32)]
    parts = list(layout.segments(chain[:20]))
    assert parts == [segments[0], (segments[1].place, segments[1].marks[:4])]
    for segment in segments:
        assert 0 <= segment.place.partition < count
        assert 0 <= segment.place.bucket < 2**layout.bucket_bits


@pytest.mark.parametrize("count", [0, 3, -4, 8_192])
def test_a_number_of_partitions_that_cannot_be_is_one_sentence(count):
    with pytest.raises(ConfigError, match="power of two"):
        Layout(count)
