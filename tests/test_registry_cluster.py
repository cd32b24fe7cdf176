"""Which node of a cluster a command goes to, and what is tried again."""

import asyncio

import pytest
from cluster_rig import begin_move, cluster, end_move, move_keys
from redis import exceptions
from redis.crc import key_slot

from pdmesh.registry.cluster import Cluster, read_slots, slot_of, verdict
from pdmesh.registry.feed import read_position
from pdmesh.registry.layout import pack_group
from pdmesh.registry.store import PageCall, Store, StoreUnavailable

A, B, C = ("10.0.0.1", 7000), ("10.0.0.2", 7000), ("10.0.0.3", 7000)
KEY = "key"
SLOT = key_slot(KEY.encode())
GET = ("HGET", KEY, "field")


class Nodes:
    """Servers of a cluster as far as a client sees them; each answers as its script says."""

    def __init__(self, **owners) -> None:
        self.owners = owners or {"all": A}
        self.script: dict = {}
        self.sent: list[tuple] = []
        self.made: list[tuple] = []
        self.closed: list[tuple] = []

    def connect(self, endpoint):
        self.made.append(endpoint)
        return Client(self, endpoint)

    def answer(self, endpoint, command):
        """What is scripted for the node and the command; the last entry stays."""
        self.sent.append((endpoint, command))
        steps = self.script.get((endpoint, command[0]))
        if steps:
            return steps.pop(0) if len(steps) > 1 else steps[0]
        if command == ("CLUSTER", "SLOTS"):
            return [[0, 16_383, [self.owners["all"][0].encode(), self.owners["all"][1], b"id"]]]
        return f"{endpoint[0]} {command[0]}"

    def to(self, endpoint):
        return [command[0] for node, command in self.sent if node == endpoint]


class Client:
    def __init__(self, nodes, endpoint) -> None:
        self.nodes, self.endpoint = nodes, endpoint
        self.connection_pool = self
        self.queued: list[tuple] = []

    def pipeline(self, transaction):
        assert not transaction
        return Client(self.nodes, self.endpoint)

    def execute_command(self, *command):
        self.queued.append(command)

    async def execute(self, raise_on_error):
        assert not raise_on_error
        await asyncio.sleep(0)
        answers = [self.nodes.answer(self.endpoint, command) for command in self.queued]
        for error in answers:
            if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
                raise error
        return answers

    async def aclose(self):
        self.nodes.closed.append(self.endpoint)

    async def disconnect(self):
        pass


def made(nodes, budget_s=60.0, seed=A):
    return Cluster(seed, nodes.connect, budget_s)


def moved(to):
    return exceptions.MovedError(f"{SLOT} {to[0]}:{to[1]}")


def ask(to):
    return exceptions.AskError(f"{SLOT} {to[0]}:{to[1]}")


TRY_AGAIN = exceptions.TryAgainError("Multiple keys request during rehashing of slot")


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b"value", "answer"),
        (None, "answer"),
        (moved(B), "moved"),
        (ask(B), "ask"),
        (TRY_AGAIN, "again"),
        (exceptions.ClusterDownError("Hash slot not served"), "doubt"),
        (exceptions.ReadOnlyError("a replica"), "doubt"),
        (exceptions.ConnectionError("refused"), "doubt"),
        (ConnectionResetError(), "doubt"),
        (exceptions.TimeoutError("no answer"), "answer"),
        (exceptions.AuthenticationError("wrong"), "answer"),
        (exceptions.ResponseError("Function not found"), "answer"),
    ],
)
def test_every_answer_has_its_verdict(answer, word):
    assert verdict(answer) == word


@pytest.mark.parametrize(
    "command",
    [
        ("FCALL", "f", 2, "{m:1}a", "{m:1}b", "x"),
        ("FCALL_RO", "f", 1, "{m:1}a"),
        ("XREAD", "COUNT", 5, "STREAMS", "{m:1}ev", "0-0"),
        ("HMGET", "{m:1}w", "epoch"),
        ("HMGET", b"{m:1}w", "epoch"),
    ],
)
def test_the_slot_is_that_of_the_keys(command):
    assert slot_of(command) == key_slot(b"m:1")


def test_the_map_names_primaries_and_takes_the_asked_host_where_none_is_known():
    rows = [
        [0, 1, [b"10.0.0.1", 7000, b"id"], [b"10.0.0.9", 7000, b"replica"]],
        [2, 2, [b"", 7001, b"id"]],
        [4, 4, [None, 7002, b"id"]],
        [5, 5, [b"?", 7003, b"id"]],
    ]
    slots = read_slots(rows, ("seed", 1))
    assert slots[:6] == [A, A, ("seed", 7001), None, ("seed", 7002), ("seed", 7003)]
    assert len(slots) == 16_384


async def test_the_map_is_read_once_and_commands_of_a_node_go_together():
    nodes = Nodes()
    client = made(nodes)
    assert await client.answers([GET, GET]) == ["10.0.0.1 HGET"] * 2
    assert await client.answers([GET]) == ["10.0.0.1 HGET"]
    assert nodes.to(A) == ["CLUSTER", "HGET", "HGET", "HGET"]


async def test_a_moved_slot_is_followed_and_remembered():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [moved(B)]
    client = made(nodes)
    assert await client.answers([GET]) == ["10.0.0.2 HGET"]
    assert await client.answers([GET]) == ["10.0.0.2 HGET"]
    assert nodes.to(A) == ["CLUSTER", "HGET"]


async def test_a_slot_moved_to_a_nameless_host_is_on_the_host_that_said_so():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [exceptions.MovedError(f"{SLOT} :7009")]
    await made(nodes).answers([GET])
    assert nodes.to((A[0], 7009)) == ["HGET"]


async def test_asking_precedes_its_command_and_holds_once():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [ask(B)]
    client = made(nodes)
    assert await client.answers([GET, GET]) == ["10.0.0.2 HGET"] * 2
    assert nodes.to(B) == ["ASKING", "HGET", "ASKING", "HGET"]
    await client.answers([GET])
    assert nodes.to(A) == ["CLUSTER", "HGET", "HGET", "HGET"], "the map is as before"


async def test_a_target_that_has_not_all_keys_sends_back_to_the_source():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [ask(B), TRY_AGAIN, moved(B)]
    nodes.script[B, "HGET"] = [TRY_AGAIN, "here"]
    assert await made(nodes).answers([GET]) == ["here"]
    assert nodes.to(A) == ["CLUSTER", "HGET", "HGET", "HGET"]
    assert nodes.to(B) == ["ASKING", "HGET", "HGET"]


async def test_what_still_moves_after_the_budget_is_the_error_and_costs_no_other_its_answer():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [TRY_AGAIN]
    other = ("XREAD", "STREAMS", KEY, "0-0")
    answers = await made(nodes, budget_s=0.0).answers([GET, other])
    assert answers == [TRY_AGAIN, "10.0.0.1 XREAD"]


async def test_a_dead_primary_is_left_for_the_one_that_the_map_names_then():
    nodes = Nodes()
    client = made(nodes, seed=C)
    assert await client.answers([GET]) == ["10.0.0.1 HGET"]
    dead = [exceptions.ConnectionError("refused")]
    nodes.script |= {(A, "HGET"): dead, (A, "CLUSTER"): dead}
    nodes.owners["all"] = B
    assert await client.answers([GET]) == ["10.0.0.2 HGET"]
    assert nodes.closed == [A], "it holds no slot any more"
    await client.close()
    assert sorted(nodes.closed) == [A, B, C]


async def test_a_node_that_is_cut_off_with_an_old_map_is_not_the_only_one_asked():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [exceptions.ClusterDownError("The cluster is down")]
    nodes.script[A, "CLUSTER"] = [[[0, 16_383, [b"10.0.0.1", 7000, b"id"]]]]
    nodes.owners["all"] = B
    client = made(nodes, seed=C)
    client._slots[SLOT] = A
    client._doubt = False
    assert await client.answers([GET]) == ["10.0.0.2 HGET"]


async def test_a_slot_that_nobody_holds_is_asked_for_again():
    nodes = Nodes()
    nodes.script[A, "CLUSTER"] = [[], [[0, 16_383, [b"10.0.0.1", 7000, b"id"]]]]
    assert await made(nodes).answers([GET]) == ["10.0.0.1 HGET"]


async def test_if_no_node_answers_each_command_has_the_reason():
    nodes = Nodes()
    nodes.script[A, "CLUSTER"] = [exceptions.ConnectionError("refused")]
    answers = await made(nodes, budget_s=0.0).answers([GET, GET])
    assert [type(answer) for answer in answers] == [exceptions.ConnectionError] * 2
    with pytest.raises(exceptions.ConnectionError):
        await made(nodes).load("source")


async def test_a_refused_login_is_not_tried_again():
    nodes = Nodes()
    nodes.script[A, "CLUSTER"] = [exceptions.AuthenticationError("wrong")]
    (answer,) = await made(nodes).answers([GET])
    assert isinstance(answer, exceptions.AuthenticationError)
    assert nodes.to(A) == ["CLUSTER"]


async def test_a_slow_node_is_not_asked_twice_but_the_map_is_read_before_the_next_call():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [exceptions.TimeoutError("no answer"), "value"]
    client = made(nodes)
    (answer,) = await client.answers([GET])
    assert isinstance(answer, exceptions.TimeoutError)
    assert await client.answers([GET]) == ["value"]
    assert nodes.to(A) == ["CLUSTER", "HGET", "CLUSTER", "HGET"]


async def test_functions_are_loaded_wherever_they_can_be():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [ask(B)]
    nodes.script[C, "FUNCTION"] = [exceptions.ReadOnlyError("a replica")]
    client = made(nodes, seed=C)
    await client.answers([GET])
    await client.load("source")
    asked = [node for node, command in nodes.sent if command[0] == "FUNCTION"]
    assert sorted(asked) == [A, B, C]


async def test_many_tasks_share_a_client_while_the_slot_moves_to_and_fro():
    nodes = Nodes()
    nodes.script[A, "HGET"] = [moved(B), TRY_AGAIN, ask(B), "A"] * 20 + ["A"]
    nodes.script[B, "HGET"] = [moved(A), "B", TRY_AGAIN] * 20 + ["B"]
    client = made(nodes)
    found = await asyncio.gather(*(client.answers([GET]) for _ in range(40)))
    assert {answer for (answer,) in found} <= {"A", "B"}


async def test_while_a_slot_is_between_two_nodes_one_key_is_found_and_more_are_tried_again(
    servers,
):
    source, target = cluster(servers, 2)
    mesh = next(m for m in map(str, range(100)) if key_slot(f"{m}:0".encode()) < 8_192)
    store = Store(f"{source.url}?cluster=true", mesh)
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
    mesh = next(m for m in map(str, range(100)) if key_slot(f"{m}:0".encode()) < 8_192)
    store = Store(f"{source.url}?cluster=true", mesh)
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
    mesh = next(m for m in map(str, range(100)) if key_slot(f"{m}:0".encode()) < 8_192)
    store = Store(f"{source.url}?cluster=true", mesh)
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
    mesh = next(m for m in map(str, range(100)) if key_slot(f"{m}:ctl".encode()) < 8_192)
    store = Store(f"{source.url}?cluster=true", mesh)

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
