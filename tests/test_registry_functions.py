"""The control functions in the store against a plain model, on a real server."""

import asyncio
import random
import secrets

import pytest
import pytest_asyncio

from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.feed import EventsMissing
from pdmesh.registry.keeping import bury
from pdmesh.registry.keys import Keys
from pdmesh.registry.layout import Layout
from pdmesh.registry.membership import Membership
from pdmesh.registry.roster import Roster
from pdmesh.registry.store import Store
from pdmesh.wire.codec import encode
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import WorkerRecord

TTL_MS = 60_000
FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)
NAMES = ("prefill-0", "decode-0", "decode-1")


def record(worker_id: str, instance: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        instance=instance,
        role="decode",
        address="127.0.0.1:1",
        page_format=FORMAT,
        model="tiny",
        vocab_size=16,
        max_context=64,
        capacity_pages=8,
    )


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


@pytest_asyncio.fixture
async def store(server):
    client = Store(server.url, secrets.token_hex(4))
    yield client
    await client.close()


async def register(
    store, worker_id, instance="i", ttl_ms=TTL_MS, takeover=1, state="ready", floor=0
):
    answer = await store.call(
        "register",
        worker_id,
        instance,
        encode(record(worker_id, instance)),
        ttl_ms,
        state,
        takeover,
        secrets.token_hex(8),
        "4x9",
        floor,
    )
    return answer[0], answer[1]


async def keys_of(store: Store) -> set[str]:
    return {key.decode() for key in await store.execute("KEYS", f"pdmesh:{{{store.keys.mesh}:*")}


class Model:
    """What the store should hold: worker -> (epoch, instance, state)."""

    def __init__(self) -> None:
        self.workers: dict[str, tuple[int, str, str]] = {}
        self.last_epoch = 0

    def current(self, worker_id: str) -> int:
        return self.workers[worker_id][0] if worker_id in self.workers else 0


async def random_step(rng: random.Random, store: Store, model: Model, epochs: list[int]) -> None:
    """One random call; checks its answer and applies it to the model."""
    name = rng.choice(NAMES)
    op = rng.choice(("register", "renew", "set_state", "deregister"))
    if op == "register":
        instance, takeover = rng.choice("ab"), rng.randint(0, 1)
        state = rng.choice(("joining", "ready"))
        taken = name in model.workers and model.workers[name][1] != instance and not takeover
        status, value = await register(store, name, instance, TTL_MS, takeover, state)
        assert status == (b"TAKEN" if taken else b"OK")
        if not taken:
            assert int(value) > model.last_epoch
            model.last_epoch = int(value)
            epochs.append(int(value))
            model.workers[name] = (int(value), instance, state)
        return
    epoch = model.current(name) if rng.random() < 0.7 else rng.choice([0, *epochs])
    state = rng.choice(("ready", "draining"))
    args = {"renew": (TTL_MS,), "set_state": (TTL_MS, state), "deregister": ()}[op]
    answer = await store.call(op, name, epoch, *args)
    if epoch == 0 or epoch != model.current(name):
        assert answer == [b"FENCED", str(model.current(name)).encode()]
        return
    assert answer == [b"OK"]
    held = model.workers[name]
    if op == "set_state":
        model.workers[name] = (held[0], held[1], state)
    elif op == "deregister":
        del model.workers[name]


async def check_store(store: Store, model: Model) -> Roster:
    roster = await store.roster()
    assert {n: m[:2] for n, m in roster.members.items()} == {
        n: (w[0], w[2]) for n, w in model.workers.items()
    }
    slots = [listed.slot for listed in roster.members.values()]
    assert len(set(slots)) == len(slots)
    assert not set(slots) & roster.dead.keys()
    for name in NAMES:
        member = await store.member(name)
        assert (member is not None) == (name in model.workers)
        if member is not None:
            assert (member.epoch, member.state) == model.workers[name][::2][:2]
            assert member.record.instance == model.workers[name][1]
            assert member.slot == roster.members[name].slot
    return roster


async def feed(store: Store, view: Membership) -> None:
    key = store.keys.events
    while events := (await store.read({key: f"{view.seq}-0"}, 0)).get(key):
        for entry_id, fields in events:
            view.apply(int(entry_id.partition("-")[0]), fields)


def check_view(view: Membership, model: Model) -> None:
    ready = sorted(n for n, w in model.workers.items() if w[2] == "ready")
    assert [w.worker_id for w in view.workers()] == ready


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_leave_the_store_and_the_events_as_a_plain_model_says(store, seed):
    rng = random.Random(seed)
    model, epochs = Model(), []
    view = Membership(grace_s=0.0, lost_s=0.0)
    view.replace(await store.roster(), [])
    for _ in range(300):
        await random_step(rng, store, model, epochs)
        roster = await check_store(store, model)
        await feed(store, view)
        view.check(roster, now=0.0)
        check_view(view, model)


async def test_a_stale_epoch_changes_nothing(store):
    _, old = await register(store, "decode-0", "a")
    _, new = await register(store, "decode-0", "b")
    before = await store.roster()
    calls = {"renew": (TTL_MS,), "set_state": (TTL_MS, "draining"), "deregister": ()}
    for name, args in calls.items():
        assert await store.call(name, "decode-0", old, *args) == [b"FENCED", new]
    assert await store.roster() == before


async def test_an_epoch_is_above_the_floor_that_a_worker_has_seen(store):
    floor = 8 * 10**15
    _, epoch = await register(store, "decode-0", floor=floor)
    assert int(epoch) == floor + 1


async def test_a_worker_keeps_its_slot_until_it_leaves_and_a_left_slot_is_used_again(store):
    for name in NAMES:
        await register(store, name)
    slots = {name: listed.slot for name, listed in (await store.roster()).members.items()}
    assert sorted(slots.values()) == [0, 1, 2]
    _, epoch = await register(store, "decode-0")
    await store.call("deregister", "decode-0", epoch)
    roster = await store.roster()
    assert roster.dead == {slots["decode-0"]: int(epoch)}
    await register(store, "decode-9")
    roster = await store.roster()
    assert roster.members["decode-9"].slot == slots["decode-0"]
    assert roster.dead == {}


async def test_a_worker_that_left_is_fenced_once_and_then_forgotten(store):
    _, epoch = await register(store, "decode-0")
    await store.call("deregister", "decode-0", epoch)
    roster = await store.roster()
    for _ in range(2):
        await bury(store, roster.layout, roster.dead)
        assert (await store.roster()).dead == {}


async def test_one_router_in_each_period_is_asked_to_sweep(store):
    answers = [(await store.call("may_sweep", None, 60_000))[0] for _ in range(3)]
    assert answers == [1, 0, 0]
    assert (await store.call("may_sweep", None, 0))[0] == 1


async def test_all_processes_follow_the_partitions_of_the_first(server, store):
    await register(store, "decode-0")
    assert store.layout.partitions != 4
    assert (await store.roster()).layout == Layout(4, 9)


async def test_epochs_rise_also_across_a_loss_of_all_data(store):
    _, before = await register(store, "decode-0")
    await store.execute("DEL", *await keys_of(store))
    _, after = await register(store, "decode-0")
    assert int(after) > int(before)


async def until(condition, what: str, tries: int = 3000):
    """Asks again and again; only a failure takes long."""
    for _ in range(tries):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


async def test_a_dead_workers_keys_are_gone_after_its_lease(store):
    _, epoch = await register(store, "decode-0")

    async def gone() -> bool:
        return store.keys.worker("decode-0") not in await keys_of(store)

    assert not await gone()
    assert await store.call("renew", "decode-0", epoch, 150) == [b"OK"]
    await until(gone, "a key of the dead worker remains")
    assert (await store.roster()).members == {}
    assert await store.call("renew", "decode-0", epoch, TTL_MS) == [b"FENCED", b"0"]


async def test_two_meshes_in_one_store_do_not_see_each_other(server, store):
    other = Store(server.url, store.keys.mesh + "x")
    await register(store, "decode-0")
    assert (await other.roster()).members == {}
    await other.close()


async def test_all_keys_that_one_call_needs_share_a_hash_tag():
    keys = Keys("m")
    named = [*keys.shared, keys.worker("decode-0")]
    assert all(key.startswith("pdmesh:{m:ctl}:") for key in named)
    named = [*keys.partition(31), keys.page_events(31), keys.bucket(31, 4711)]
    assert all(key.startswith("pdmesh:{m:1f}:") for key in named)


async def test_the_functions_come_back_after_the_store_forgot_them(store):
    await register(store, "decode-0")
    await store.execute("FUNCTION", "FLUSH")
    assert "decode-0" in (await store.roster()).members


async def test_a_view_that_missed_trimmed_events_asks_for_a_snapshot(store):
    _, epoch = await register(store, "decode-0")
    view = Membership(grace_s=0.0, lost_s=0.0)
    view.replace(await store.roster(), [])
    for number in range(3):
        state = ("draining", "ready")[number % 2]
        assert await store.call("set_state", "decode-0", epoch, TTL_MS, state) == [b"OK"]
    await store.execute("XTRIM", store.keys.events, "MAXLEN", 1)
    with pytest.raises(EventsMissing):
        await feed(store, view)


async def stand_still(store: Store, seconds: float) -> None:
    """As if nothing had been asked of the store for so long."""
    meta, _, *_ = store.keys.shared
    beat = float(await store.execute("HGET", meta, "beat"))
    await store.execute("HSET", meta, "beat", f"{beat - seconds * 1000:.0f}")
    for worker in await store.execute("ZRANGE", store.keys.shared[1], 0, -1):
        await shorten(store, worker.decode(), seconds)


async def shorten(store: Store, worker_id: str, seconds: float) -> None:
    """As if a lease had been given so much earlier."""
    await store.execute("ZINCRBY", store.keys.shared[1], int(-seconds * 1000), worker_id)


async def test_a_lease_does_not_end_while_the_store_stands_still(store):
    epochs = {name: (await register(store, name, ttl_ms=20_000))[1] for name in NAMES[:2]}
    before = await store.roster()
    await stand_still(store, 40)
    assert await store.roster() == before
    await stand_still(store, 40)
    for name, epoch in epochs.items():
        assert await store.call("renew", name, epoch, TTL_MS) == [b"OK"]
    assert await store.roster() == before


async def test_a_lease_that_ended_before_the_store_stood_still_is_over(store):
    for name in NAMES[:2]:
        await register(store, name, ttl_ms=20_000)
    await shorten(store, "decode-0", 30)
    await stand_still(store, 40)
    assert list((await store.roster()).members) == ["prefill-0"]


async def test_a_lease_ends_also_where_calls_are_far_apart(store):
    await register(store, "decode-0", ttl_ms=20_000)
    calls = 0
    while (await store.roster()).members:
        await stand_still(store, 4)
        calls += 1
        assert calls < 60
    assert calls > 20_000 / 4_000  # only a part of each pause counts


async def test_a_lease_that_was_ended_is_not_renewed_and_does_not_hold_the_name(store):
    _, epoch = await register(store, "decode-0", "a")
    await shorten(store, "decode-0", 2 * TTL_MS / 1000)
    assert (await store.roster()).members == {}
    assert await store.member("decode-0") is not None  # the record lies there a while
    assert await store.call("renew", "decode-0", epoch, TTL_MS) == [b"FENCED", epoch]
    status, later = await register(store, "decode-0", "b", takeover=0)
    assert status == b"OK"
    assert int(later) > int(epoch)
