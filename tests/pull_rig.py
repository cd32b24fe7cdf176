"""Workers that only have pages: they lend and fetch them, and a test can break every step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from zlib import crc32

import torch
from cuda_ipc_rig import FakeDevice, device_store

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_costs import PullCosts
from pdmesh.kvtransfer.pull_cuda_ipc import cuda_ipc_transport
from pdmesh.kvtransfer.pull_exchange import PrefixExchange, tcp_transport
from pdmesh.kvtransfer.pull_loopback import LoopbackPageReader, LoopbackPageServer
from pdmesh.kvtransfer.pull_shm import shm_transport
from pdmesh.wire.errors import WorkerLost
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PageSource

SIZE = 16
FORMAT = PageFormat(
    model="tiny",
    weights="w",
    dtype="float32",
    page_size=SIZE,
    num_layers=3,
    mtp_layers=1,
    latent_width=8,
)
ALWAYS = PullCosts(tokens=1.0, seconds=1e6)
"""Pulling is always worth its time."""
PATIENCE = 60.0
DEVICE = FakeDevice()


def chain(count, name=b"p"):
    """Hashes of a prefix of so many pages."""
    return tuple(name + bytes([i]) for i in range(count))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Way:
    """How one worker asks another; ``before[method]`` is awaited before a call gets through."""

    def __init__(self, exchange):
        self.exchange = exchange
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[object], object]] = {}
        self.lost = False
        """The owner is gone."""

    async def _call(self, method, message):
        self.calls.append(method)
        if method in self.before:
            await self.before[method]()
        if self.lost:
            raise WorkerLost("the owner is gone")
        answer = await getattr(self.exchange, method)(message)
        return self.after[method](answer) if method in self.after else answer

    async def lend(self, request):
        return await self._call("lend", request)

    async def renew(self, question):
        return await self._call("renew", question)

    async def validate(self, question):
        return await self._call("validate", question)

    async def give_back(self, question):
        return await self._call("give_back", question)


def exchange_of(kv, store, fmt, name, way_to, transport="loopback", **options):
    """An exchange over one transport, and its reader.

    A pull may take as long as a busy machine needs, where a test does not say otherwise.
    """
    if transport == "loopback":
        reader = LoopbackPageReader(store)
        own = (lambda lender: LoopbackPageServer(store, lender), reader)
    elif transport == "shm":
        own = shm_transport(store)
        reader = own[1]
    elif transport == "cuda_ipc":
        own = cuda_ipc_transport(store, DEVICE)
        reader = own[1]
    else:
        own = tcp_transport(store, "127.0.0.1")
        reader = own[1]
    options = {"timeout_s": PATIENCE} | options
    made = PrefixExchange(kv, name, fmt, [own], owner_at=way_to, **options)
    made.fetcher.costs = ALWAYS
    made.start()
    return made, reader


class Worker:
    """Pages and an exchange."""

    def __init__(self, name, ways, pages=16, transport="loopback", **options):
        self.name = name
        self.evicted: list[bytes] = []
        self.kv = KvManager(pages, SIZE, lambda _: None, self.evicted.extend)
        shape = pages, FORMAT.num_layers, SIZE, 8
        if transport == "cuda_ipc":
            self.store = device_store(*shape)
        else:
            self.store = LatentStore(*shape, torch.float32, shared=transport == "shm")
        self.store.tensor.fill_(float("nan"))
        self.exchange, self.reader = exchange_of(
            self.kv,
            self.store,
            FORMAT,
            name,
            lambda source: ways[source.instance],
            transport,
            **options,
        )

    @property
    def fetcher(self):
        return self.exchange.fetcher

    @property
    def lender(self):
        return self.exchange.lender

    def compute(self, hashes):
        """Fills pages as any worker would compute them, and leaves them cached."""
        held = self.kv.reserve(hashes, len(hashes), len(hashes))
        held.grow(len(hashes) - held.matched)
        for page, page_hash in zip(held.pages, hashes, strict=True):
            self.store.tensor[page] = contents(page_hash)
        held.publish(held.matched, hashes[held.matched :])
        held.release()

    def evict(self):
        """Uses every page for something else."""
        other = self.kv.reserve((), self.kv.num_pages, self.kv.num_pages)
        assert other is not None, "pages are pinned"
        self.store.tensor[other.grow(self.kv.num_pages)] = -1.0
        other.release()

    def wrong_pages(self, hashes):
        """Cached pages of the prefix that do not hold what their hash says."""
        pages = self.kv._cache.match(hashes)
        return [
            page
            for page, page_hash in zip(pages, hashes, strict=False)
            if not torch.equal(self.store.tensor[page], contents(page_hash))
        ]

    def problems(self):
        pool = self.kv.status()
        found = self.kv.check_integrity() + self.exchange.check_integrity()
        if pool.free + pool.cached != pool.total or self.kv.num_reservations:
            found.append(f"{self.name}: {pool}, {self.kv.num_reservations} reservations")
        return found

    def source(self, pages):
        return PageSource(instance=self.name, role="decode", address="nowhere:1", pages=pages)


def contents(page_hash):
    """What a page of this hash holds."""
    made = torch.Generator().manual_seed(crc32(page_hash))
    return torch.randn((FORMAT.num_layers, SIZE, 8), generator=made)


class Pair:
    """A reader, and owners named a, b, ... that have a prefix."""

    def __init__(self, owners=1, pages=16, transport="loopback", clock=None, **options):
        self.clock = clock or Clock()
        self.ways: dict[str, Way] = {}
        names = [chr(ord("a") + number) for number in range(owners)]
        self.owners = [
            Worker(name, self.ways, transport=transport, clock=self.clock) for name in names
        ]
        for owner in self.owners:
            self.ways[owner.name] = Way(owner.exchange)
        self.reader = Worker("reader", self.ways, pages, transport, **options)

    @property
    def owner(self):
        return self.owners[0]

    @property
    def way(self):
        return self.ways["a"]

    def sources(self, pages):
        return tuple(owner.source(pages) for owner in self.owners)

    async def fetch(self, hashes, **options):
        return await self.reader.fetcher.fetch(hashes, self.sources(len(hashes)), **options)

    def problems(self):
        return [p for worker in (self.reader, *self.owners) for p in worker.problems()]


async def until(condition, explain=lambda: "it never happened"):
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while not condition():
        assert loop.time() < end, explain()
        await asyncio.sleep(0.001)


@asynccontextmanager
async def pair(**options):
    """Workers that are at rest in the end."""
    made = Pair(**options)
    try:
        yield made
        await until(lambda: not made.problems(), made.problems)
    finally:
        for worker in (made.reader, *made.owners):
            await worker.exchange.close()
