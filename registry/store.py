"""One connection to the store (Redis 7 or later, or Valkey): its functions and its errors.

The functions are loaded under a name that holds a digest of their source, so two versions of
pdmesh can share a store. An error of the redis library becomes ``StoreUnavailable`` (try again) or
``ConfigError`` (nothing will help but another setting).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Any, NamedTuple, cast

from redis import exceptions

from pdmesh.registry.address import parse_address, tls_refusal
from pdmesh.registry.cluster import Cluster, Command
from pdmesh.registry.keys import Keys
from pdmesh.registry.layout import Layout
from pdmesh.registry.roster import Member, Roster, WorkerState, read_record, read_roster
from pdmesh.wire.errors import ConfigError, Unavailable

READ_ONLY = ("lookup", "copies", "position", "dump", "digest")
_OF_A_CLUSTER = (
    exceptions.AskError,  # MovedError is one
    exceptions.ClusterDownError,
    exceptions.ClusterCrossSlotError,
)
_EVENTS_AT_A_TIME = 500
_TLS_HINT = " (does it speak TLS, and does it ask for a client's certificate?)"


class StoreUnavailable(Unavailable):
    """The store does not answer, or not yet."""


class PageCall(NamedTuple):
    """One call of a function of a partition (``pages.lua``)."""

    name: str
    partition: int
    buckets: tuple[int, ...] = ()
    args: tuple[str | bytes | int, ...] = ()


Entries = list[tuple[str, dict[bytes, bytes]]]
"""Events of a stream: id and fields."""


@cache
def _library() -> tuple[str, str]:
    folder = resources.files("pdmesh.registry")
    source = "".join(folder.joinpath(name).read_text() for name in ("functions.lua", "pages.lua"))
    version = blake2b(source.encode(), digest_size=4).hexdigest()
    return version, source.replace("@VERSION@", version)


class Store:
    """Calls the functions of one mesh's store; safe for several tasks of one event loop.

    Raises:
        ConfigError: the URL is wrong.
    """

    def __init__(self, url: str, mesh: str) -> None:
        address = parse_address(url)
        self.keys = Keys(mesh)
        self.where = address.where
        self.layout: Layout = address.layout
        """What a new mesh gets; an old one has the layout that its roster says."""
        self._cluster: Cluster | None = None
        self._redis: Any = None
        if address.cluster:
            self._cluster = Cluster(address.endpoint, address.client)
        else:
            self._redis = address.client()

    @property
    def waits(self) -> bool:
        """Whether ``read`` can wait for an event."""
        return self._cluster is None

    async def close(self) -> None:
        """Closes all connections."""
        if self._cluster is not None:
            await self._cluster.close()
        else:
            await self._redis.aclose()
            await self._redis.connection_pool.disconnect()

    async def execute(self, *command: str | bytes | int) -> Any:
        """One plain command; in a cluster one that ``cluster.slot_of`` understands."""
        if self._cluster is None:
            try:
                with self._mapped_errors():
                    return await self._redis.execute_command(*command)
            except _ReadOnly:
                await self._leave()
                raise
        with self._mapped_errors():
            (answer,) = await self._cluster.answers([command])
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def load(self) -> None:
        """Loads the functions, on every primary of a cluster."""
        with self._mapped_errors():
            if self._cluster is not None:
                await self._cluster.load(_library()[1])
            else:
                await self._redis.execute_command("FUNCTION", "LOAD", "REPLACE", _library()[1])

    async def call(self, name: str, worker_id: str | None, *args: str | bytes | int) -> list[Any]:
        """Calls one function of ``functions.lua``; loads the library if the store lacks it."""
        keys = self.keys.shared
        if worker_id is not None:
            keys = [*keys, self.keys.worker(worker_id)]
            args = (worker_id, *args)
        command = ("FCALL", f"pdmesh_{name}_{_library()[0]}", len(keys), *keys, *args)
        try:
            return cast("list[Any]", await self.execute(*command))
        except _FunctionMissing:
            await self.load()
            return cast("list[Any]", await self.execute(*command))

    async def many(self, calls: Sequence[PageCall]) -> list[Any]:
        """Calls functions of partitions, all in one round trip.

        Returns:
            The answers in order; a ``StoreUnavailable`` in place of each that did not come.

        Raises:
            ConfigError: the store refuses the login, or cannot serve pdmesh.
        """
        commands = [self._page_command(call) for call in calls]
        answers = await self._all(commands)
        missing = [i for i, found in enumerate(answers) if isinstance(found, _FunctionMissing)]
        if missing:
            try:
                await self.load()
                again = await self._all([commands[i] for i in missing])
            except StoreUnavailable as error:
                again = [error] * len(missing)
            for i, found in zip(missing, again, strict=True):
                answers[i] = found
        return answers

    async def one(self, call: PageCall) -> Any:
        """One call. Raises StoreUnavailable or ConfigError."""
        (answer,) = await self.many([call])
        if isinstance(answer, StoreUnavailable):
            raise answer
        return answer

    async def roster(self) -> Roster:
        """The live workers; ended leases are dropped on the way."""
        candidate = secrets.token_hex(8)
        return read_roster(await self.call("members", None, candidate, self.layout.name))

    async def member(self, worker_id: str) -> Member | None:
        """One worker's record, or None if its lease has ended.

        Raises InvalidRequest or Incompatible if another version of pdmesh wrote it.
        """
        key = self.keys.worker(worker_id)
        epoch, state, slot, record = await self.execute(
            "HMGET", key, "epoch", "state", "slot", "record"
        )
        if record is None:
            return None
        state = cast("WorkerState", state.decode())
        return Member(read_record(record), int(epoch), state, int(slot))

    async def read(self, cursors: Mapping[str, str], block_ms: int) -> dict[str, Entries]:
        """What follows the cursors (key of a stream -> id) in these streams.

        Waits ``block_ms`` for the first event, but not if the store is a cluster. There a stream
        that does not answer is left out; all of them, and it is StoreUnavailable.
        """
        if self._cluster is not None:
            found = await self._all([self._xread({k: i}, 0) for k, i in cursors.items()])
            answers = [a for a in found if not isinstance(a, StoreUnavailable)]
            if found and not answers:
                raise found[0]
            return {k: e for answer in answers for k, e in _streams(answer)}
        return dict(_streams(await self.execute(*self._xread(cursors, block_ms))))

    def _xread(self, cursors: Mapping[str, str], block_ms: int) -> Command:
        wait: tuple[str | int, ...] = ("BLOCK", block_ms) if block_ms else ()
        count = ("COUNT", _EVENTS_AT_A_TIME)
        return ("XREAD", *count, *wait, "STREAMS", *cursors.keys(), *cursors.values())

    def _page_command(self, call: PageCall) -> Command:
        keys = self.keys.partition(call.partition)
        keys += [self.keys.bucket(call.partition, bucket) for bucket in call.buckets]
        kind = "FCALL_RO" if call.name in READ_ONLY else "FCALL"
        return (kind, f"pdmesh_{call.name}_{_library()[0]}", len(keys), *keys, *call.args)

    async def _all(self, commands: Sequence[Command]) -> list[Any]:
        if not commands:
            return []
        if self._cluster is not None:
            return [self._judged(answer) for answer in await self._cluster.answers(commands)]
        try:
            with self._mapped_errors():
                pipeline = self._redis.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                answers = await pipeline.execute(raise_on_error=False)
        except StoreUnavailable as error:
            return [error] * len(commands)
        found = [self._judged(answer) for answer in answers]
        if any(isinstance(answer, _ReadOnly) for answer in found):
            await self._leave()
        return found

    async def _leave(self) -> None:
        """Ends the connections: the address may lead to another server by now."""
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    def _judged(self, answer: Any) -> Any:
        if not isinstance(answer, Exception):
            return answer
        try:
            with self._mapped_errors():
                raise answer
        except StoreUnavailable as error:
            return error

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
            raise ConfigError(f"the store at {self.where} refuses the login: {error}") from error
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            if found := tls_refusal(error):
                raise ConfigError(f"the store at {self.where} {found}") from error
            hint = _TLS_HINT if self.where.startswith("rediss") else ""
            text = f"the store at {self.where} does not answer: {error}{hint}"
            raise StoreUnavailable(text) from error
        except exceptions.NoPermissionError as error:
            raise ConfigError(f"the store at {self.where} forbids a command: {error}") from error
        except exceptions.ResponseError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: exceptions.ResponseError) -> Exception:
        text = str(error)
        lowered = text.lower()
        if "function not found" in lowered:
            return _FunctionMissing(text)
        if isinstance(error, exceptions.ReadOnlyError):
            return _ReadOnly(f"the store at {self.where} is a replica: {text}")
        if "unknown command" in lowered:
            return ConfigError(
                f"the store at {self.where} is too old, or a Sentinel ({text}); pdmesh needs Redis "
                "7 or later, or Valkey, and the address of the server itself"
            )
        if "noauth" in lowered or "wrongpass" in lowered:
            return ConfigError(f"the store at {self.where} refuses the login: {text}")
        if "cluster support disabled" in lowered:
            return ConfigError(
                f"the store at {self.where} is no cluster; leave cluster=true out of its URL"
            )
        if isinstance(error, _OF_A_CLUSTER) and self._cluster is None:
            return ConfigError(
                f"the store at {self.where} is a cluster ({text}); add cluster=true to its URL"
            )
        return StoreUnavailable(f"the store at {self.where} refuses: {text}")


class _ReadOnly(StoreUnavailable):
    """The server is a replica now; its connections stay open, so they have to be left."""


class _FunctionMissing(StoreUnavailable):
    """The library is not loaded (a new or wiped store)."""


def _streams(answer: Any) -> Iterator[tuple[str, Entries]]:
    if not answer:
        return
    pairs = answer.items() if isinstance(answer, dict) else answer
    for key, entries in pairs:
        yield key.decode(), list(_entries(entries))


def _entries(entries: list[Any]) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    # A RESP3 answer nests each stream's entries one level deeper.
    if len(entries) == 1 and entries[0] and isinstance(entries[0][0], list):
        entries = entries[0]
    for entry_id, flat in entries:
        fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        yield entry_id.decode(), fields


def read_registered(answer: list[Any], worker_id: str) -> tuple[int, int, Layout]:
    """(epoch, slot, layout) of the answer of the function ``register``.

    Raises StoreUnavailable if it refuses: another process has the name, or there are too many.
    """
    if answer[0] == b"TAKEN":
        raise StoreUnavailable(
            f"another process (instance {answer[1].decode()}) runs as {worker_id!r}; give each "
            "worker its own name"
        )
    if answer[0] == b"FULL":
        raise StoreUnavailable("the mesh has 65,536 workers; no more can register")
    return int(answer[1]), int(answer[2]), Layout.named(answer[3])


async def read_members(url: str, mesh: str) -> list[Member]:
    """The workers that hold a lease now, in the order of their names.

    Raises:
        ConfigError: the URL is wrong, or the server cannot serve pdmesh.
        StoreUnavailable: it does not answer.
    """
    store = Store(url, mesh)
    try:
        found = [await store.member(name) for name in sorted((await store.roster()).members)]
        return [member for member in found if member is not None]
    finally:
        await store.close()


async def check_store(url: str) -> None:
    """Raises ConfigError or StoreUnavailable if no usable store answers at ``url``."""
    store = Store(url, "")
    try:
        await store.load()
    finally:
        await store.close()


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancels a task until it ends.

    Once may not be enough: before Python 3.12 ``asyncio.wait_for``, which the redis client uses
    for every command it sends, can swallow a cancellation (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
