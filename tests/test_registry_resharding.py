"""Real clusters: slots that are on their way, nodes without functions, nodes that are gone."""

import pytest
from cluster_rig import begin_move, cluster, end_move, move_keys
from redis.crc import key_slot
from store_rig import Server

from pdmesh.registry.cluster import slot_of
from pdmesh.registry.feed import read_position
from pdmesh.registry.layout import pack_group
from pdmesh.registry.store import PageCall, Store, StoreUnavailable


def store_at(first: Server, tag: str) -> Store:
    """The store of a mesh whose keys of this tag lie in the first of two nodes."""
    mesh = next(m for m in map(str, range(100)) if key_slot(f"{m}:{tag}".encode()) < 8_192)
    return Store(f"{first.url}?cluster=true", mesh)


async def test_while_a_slot_is_between_two_nodes_one_key_is_found_and_more_are_tried_again(
    servers,
):
    source, target = cluster(servers, 2)
    store = store_at(source, "0")
    call = PageCall("fence", 0, (), (1, 7))
    key = store.keys.partition(0)[0]
    assert await store.one(call) == [b"OK"]
    slot = key_slot(key.encode())
    begin_move(slot, source, target)
    move_keys(source, target, key)
    assert await store.execute("HEXISTS", key, 1) == 1
    with pytest.raises(StoreUnavailable, match="rehashing"):
        await store.one(call)
    end_move(slot, source, target)
    assert await store.one(call) == [b"SAME"]
    await store.close()


async def test_what_empties_a_bucket_of_a_slot_that_is_moving_away_is_done_whole(servers):
    source, target = cluster(servers, 2)
    store = store_at(source, "0")
    await store.one(PageCall("fence", 0, (), (1, 7)))
    buckets, marks = (4, 5), (pack_group(4, [b"page--1"]), pack_group(5, [b"page--2"]))
    assert await store.one(PageCall("publish", 0, buckets, (1, 7, 1, *marks))) == [b"OK"]
    begin_move(key_slot(store.keys.partition(0)[0].encode()), source, target)
    assert await store.one(PageCall("evict", 0, buckets, (1, 7, 2, *marks))) == [b"OK"]
    position = read_position(await store.one(PageCall("position", 0)))
    assert (position.rows[1].seq, position.rows[1].pages, position.rows[1].xor) == (2, 0, 0)
    assert not position.bitmap.strip(b"\0")
    await store.close()


async def test_dead_records_of_a_slot_that_is_moving_away_are_swept(servers):
    source, target = cluster(servers, 2)
    store = store_at(source, "0")
    await store.one(PageCall("fence", 0, (), (1, 7)))
    await store.one(PageCall("publish", 0, (4,), (1, 7, 1, pack_group(4, [b"page--1"]))))
    await store.one(PageCall("fence", 0, (), (1, 8)))
    begin_move(key_slot(store.keys.partition(0)[0].encode()), source, target)
    assert await store.one(PageCall("sweep", 0, (4,), (4,))) == 1
    position = read_position(await store.one(PageCall("position", 0)))
    assert not position.bitmap.strip(b"\0")
    await store.close()


async def test_a_worker_registers_again_while_the_control_slot_is_moving_away(servers):
    source, target = cluster(servers, 2)
    store = store_at(source, "ctl")

    async def register(worker: str) -> int:
        answer = await store.call(
            "register", worker, "instance", b"record", 60_000, "ready", 1, "inc", "16.8", 0
        )
        assert answer[0] == b"OK"
        return int(answer[1])

    epoch = await register("left")
    first = await register("stays")
    assert await store.call("deregister", "left", epoch) == [b"OK"]
    begin_move(key_slot(store.keys.events.encode()), source, target)
    assert await register("stays") > first
    await store.close()


async def test_functions_are_loaded_on_every_primary_of_a_cluster(servers):
    nodes = cluster(servers, 2)
    store = Store(f"{nodes[0].url}?cluster=true", "m")
    await store.load()
    for node in nodes:
        assert "pdmesh_" in str(node.do("FUNCTION", "LIST"))
    await store.close()


async def test_a_node_without_the_functions_gets_them(servers):
    nodes = cluster(servers, 2)
    store = Store(f"{nodes[0].url}?cluster=true", "m")
    await store.load()
    nodes[1].do("FUNCTION", "FLUSH")
    answers = await store.many([PageCall("fence", n, (), (1, 7)) for n in range(16)])
    assert answers == [[b"OK"]] * 16
    await store.close()


async def test_half_a_cluster_answers_while_the_other_half_is_gone(servers):
    nodes = cluster(servers, 2)
    for node in nodes:
        node.do("CONFIG", "SET", "cluster-require-full-coverage", "no")
    store = Store(f"{nodes[1].url}?cluster=true", "m")
    calls = [PageCall("fence", n, (), (1, 7)) for n in range(16)]
    assert await store.many(calls) == [[b"OK"]] * 16
    nodes[0].kill()
    here = [slot_of(("GET", store.keys.partition(n)[0])) >= 8_192 for n in range(16)]
    assert len(set(here)) == 2
    for alive, answer in zip(here, await store.many(calls), strict=True):
        assert answer == [b"SAME"] if alive else isinstance(answer, StoreUnavailable)
    await store.close()
