"""The second turn of a chat: its prefix pulled from the worker that answered, or computed again.

    .venv/bin/python -P bench/pull.py            (--help for the options)

One process, the shipped model, one thread: a cache holds a prefix of P tokens, a prefill worker
that knows nothing of it gets P + 16 tokens. By turns it pulls the prefix over TCP (lent, read,
checked, validated, published) and computes the rest, or computes all. The table has the time to the
first token of the pull over that of the computation, median and range over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above

from pdmesh.kvcache.manager import KvManager  # noqa: E402 - the path is set above
from pdmesh.kvcache.store import LatentStore  # noqa: E402
from pdmesh.kvtransfer.loopback import LoopbackListener  # noqa: E402
from pdmesh.kvtransfer.pull_costs import PullCosts  # noqa: E402
from pdmesh.kvtransfer.pull_exchange import PrefixExchange, tcp_transport  # noqa: E402
from pdmesh.kvtransfer.receiver import TransferReceiver  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.served import Placing, load_served_model  # noqa: E402
from pdmesh.prefill.runner import PrefillRunner  # noqa: E402
from pdmesh.prefill.scheduler import PrefillScheduler  # noqa: E402
from pdmesh.prefill.work import PrefillLimits  # noqa: E402
from pdmesh.prefill.worker import PrefillWorker  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import Lease, PageSource, PrefillRequest  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

REST = 16
SECRET = b"b" * 32
ALWAYS = PullCosts(tokens=1.0, seconds=1e6)


class Side:
    """Pages, an exchange, and a prefill worker."""

    def __init__(
        self, name: str, model: DeepseekV3, fmt: PageFormat, pages: int, peers: dict[str, Side]
    ) -> None:
        size = fmt.page_size
        self.kv = KvManager(pages, size, lambda _: None, lambda _: None)
        self.store = LatentStore(pages, fmt.num_layers, size, fmt.latent_width, model.dtype)
        self.limits = PrefillLimits(
            fmt, model.config.vocab_size, model.config.max_position_embeddings, SECRET
        )
        runner = PrefillRunner(model, self.store, size, fmt.mtp_layers > 0, fmt.arithmetic)
        scheduler = PrefillScheduler(512, size, 16)
        self.worker = PrefillWorker(runner, self.kv, self.store, scheduler, self.limits)
        self.exchange = PrefixExchange(
            self.kv,
            name,
            fmt,
            [tcp_transport(self.store, "127.0.0.1")],
            owner_at=lambda source: peers[source.instance].exchange,
            timeout_s=60.0,
        )
        self.exchange.fetcher.costs = ALWAYS
        self.exchange.start()
        self.worker.fetcher = self.exchange.fetcher
        peers[name] = self


class Bench:
    """An owner, a reader, and a decode worker's memory that takes what they push."""

    def __init__(self, longest: int, arithmetic: str) -> None:
        model, fmt = load_served_model(
            shipped_model(),
            "tiny",
            dtype="float32",
            placing=Placing(),
            mtp=True,
            page_size=64,
            arithmetic="exact" if arithmetic == "exact" else "fast",
            progress=lambda *_: None,
        )
        self.format = fmt
        self.vocab = model.config.vocab_size
        self.pages = -(-(longest + REST) // fmt.page_size)
        peers: dict[str, Side] = {}
        self.owner = Side("owner", model, fmt, 2 * self.pages + 4, peers)
        self.reader = Side("reader", model, fmt, 2 * self.pages + 4, peers)
        sink = LatentStore(self.pages, fmt.num_layers, fmt.page_size, fmt.latent_width, model.dtype)
        self.receiver = TransferReceiver(sink, [LoopbackListener(fmt)])
        self.receiver.start()
        self.count = 0

    async def ask(
        self, side: Side, tokens: Sequence[int], sources: tuple[PageSource, ...]
    ) -> float:
        """Seconds to the first token."""
        self.count += 1
        pages = self.owner.limits.num_pages(len(tokens))
        name = f"lease-{self.count}"
        self.receiver.expect(name, 1, list(range(pages)), 0, self.format.num_layers)
        lease = Lease(
            lease_id=name,
            generation=1,
            instance="decode",
            cached_pages=0,
            num_pages=pages,
            transports=self.receiver.addresses,
            page_format=self.format,
        )
        request = PrefillRequest(
            request_id=name,
            attempt=1,
            token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            sources=sources,
            lease=lease,
            deadline_ms=600_000,
        )
        began = time.perf_counter()
        await side.worker.prefill(request)
        took = time.perf_counter() - began
        await self.receiver.wait(name, 60.0)
        self.receiver.cancel(name)
        while side.worker.finishing:
            await asyncio.sleep(0.001)
        return took

    async def measure(self, prefix: int, rounds: int) -> list[tuple[float, float]]:
        """(pulled, computed) seconds of each round; the first, unmeasured one warms up."""
        tokens = [(7 * i + prefix) % (self.vocab - 20) + 20 for i in range(prefix + REST)]
        self.owner.kv.clear()
        await self.ask(self.owner, tokens[:prefix], ())
        hint = PageSource(
            instance="owner",
            role="decode",
            address="here:1",
            pages=prefix // self.format.page_size,
        )
        times = []
        for _ in range(rounds + 1):
            pair = []
            for sources in ((hint,), ()):
                self.reader.kv.clear()
                pair.append(await self.ask(self.reader, tokens, sources))
            times.append((pair[0], pair[1]))
        return times[1:]

    async def run(self, prefixes: Sequence[int], rounds: int) -> None:
        sides = (self.owner, self.reader)
        loops = [asyncio.ensure_future(side.worker.run()) for side in sides]
        print(f"{'prefix':>7} {'MB':>6} {'pull / compute':>22}")
        for prefix in prefixes:
            ratios = [a / b for a, b in await self.measure(prefix, rounds)]
            size = prefix // self.format.page_size * self.owner.store.page_bytes / 1e6
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(f"{prefix:>7} {size:>6.1f} {middle:>8.2f} ({low:.2f}-{high:.2f})")
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        for side in sides:
            await side.exchange.close()
            await side.worker.close(grace=1.0)
        self.receiver.close()


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--prefixes", type=int, nargs="+", default=[256, 512, 896], help="tokens of the first turn"
    )
    parser.add_argument("--rounds", type=int, default=5, help="ways taking turns")
    parser.add_argument(
        "--arithmetic", choices=("fast", "exact"), default="fast", help="of the mesh"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    async def run() -> None:
        await Bench(max(options.prefixes), options.arithmetic).run(options.prefixes, options.rounds)

    asyncio.run(run())


if __name__ == "__main__":
    main()
