"""Calls to a Redis Cluster: one plain client a node, and a map of which node holds which slot.

While slots move (Redis Cluster specification, "Live reconfiguration") a node answers MOVED, ASK or
TRYAGAIN. Those, and a node that is gone for a moment, are tried again within a budget. The client
of redis-py does so too, but closes connections under tasks that use them, may send ASKING on
another connection than the command it is for, and asks the server for the keys of each FCALL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, Literal

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

Command = tuple[str | bytes | int, ...]
Endpoint = tuple[str, int]

BUDGET_S = 0.5
"""After so long a call is given up, once an answer is there that says to try again."""
_DOUBTFUL = (
    exceptions.ConnectionError,
    exceptions.ClusterDownError,
    exceptions.ReadOnlyError,
    OSError,
)
_PAUSES_S = (0.0, 0.01, 0.02, 0.05)
"""Before the next turn of a call, from the first on."""

Verdict = Literal["answer", "moved", "ask", "again", "doubt"]


def verdict(answer: Any) -> Verdict:
    """What to do with an answer.

    Returns:
        "answer": it is for the caller, also if it is an error. "moved", "ask": go to the node it
        names, for good or once. "again": wait. "doubt": the map may be out of date.
    """
    if isinstance(answer, exceptions.MovedError):
        return "moved"
    if isinstance(answer, exceptions.AskError):
        return "ask"
    if isinstance(answer, exceptions.TryAgainError):
        return "again"
    if isinstance(answer, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return "answer"
    return "doubt" if isinstance(answer, _DOUBTFUL) else "answer"


def slot_of(command: Command) -> int:
    """The slot of a command's keys: of FCALL, XREAD, or one whose key is the first argument."""
    at = 1
    if command[0] in ("FCALL", "FCALL_RO"):
        at = 3
    elif command[0] == "XREAD":
        at = command.index("STREAMS") + 1
    key = command[at]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


@dataclass
class _Node:
    client: Any
    busy: int = 0
    """Calls under way: it is not closed meanwhile."""


class Cluster:
    """Sends commands to the nodes that hold their keys; safe for several tasks of one event loop.

    A command whose answer is lost on the way is sent again, so it may be applied twice.

    Args:
        seed: a node to begin with; asked again when no other answers.
        connect: makes the client (``redis.asyncio.Redis``, without retries) of a node.
        budget_s: seconds in which a call is tried again.
    """

    def __init__(
        self, seed: Endpoint, connect: Callable[[Endpoint], Any], budget_s: float = BUDGET_S
    ) -> None:
        self._seed = seed
        self._connect = connect
        self._budget_s = budget_s
        self._nodes: dict[Endpoint, _Node] = {}
        self._slots: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._doubt = True
        """The map may be out of date."""
        self._turns = 0
        self._learning = asyncio.Lock()

    async def close(self) -> None:
        """Closes all connections."""
        while self._nodes:
            await _close(self._nodes.popitem()[1])

    async def answers(self, commands: Sequence[Command]) -> list[Any]:
        """The answer of each command, or the exception in its place; one round trip if all is well.

        Never raises an exception of the redis library.
        """
        now = asyncio.get_running_loop().time
        end = now() + self._budget_s
        found: list[Any] = [None] * len(commands)
        left: dict[int, Endpoint | None] = dict.fromkeys(range(len(commands)))
        for turn in count():
            answers = await self._turn(commands, left)
            left = {}
            for i, (node, answer) in answers.items():
                found[i], word = answer, verdict(answer)
                if word == "moved":
                    self._slots[answer.slot_id] = _named(answer, node)
                if word != "answer":
                    left[i] = _named(answer, node) if word == "ask" else None
            pause = _PAUSES_S[min(turn, len(_PAUSES_S) - 1)]
            if not left or now() + pause > end:
                break
            await asyncio.sleep(pause)
        return found

    async def load(self, library: str) -> None:
        """Loads functions on every node. Raises the redis library's exception if none takes them.

        A node that does not is a replica, or away, and asked again when it lacks a function.
        """
        if failure := await self._learn():
            raise failure
        command: Command = ("FUNCTION", "LOAD", "REPLACE", library)
        sent = await asyncio.gather(*(self._send(n, [(0, command, False)]) for n in self._known()))
        failures = [answer for ((_, answer),) in (s.values() for s in sent) if _failed(answer)]
        if len(failures) == len(sent):
            raise failures[0]

    async def _turn(
        self, commands: Sequence[Command], left: Mapping[int, Endpoint | None]
    ) -> dict[int, tuple[Endpoint, Any]]:
        """One try of the commands ``left`` (-> a node that has to be ASKED): node and answer."""
        if failure := await self._learn():
            return dict.fromkeys(left, (self._seed, failure))
        found: dict[int, tuple[Endpoint, Any]] = {}
        batches: dict[Endpoint, list[tuple[int, Command, bool]]] = {}
        for i, asked in left.items():
            slot = slot_of(commands[i])
            if (node := asked or self._slots[slot]) is None:
                self._doubt = True
                error = exceptions.ClusterDownError(f"no node holds slot {slot}")
                found[i] = (self._seed, error)
            else:
                batches.setdefault(node, []).append((i, commands[i], asked is not None))
        for answers in await asyncio.gather(*(self._send(n, b) for n, b in batches.items())):
            found |= answers
        return found

    async def _send(
        self, endpoint: Endpoint, batch: Sequence[tuple[int, Command, bool]]
    ) -> dict[int, tuple[Endpoint, Any]]:
        """Sends (number, command, whether after ASKING) in one pipeline."""
        node = self._node(endpoint)
        node.busy += 1
        try:
            pipeline = node.client.pipeline(transaction=False)
            for _, command, asking in batch:
                if asking:
                    pipeline.execute_command("ASKING")
                pipeline.execute_command(*command)
            answers = await pipeline.execute(raise_on_error=False)
        except (exceptions.RedisError, OSError) as error:
            answers = [error] * sum(1 + asking for _, _, asking in batch)
        finally:
            node.busy -= 1
        self._doubt |= any(
            verdict(answer) == "doubt" or isinstance(answer, exceptions.TimeoutError)
            for answer in answers
        )
        ends = accumulate(1 + asking for _, _, asking in batch)
        return {i: (endpoint, answers[at - 1]) for (i, _, _), at in zip(batch, ends, strict=True)}

    async def _learn(self) -> Exception | None:
        """Reads the map, if it is in doubt, from the first node that answers; why none does."""
        async with self._learning:
            if not self._doubt:
                return None
            self._turns += 1
            known = self._known()
            at = self._turns % len(known)
            failure: Exception | None = None
            for endpoint in known[at:] + known[:at]:
                sent = await self._send(endpoint, [(0, ("CLUSTER", "SLOTS"), False)])
                if not _failed(rows := sent[0][1]):
                    self._slots = read_slots(rows, endpoint)
                    self._doubt = False
                    await self._forget()
                    return None
                if failure is None or verdict(failure) == "doubt":
                    failure = rows
            return failure

    async def _forget(self) -> None:
        """Closes the connections to nodes that hold no slot and are not in use."""
        held = {self._seed, *self._slots}
        for endpoint, node in list(self._nodes.items()):
            if endpoint not in held and not node.busy:
                await _close(self._nodes.pop(endpoint))

    def _known(self) -> list[Endpoint]:
        held = (endpoint for endpoint in self._slots if endpoint is not None)
        return list(dict.fromkeys((*held, *self._nodes, self._seed)))

    def _node(self, endpoint: Endpoint) -> _Node:
        if endpoint not in self._nodes:
            self._nodes[endpoint] = _Node(self._connect(endpoint))
        return self._nodes[endpoint]


def read_slots(rows: Sequence[Any], asked: Endpoint) -> list[Endpoint | None]:
    """Slot -> its primary, of the answer of CLUSTER SLOTS.

    A node whose address the cluster does not know has that of the node ``asked``.
    """
    slots: list[Endpoint | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in rows:
        primary = _address(host.decode() if host else "", int(port), asked)
        slots[first : last + 1] = [primary] * (last + 1 - first)
    return slots


def _address(host: str, port: int, asked: Endpoint) -> Endpoint:
    return (asked[0] if host in ("", "?") else host, port)


def _named(redirection: Any, asked: Endpoint) -> Endpoint:
    return _address(redirection.host, redirection.port, asked)


def _failed(answer: Any) -> bool:
    return isinstance(answer, Exception)


async def _close(node: _Node) -> None:
    await node.client.aclose()
    await node.client.connection_pool.disconnect()
