"""What page ownership costs in the store, beside one hash for each block (the shape of llm-d).

    python -P bench/registry.py [--pages 200000] [--partitions 16]

A server of its own, one client, pipelined. Times are those of the server (CPU seconds that it used,
by INFO) but for the round trips of a lookup, which are the client's. Ratios of one run are what can
be compared; absolute times belong to the machine.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402

from pdmesh.registry.embedded import EmbeddedStore  # noqa: E402
from pdmesh.registry.keeping import sweep  # noqa: E402
from pdmesh.registry.layout import Layout, pack_group  # noqa: E402
from pdmesh.registry.partitions import lookup_call  # noqa: E402
from pdmesh.registry.store import PageCall, Store  # noqa: E402

PROMPT = 128
FENCED = 64_000
AT_A_TIME = 256


def prompts(count: int) -> list[tuple[bytes, ...]]:
    """Chains of ``PROMPT`` pages."""
    return [tuple(secrets.token_bytes(16) for _ in range(PROMPT)) for _ in range(count)]


class Bench:
    """One server, and the cost of what is done to it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seqs: dict[tuple[int, int], int] = {}

    async def info(self, section: str, name: str) -> float:
        """A number that the server knows."""
        return float((await self.store.execute("INFO", section))[name])

    async def cpu(self) -> float:
        """CPU seconds that the server used."""
        user, system = "used_cpu_user", "used_cpu_sys"
        return await self.info("cpu", user) + await self.info("cpu", system)

    async def cost(self, work: Callable[[], Awaitable[None]]) -> float:
        """CPU seconds of the server for some work."""
        before = await self.cpu()
        await work()
        return await self.cpu() - before

    async def fence(self, layout: Layout, slot: int, epoch: int) -> None:
        """Begins an epoch in all partitions."""
        parts = range(layout.partitions)
        await self.store.many([PageCall("fence", p, (), (slot, epoch)) for p in parts])
        self.seqs.update(dict.fromkeys(((slot, part) for part in parts), 0))

    def change(
        self, op: str, layout: Layout, slot: int, epoch: int, chains: list[tuple[bytes, ...]]
    ) -> list[PageCall]:
        """The calls that publish or evict chains, segment by segment."""
        calls = []
        for chain in chains:
            for (part, bucket), marks in layout.segments(chain):
                self.seqs[slot, part] += 1
                group = pack_group(bucket, marks)
                head = (slot, epoch, self.seqs[slot, part])
                calls.append(PageCall(op, part, (bucket,), (*head, group)))
        return calls

    async def send(self, calls: list[PageCall]) -> None:
        """In pipelines, as a worker does."""
        for at in range(0, len(calls), AT_A_TIME):
            for answer in await self.store.many(calls[at : at + AT_A_TIME]):
                assert not isinstance(answer, Exception), answer

    async def plain(self, commands: list[tuple]) -> None:
        """Plain commands in pipelines."""
        for at in range(0, len(commands), 4_096):
            await self.store._all(commands[at : at + 4_096])


async def ours(store: Store, chains: list[tuple[bytes, ...]]) -> dict[str, float]:
    """The partitioned form."""
    bench, layout, pages = Bench(store), store.layout, PROMPT * len(chains)
    await store.load()
    await bench.fence(layout, 0, 10)
    empty = await bench.info("memory", "used_memory")
    found: dict[str, float] = {}
    calls = bench.change("publish", layout, 0, 10, chains)
    found["publish"] = await bench.cost(lambda: bench.send(calls)) / pages * 1e6
    streams = [store.keys.page_events(part) for part in range(layout.partitions)]
    whole = await bench.info("memory", "used_memory") - empty
    events = sum([await store.execute("MEMORY", "USAGE", key) or 0 for key in streams])
    found["bytes"] = (whole - events) / pages
    found["event MB"] = events / 1e6
    looked = chains[:400]
    asked = [[lookup_call(s) for s in layout.segments(chain)] for chain in looked]

    async def look() -> None:
        for one in asked:
            await store.many(one)

    found["lookup"] = await bench.cost(look) / (PROMPT * len(looked)) * 1e6
    found["lookup ms"] = await round_trip(lambda i: store.many(asked[i % len(asked)]))
    second = bench.change
    await bench.fence(layout, 1, 10)
    more = second("publish", layout, 1, 10, chains)
    before = await bench.info("memory", "used_memory")
    streams_before = events
    await bench.send(more)
    events = sum([await store.execute("MEMORY", "USAGE", key) or 0 for key in streams])
    grown = await bench.info("memory", "used_memory") - before - (events - streams_before)
    found["bytes of an owner more"] = grown / pages
    gone = bench.change("evict", layout, 1, 10, chains)
    found["evict"] = await bench.cost(lambda: bench.send(gone)) / pages * 1e6
    return found


async def fenced(store: Store) -> dict[str, float]:
    """A worker with 64,000 pages dies."""
    bench, layout = Bench(store), store.layout
    chains = prompts(FENCED // PROMPT)
    await bench.fence(layout, 7, 10)
    await bench.send(bench.change("publish", layout, 7, 10, chains))
    times, cpus = [], []
    for epoch in range(11, 16):
        before = await bench.cpu()
        began = time.perf_counter()
        await bench.fence(layout, 7, epoch)
        times.append((time.perf_counter() - began) * 1e3)
        cpus.append((await bench.cpu() - before) * 1e3)
        if epoch < 15:
            calls = bench.change("publish", layout, 7, epoch, chains)
            await bench.send(calls)
    began = time.perf_counter()
    removed = await sweep(store, layout)
    took = time.perf_counter() - began
    return {
        "fence ms": statistics.median(times),
        "fence server ms": statistics.median(cpus),
        "swept": removed,
        "sweep s": took,
    }


async def theirs(store: Store, chains: list[tuple[bytes, ...]]) -> dict[str, float]:
    """A hash for each block (field: the worker with its tier, value: JSON), and a sorted set of a
    worker's blocks, so that they can be found when it goes."""
    bench, pages = Bench(store), PROMPT * len(chains)
    worker = "decode-0.mesh.svc:8000"
    value = json.dumps({"podIdentifier": worker, "deviceTier": "gpu"})
    field = f"{worker}@gpu"
    keys = [[f"block:{h.hex()[:16]}" for h in chain] for chain in chains]
    empty = await bench.info("memory", "used_memory")
    writes = [
        command
        for chain in keys
        for key in chain
        for command in (("HSET", key, field, value), ("ZADD", f"engine:{worker}", 1, key))
    ]
    found: dict[str, float] = {}
    found["publish"] = await bench.cost(lambda: bench.plain(writes)) / pages * 1e6
    found["bytes"] = (await bench.info("memory", "used_memory") - empty) / pages
    asked = [[("HKEYS", key) for key in chain] for chain in keys[:400]]

    async def look() -> None:
        for one in asked:
            await store._all(one)

    found["lookup"] = await bench.cost(look) / (PROMPT * len(asked)) * 1e6
    found["lookup ms"] = await round_trip(lambda i: store._all(asked[i % len(asked)]))
    drops = [
        command
        for chain in keys[: len(keys) // 2]
        for key in chain
        for command in (("HDEL", key, field), ("ZREM", f"engine:{worker}", key))
    ]
    cost = await bench.cost(lambda: bench.plain(drops))
    found["evict"] = cost / (PROMPT * (len(keys) // 2)) * 1e6
    rest = [key for chain in keys[len(keys) // 2 :] for key in chain][:FENCED]
    await store.execute("DEL", f"engine:{worker}")
    for at in range(0, len(rest), 1_000):
        pairs = [part for key in rest[at : at + 1_000] for part in (1, key)]
        await store.execute("ZADD", f"engine:{worker}", *pairs)

    async def clear() -> None:
        blocks = await store.execute("ZRANGE", f"engine:{worker}", 0, -1)
        await bench.plain([("HDEL", key, field) for key in blocks])
        await store.execute("DEL", f"engine:{worker}")

    began = time.perf_counter()
    cpu = await bench.cost(clear)
    found["fence ms"] = (time.perf_counter() - began) * 1e3
    found["fence server ms"] = cpu * 1e3
    found["fenced"] = len(rest)
    return found


async def round_trip(ask: Callable[[int], Awaitable[object]]) -> float:
    """Median milliseconds of a call, as the client sees it."""
    times = []
    for i in range(200):
        began = time.perf_counter()
        await ask(i)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


async def measure(url: str, pages: int, partitions: int) -> None:
    """Runs all and prints the table."""
    chains = prompts(pages // PROMPT)
    store = Store(f"{url}?partitions={partitions}&pages={pages}", "bench")
    mine = await ours(store, chains)
    mine |= await fenced(store)
    await store.execute("FLUSHALL")
    other = await theirs(store, chains)
    await store.close()
    print(f"{len(chains) * PROMPT} pages, prompts of {PROMPT}, {partitions} partitions\n")
    print("| | pdmesh | a hash for each block | ratio |\n|---|---|---|---|")
    lines = (
        ("bytes a page, one owner", "bytes", ".1f"),
        ("publish, us of server CPU a page", "publish", ".2f"),
        ("evict, us of server CPU a page", "evict", ".2f"),
        ("lookup, us of server CPU a page", "lookup", ".2f"),
        (f"lookup of {PROMPT} pages, ms at the client", "lookup ms", ".2f"),
        ("64,000 pages of a dead worker invalid, ms at the client", "fence ms", ".2f"),
        ("the same, ms of server CPU", "fence server ms", ".2f"),
    )
    for name, key, form in lines:
        ratio = other[key] / mine[key] if mine[key] > 0 else float("inf")
        print(f"| {name} | {mine[key]:{form}} | {other[key]:{form}} | {ratio:.1f} |")
    print(f"\nan owner more: {mine['bytes of an owner more']:.1f} bytes a page")
    print(f"event streams: {mine['event MB']:.1f} MB in all (capped)")
    print(f"sweep: {mine['swept']:.0f} dead records in {mine['sweep s']:.2f} s, in small steps")
    print(f"(the other shape cleared {other['fenced']:.0f} pages)")


def main() -> None:
    """Reads the arguments, starts a server, measures."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--pages", type=int, default=200_000, help="owned by workers")
    parser.add_argument("--partitions", type=int, default=16, help="of the page lists")
    arguments = parser.parse_args()
    server = EmbeddedStore(max_memory_mb=4_096)
    try:
        asyncio.run(measure(server.start(), arguments.pages, arguments.partitions))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
