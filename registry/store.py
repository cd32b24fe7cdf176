"""One connection to the store (Redis 7 or later, or Valkey): its keys, its functions, its errors.

The functions are loaded under a name that holds a digest of their source, so two versions of
pdmesh can share a store. An error of the redis library becomes ``StoreUnavailable`` (try again) or
``ConfigError`` (nothing will help but another setting).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import redis.asyncio
from redis import exceptions
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdmesh.wire.codec import decode
from pdmesh.wire.errors import ConfigError, Incompatible, Unavailable
from pdmesh.wire.messages import PROTOCOL_VERSION, WorkerRecord

WorkerState = Literal["joining", "ready", "draining"]

_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 3.0


class StoreUnavailable(Unavailable):
    """The store does not answer, or not yet."""


@dataclass(frozen=True)
class Keys:
    """Names of all keys of a mesh; the hash tag puts them in one slot."""

    mesh: str

    def _key(self, *parts: str) -> str:
        return ":".join((f"pdmesh:{{{self.mesh}}}", *parts))

    @property
    def shared(self) -> list[str]:
        """meta, leases, roster, events: what every function gets first."""
        return [self._key(name) for name in ("meta", "leases", "roster", "events")]

    @property
    def events(self) -> str:
        return self._key("events")

    def worker(self, worker_id: str) -> str:
        return self._key("worker", worker_id)

    def pages(self, worker_id: str) -> str:
        return self._key("pages", worker_id)


@dataclass(frozen=True)
class Roster:
    """Who holds a lease, at one moment. ``seq`` is the last event that it includes."""

    incarnation: bytes
    seq: int
    epoch: int
    members: dict[str, tuple[int, WorkerState]]


@dataclass(frozen=True)
class Member:
    """One worker as the store knows it."""

    record: WorkerRecord
    epoch: int
    state: WorkerState


def read_record(data: bytes) -> WorkerRecord:
    """A record from the store. Raises InvalidRequest or Incompatible if it is of another version"""
    record = decode(data, WorkerRecord)
    if record.protocol != PROTOCOL_VERSION:
        raise Incompatible(
            f"worker {record.worker_id} speaks protocol {record.protocol}, this process speaks "
            f"{PROTOCOL_VERSION}"
        )
    return record


@cache
def _library() -> tuple[str, str]:
    source = resources.files("pdmesh.registry").joinpath("functions.lua").read_text()
    version = blake2b(source.encode(), digest_size=4).hexdigest()
    return version, source.replace("@VERSION@", version)


def redacted(url: str) -> str:
    """``url`` without its password, for messages and logs."""
    return re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:***@", url)


def _pool(url: str) -> ConnectionPool:
    try:
        options: dict[str, Any] = dict(parse_url(url))
        if urlsplit(url).scheme != "unix":
            options.setdefault("socket_connect_timeout", _CONNECT_TIMEOUT_S)
            options.setdefault("socket_keepalive", True)
        options.setdefault("socket_timeout", _ANSWER_TIMEOUT_S)
        options |= {"decode_responses": False, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
        return ConnectionPool(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"Redis URL {redacted(url)!r} is not understood ({error}); give redis://host:port, "
            "rediss://host:port or unix:///path, with user:password@ if needed"
        ) from error


def check_url(url: str) -> None:
    """Raises ConfigError unless ``url`` is a Redis URL; connects to nothing."""
    _pool(url)


class Store:
    """Calls the functions of one mesh's store; safe for several tasks of one event loop."""

    def __init__(self, url: str, mesh: str) -> None:
        self.keys = Keys(mesh)
        self.where = redacted(url)
        self._redis: Any = redis.asyncio.Redis(connection_pool=_pool(url))

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def execute(self, *command: str | bytes | int) -> Any:
        """One plain command."""
        with self._mapped_errors():
            return await self._redis.execute_command(*command)

    async def _load(self) -> None:
        await self.execute("FUNCTION", "LOAD", "REPLACE", _library()[1])

    async def call(self, name: str, worker_id: str | None, *args: str | bytes | int) -> list[Any]:
        """Calls one function of ``functions.lua``; loads the library if the store lacks it."""
        keys = self.keys.shared
        if worker_id is not None:
            keys = [*keys, self.keys.worker(worker_id), self.keys.pages(worker_id)]
            args = (worker_id, *args)
        command = ("FCALL", f"pdmesh_{name}_{_library()[0]}", len(keys), *keys, *args)
        try:
            return cast("list[Any]", await self.execute(*command))
        except _FunctionMissing:
            await self._load()
            return cast("list[Any]", await self.execute(*command))

    async def roster(self) -> Roster:
        """The live workers; ended leases are dropped on the way."""
        inc, seq, epoch, flat = await self.call("members", None, secrets.token_hex(8))
        members: dict[str, tuple[int, WorkerState]] = {}
        for worker, value in zip(flat[::2], flat[1::2], strict=True):
            number, _, state = value.decode().partition(":")
            members[worker.decode()] = (int(number), cast("WorkerState", state))
        return Roster(inc, int(seq), int(epoch), members)

    async def member(self, worker_id: str) -> Member | None:
        """One worker's record, or None if its lease has ended.

        Raises InvalidRequest or Incompatible if another version of pdmesh wrote it.
        """
        key = self.keys.worker(worker_id)
        epoch, state, record = await self.execute("HMGET", key, "epoch", "state", "record")
        if record is None:
            return None
        return Member(read_record(record), int(epoch), cast("WorkerState", state.decode()))

    async def pages(self, worker_id: str) -> set[bytes]:
        """Hashes of all pages that the worker has published."""
        return set(await self.execute("SMEMBERS", self.keys.pages(worker_id)))

    async def events(self, after: int, block_ms: int) -> list[tuple[int, dict[bytes, bytes]]]:
        """Events that follow number ``after``, as (number, fields); waits ``block_ms`` for one."""
        wait = ("BLOCK", block_ms) if block_ms else ()
        answer = await self.execute(
            "XREAD", "COUNT", 500, *wait, "STREAMS", self.keys.events, f"{after}-0"
        )
        if not answer:
            return []
        streams = answer.values() if isinstance(answer, dict) else [s[1] for s in answer]
        return [pair for entries in streams for pair in _entries(entries)]

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
            raise ConfigError(f"the store at {self.where} refuses the login: {error}") from error
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"the store at {self.where} does not answer: {error}") from error
        except exceptions.NoPermissionError as error:
            raise ConfigError(f"the store at {self.where} forbids a command: {error}") from error
        except exceptions.ResponseError as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, text: str) -> Exception:
        lowered = text.lower()
        if "function not found" in lowered:
            return _FunctionMissing(text)
        if "unknown command" in lowered:
            return ConfigError(
                f"the store at {self.where} is too old ({text}); pdmesh needs Redis 7 or later, "
                "or Valkey"
            )
        if "noauth" in lowered or "wrongpass" in lowered:
            return ConfigError(f"the store at {self.where} refuses the login: {text}")
        if lowered.startswith(("moved", "crossslot", "clusterdown")):
            return ConfigError(
                f"the store at {self.where} is a cluster ({text}); give a single Redis or Valkey"
            )
        return StoreUnavailable(f"the store at {self.where} refuses: {text}")


class _FunctionMissing(StoreUnavailable):
    """The library is not loaded (a new or wiped store)."""


def _entries(entries: list[Any]) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    # A RESP3 answer nests each stream's entries one level deeper.
    if len(entries) == 1 and entries[0] and isinstance(entries[0][0], list):
        entries = entries[0]
    for entry_id, flat in entries:
        fields = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        yield int(entry_id.split(b"-")[0]), fields


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
        await store._load()
    finally:
        await store.close()


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancels a task until it ends.

    Once may not be enough: before Python 3.12 ``asyncio.wait_for``, which the redis client uses
    for every command it sends, can swallow a cancellation (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
