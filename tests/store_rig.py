"""Real servers that fail in every way, what lies between them and a client, and busy workers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import ssl
import subprocess
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import redis
from free_ports import free_port
from redis.exceptions import RedisError

from pdmesh.registry.audit import differences, read_contents
from pdmesh.registry.client import RegistryView
from pdmesh.registry.embedded import server_binary
from pdmesh.registry.guard import guarded
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import Store, StoreUnavailable
from pdmesh.wire.hashes import OwnedPage, PageFormat, placed
from pdmesh.wire.messages import WorkerRecord

FORMAT = PageFormat("tiny", "w", "float32", 64, 7, 1, 576)
PASSWORD = "word"


def record(worker_id: str, instance: str = "", address: str = "127.0.0.1:1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        instance=instance or secrets.token_hex(4),
        role="decode",
        address=address,
        page_format=FORMAT,
        model="tiny",
        vocab_size=16,
        max_context=64,
        capacity_pages=8,
    )


class Server:
    """A Valkey server with a configuration of one's own; asks for ``PASSWORD``."""

    def __init__(self, folder: Path, **config: str) -> None:
        self.port = free_port()
        self.folder = folder
        folder.mkdir()
        lines = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(folder),
            "requirepass": PASSWORD,
            "masterauth": PASSWORD,
            "save": '""',
            "appendonly": "no",
            "repl-diskless-sync-delay": "0",
            **{name.replace("_", "-"): value for name, value in config.items()},
        }
        self._lines = "".join(f"{name} {value}\n" for name, value in lines.items())
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}"

    def start(self) -> Server:
        self.process = subprocess.Popen(
            guarded([str(server_binary()), "-"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.process.stdin.write(self._lines.encode())
        self.process.stdin.close()
        self.wait(lambda: self.do("PING"), "it answers")
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def do(self, *command):
        with redis.Redis(port=self.port, password=PASSWORD, socket_timeout=10) as client:
            return client.execute_command(*command)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(RedisError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError(f"not in time: {what}")

    def info(self) -> dict[str, str]:
        with redis.Redis(port=self.port, password=PASSWORD) as client:
            return client.info("replication")


class Proxy:
    """Forwards connections to a server; the way can be slow, cut, or lead elsewhere.

    With ``tls`` it is the server's end of TLS, which the server at hand was built without.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.target = port
        self._tls = tls
        self.delay = 0.0
        self.open = True
        self.opened = 0
        """Connections that were led to a server."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Ends all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        if not self.open:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        self.opened += 1
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, slow=True), self._pump(far_reader, writer)
            )
        except OSError:
            pass
        finally:
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, source, sink, slow: bool = False) -> None:
        while data := await source.read(65_536):
            if slow and self.delay:
                await asyncio.sleep(self.delay)
            sink.write(data)
            await sink.drain()
        sink.transport.abort()


async def until(condition, what: str, patience_s: float = 60.0) -> None:
    """Asks again and again; only a failure takes long."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not in time: {what}")


class Churn:
    """Chains of pages that grow and shrink at random, as a worker's cache does."""

    def __init__(self, seed: int, most: int = 60) -> None:
        self._rng = random.Random(seed)
        self._seed = seed
        self._most = most
        self._made = 0
        self.steps = 0
        self.chains: list[list[OwnedPage]] = []
        self.sizes: list[int] = []
        self.lease: WorkerLease | None = None

    def snapshot(self) -> list[OwnedPage]:
        pairs = zip(self.chains, self.sizes, strict=True)
        return [page for chain, size in pairs for page in chain[:size]]

    def step(self) -> None:
        """One prompt cached, or some of one forgotten."""
        self.steps += 1
        if not self.chains or (self._rng.random() < 0.5 and len(self.chains) < self._most):
            self._made += 1
            name = f"{self._seed}/{self._made}"
            hashes = [
                blake2b(f"{name}/{i}".encode(), digest_size=16).digest()
                for i in range(self._rng.randint(1, 40))
            ]
            self.chains.append(placed(hashes))
            self.sizes.append(0)
        at = self._rng.randrange(len(self.chains))
        size = self._rng.randint(0, len(self.chains[at]))
        chain, before = self.chains[at], self.sizes[at]
        self.sizes[at] = size
        if size > before:
            self.lease.publish(chain[before:size])
        elif size < before:
            self.lease.evict(chain[size:before][::-1])

    def prompts(self) -> list[tuple[tuple[bytes, ...], int]]:
        """Hashes of each chain, and how many of them are owned."""
        return [
            (tuple(page.page_hash for page in chain), size)
            for chain, size in zip(self.chains, self.sizes, strict=True)
        ]


class Crowd:
    """Workers that change what they own all the time, and routers that watch."""

    def __init__(self, url: str, names: tuple[str, ...] = ("decode-0", "decode-1"), **options):
        self.url = url
        self.mesh = secrets.token_hex(4)
        self.options = {"ttl_s": 1.0, **options}
        self.churns = {name: Churn(seed) for seed, name in enumerate(names)}
        self.views: list[RegistryView] = []
        self._busy: asyncio.Task | None = None

    async def __aenter__(self) -> Crowd:
        for name, churn in self.churns.items():
            churn.lease = WorkerLease(
                self.url, self.mesh, record(name), snapshot=churn.snapshot, **self.options
            )
            await churn.lease.start()
            await churn.lease.ready()
        await self.watch()
        self._busy = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_) -> None:
        self._busy.cancel()
        await asyncio.gather(self._busy, return_exceptions=True)
        for view in self.views:
            await view.close()
        for churn in self.churns.values():
            await churn.lease.close()

    async def watch(self) -> RegistryView:
        view = RegistryView(self.url, self.mesh, grace_s=30.0)
        self.views.append(view)
        await view.start()
        names = sorted(self.churns)
        await until(lambda: [r.worker_id for r in view.workers()] == names, "all are known")
        return view

    async def _work(self) -> None:
        while True:
            for churn in self.churns.values():
                churn.step()
            await asyncio.sleep(0.005)

    async def rest(self) -> None:
        """No more changes from now on."""
        self._busy.cancel()
        await asyncio.gather(self._busy, return_exceptions=True)

    def never_without_workers(self) -> None:
        for view in self.views:
            assert [r.worker_id for r in view.workers()] == sorted(self.churns)

    async def converges(self) -> None:
        """Stops the changes; then store, workers and routers have to agree."""
        await self.rest()
        await until(self._agreed, "store and workers agree")
        for view in self.views:
            await until(lambda view=view: view.warm and self.seen(view), "a router knows all")
            for name, churn in self.churns.items():
                for hashes, size in churn.prompts()[:5]:
                    await until(
                        partial(self._looked_up, view, name, hashes, size), "the store knows it too"
                    )

    async def _looked_up(self, view: RegistryView, name: str, hashes, size: int) -> bool:
        """Not at once: a worker may just have registered again, unknown to the router yet."""
        return (await view.lookup(hashes, budget_s=30)).get(name, 0) == size

    def seen(self, view: RegistryView) -> bool:
        return all(
            view.owned_prefix(name, hashes) == size
            for name, churn in self.churns.items()
            for hashes, size in churn.prompts()
        )

    async def _agreed(self) -> bool:
        store = Store(self.url, self.mesh)
        try:
            contents = await read_contents(store)
        except StoreUnavailable:
            return False
        finally:
            await store.close()
        members = {member.record.worker_id: member for member in contents.members}
        return (
            members.keys() == self.churns.keys()
            and not contents.strays()
            and all(
                churn.lease.settled
                and not differences(contents, members[name], churn.lease.digests())
                for name, churn in self.churns.items()
            )
        )
