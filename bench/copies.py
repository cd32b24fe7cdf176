"""Whether workers that give up pages with copies elsewhere first keep more prompts in the mesh.

    .venv/bin/python -P bench/copies.py --traces DIR        (--help for the options)

Request traces as for ``bench/route_replay.py``, against prefill *and* decode workers: every prompt
is computed at one and kept at one of the other, so most pages have two owners at first. The
router's policy ``priced`` chooses over its own index; a prefill worker fetches what another has
for a tenth of the time of computing it. Caches are the page manager, at half of the blocks each for
the two roles. Every five seconds of the trace a worker is told which of the pages that
``KvManager.coming`` names others have.

Printed: the share of tokens that nobody had to compute (own: found at the prefill worker itself),
the mean and the 99th percentile of the time to the first token, the share of evicted pages that had
been said to have a copy, and of these the share that had none any more.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
from route_replay import TRACES, Trace, load, record  # noqa: E402 - the path is set above

from pdmesh.kvcache.manager import KvManager  # noqa: E402
from pdmesh.kvcache.replicas import ReplicaHints  # noqa: E402
from pdmesh.registry.index import PrefixIndex  # noqa: E402
from pdmesh.registry.replicas import PERIOD_S  # noqa: E402
from pdmesh.router.policies import Costs, make_policy  # noqa: E402
from pdmesh.router.policies.costs import Link  # noqa: E402
from pdmesh.router.policy import Candidate, RequestFacts, Snapshot  # noqa: E402
from pdmesh.wire.hashes import OwnedPage  # noqa: E402
from pdmesh.wire.messages import Role  # noqa: E402

FETCHED = 0.1
"""Time of fetching a token over that of computing it."""


class Owners:
    """The index, and how many owners each page has."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.count: dict[bytes, int] = {}

    def tell(self, slot: int, owned: bool, pages: Sequence[bytes]) -> None:
        for page in pages:
            self.count[page] = self.count.get(page, 0) + (1 if owned else -1)
        self.index.apply(slot, 1, owned, pages)


class Worker:
    """A cache, and at prefill a queue."""

    def __init__(self, slot: int, role: Role, capacity: int, trace: Trace, mesh: Mesh) -> None:
        self.record = record(f"{role}-{slot:02}", role, trace.block)
        self.slot, self.capacity, self.mesh = slot, capacity, mesh
        self.free_at = 0.0
        self._asked = random.Random(slot).random() * PERIOD_S
        self.hints = ReplicaHints(clock=lambda: mesh.now)
        known = self.hints if mesh.copies else frozenset
        self.kv = KvManager(capacity, 1, self._owns, self._loses, "lru", known)

    def _owns(self, pages: list[OwnedPage]) -> None:
        self.mesh.owners.tell(self.slot, True, [page.page_hash for page in pages])

    def _loses(self, pages: list[OwnedPage]) -> None:
        mesh, known = self.mesh, self.hints()
        hashes = [page.page_hash for page in pages]
        mesh.owners.tell(self.slot, False, hashes)
        said = [page for page in hashes if page in known]
        mesh.evicted += len(hashes)
        mesh.said += len(said)
        mesh.wrong += sum(not mesh.owners.count[page] for page in said)

    def keep(self, chain: Sequence[bytes]) -> None:
        """A prompt of these blocks was computed, or has come."""
        now, count = self.mesh.now, self.mesh.owners.count
        if self.mesh.copies and now >= self._asked + PERIOD_S:
            self._asked = now
            coming = (page.page_hash for page in self.kv.coming())
            self.hints.learn(page for page in coming if count[page] > 1)
        chain = chain[: self.capacity]
        held = self.kv.reserve(chain, len(chain), len(chain))
        assert held is not None
        held.grow(held.remaining)
        held.publish(0, chain)
        held.release()


@dataclass
class Mesh:
    """What the workers share."""

    owners: Owners
    copies: bool
    now: float = 0.0
    evicted: int = 0
    said: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Result:
    hit: float
    own: float
    mean_s: float
    p99_s: float
    said: float
    wrong: float


def replay(trace: Trace, blocks: int, prefill: int, decode: int, copies: bool, seed: int) -> Result:
    """One mesh; ``blocks`` are those of one role."""
    mesh = Mesh(Owners(), copies)
    rate, rng = trace.rate / prefill, random.Random(seed)
    ps = [Worker(i, "prefill", blocks // prefill, trace, mesh) for i in range(prefill)]
    ds = [Worker(prefill + i, "decode", blocks // decode, trace, mesh) for i in range(decode)]
    by_name = {worker.record.instance: worker for worker in (*ps, *ds)}
    link = Link(0.0, 1000 * FETCHED / rate)
    costs = Costs(token_ms=1000 / rate, same_host=link, same_rack=link, elsewhere=link)
    policy = make_policy("priced", costs)
    found = own = 0
    times: list[float] = []
    for request in trace.requests:
        mesh.now = now = request.at
        depths = mesh.owners.index.match(request.blocks)
        candidates = tuple(
            Candidate(
                w.record,
                depths.get(w.slot, 0),
                own_tokens=max(0.0, w.free_at - now) * rate,
                empty_pages=w.kv.status().free,
            )
            for w in ps
        )
        others = tuple(Candidate(w.record, depths.get(w.slot, 0)) for w in ds)
        anchor = request.blocks[min(1, len(request.blocks) - 1)]
        facts = RequestFacts(request.tokens, request.output)
        route = policy.choose(facts, Snapshot(candidates, others, anchor), rng, now)
        at, to = by_name[route.prefill.instance], by_name[route.decode.instance]
        here = min(depths.get(at.slot, 0) * trace.block, request.tokens - 1)
        anywhere = min(max(depths.values(), default=0) * trace.block, request.tokens - 1)
        work = request.tokens - anywhere + FETCHED * (anywhere - here)
        at.free_at = max(at.free_at, now) + work / rate
        times.append(at.free_at - now)
        found, own = found + anywhere, own + here
        at.keep(request.blocks)
        to.keep(request.blocks)
    times.sort()
    total = sum(request.tokens for request in trace.requests)
    return Result(
        found / total,
        own / total,
        sum(times) / len(times),
        times[int(0.99 * len(times))],
        mesh.said / max(1, mesh.evicted),
        mesh.wrong / max(1, mesh.said),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    command_line.add_traces(parser)
    add = parser.add_argument
    add("--blocks", nargs="+", type=int, default=[10_000], help="of each role")
    add("--mesh", nargs="+", default=["4x4", "8x16"], metavar="PxD", help="prefill x decode")
    add("--first", type=int, metavar="N", help="the first N requests only")
    add("--seed", type=int, default=0, help="of ties")
    options = parser.parse_args(arguments)
    print(
        f"{'trace':<24} {'blocks':>7} {'mesh':>6} {'copies':<7} {'hit %':>6} {'own %':>6}"
        f" {'mean s':>8} {'p99 s':>8} {'said %':>7} {'wrong %':>7}"
    )
    for name in options.trace or TRACES:
        path = Path(options.traces or ".") / name
        if not path.is_file():
            raise SystemExit(f"no trace {path}: name its folder with --traces or PDMESH_TRACES")
        trace = load(path, options.first)
        for blocks in options.blocks:
            for shape in options.mesh:
                prefill, decode = map(int, shape.split("x"))
                for copies in (False, True):
                    r = replay(trace, blocks, prefill, decode, copies, options.seed)
                    print(
                        f"{trace.name:<24.24} {blocks:>7} {shape:>6} {'yes' if copies else 'no':<7}"
                        f" {100 * r.hit:>6.2f} {100 * r.own:>6.2f} {r.mean_s:>8.2f} {r.p99_s:>8.2f}"
                        f" {100 * r.said:>7.1f} {100 * r.wrong:>7.1f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
