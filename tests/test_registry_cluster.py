"""Which node of a cluster a command goes to, and what is tried again."""

import asyncio

import pytest
from redis import exceptions
from redis.crc import key_slot

from pdmesh.registry.cluster import Cluster, read_slots, slot_of, verdict

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
