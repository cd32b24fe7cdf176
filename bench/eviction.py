"""Eviction policies of the prefix cache, on a request trace: hit ratio in blocks, and time.

    .venv/bin/python -P bench/eviction.py --traces DIR        (--help for the options)

The trace's order counts, not its times. Each request is a chain of blocks: the leading ones that
are cached are hits, all are in the cache afterwards. ``lru`` and ``returns`` run inside
``pdmesh.kvcache``'s page manager, so leaf first and with all of its books; ``s3-fifo`` (a small
queue of a tenth, a main queue with two bits, a ghost queue) and ``belady`` (the block used farthest
in the future goes, which nobody can know) are plain simulations of single blocks. ``ideal`` is a
cache without end.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
from route_replay import TRACES, Trace, load  # noqa: E402 - the path is set above

from pdmesh.kvcache.eviction import EvictionName  # noqa: E402
from pdmesh.kvcache.manager import KvManager  # noqa: E402

Chains = Sequence[Sequence[bytes]]


def ours(name: EvictionName) -> Callable[[Chains, int], int]:
    """The page manager with one of its policies."""

    def hits(chains: Chains, capacity: int) -> int:
        manager = KvManager(capacity, 1, lambda _: None, lambda _: None, name)
        total = 0
        for chain in chains:
            chain = chain[:capacity]
            held = manager.reserve(chain, len(chain), len(chain))
            assert held is not None
            total += held.matched
            held.grow(held.remaining)
            held.publish(0, chain)
            held.release()
        assert manager.check_integrity() == []
        return total

    return hits


def leading(blocks: Sequence[bytes], cached: object) -> int:
    """How many leading blocks are in a container."""
    return next((i for i, b in enumerate(blocks) if b not in cached), len(blocks))  # type: ignore


def s3_fifo(chains: Chains, capacity: int) -> int:
    small, main, ghost = deque[bytes](), deque[bytes](), OrderedDict[bytes, None]()
    seen: dict[bytes, int] = {}
    most, total, inside = max(1, capacity // 10), 0, 0

    def evict() -> None:
        nonlocal inside
        while True:
            if inside > most or not main:
                block = small.popleft()
                inside -= 1
                if seen[block] > 0:
                    seen[block] = 0
                    main.append(block)
                    continue
                ghost[block] = None
                if len(ghost) > capacity:
                    ghost.popitem(last=False)
            else:
                block = main.popleft()
                if seen[block] > 0:
                    seen[block] -= 1
                    main.append(block)
                    continue
            del seen[block]
            return

    for chain in chains:
        total += leading(chain, seen)
        for block in chain:
            if block in seen:
                seen[block] = min(3, seen[block] + 1)
                continue
            if len(seen) >= capacity:
                evict()
            seen[block] = 0
            if block in ghost:
                del ghost[block]
                main.append(block)
            else:
                small.append(block)
                inside += 1
    return total


def belady(chains: Chains, capacity: int) -> int:
    never = len(chains)
    following: dict[bytes, int] = {}
    after: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        after.append([following.get(block, never) for block in chains[number]])
        following.update(dict.fromkeys(chains[number], number))
    after.reverse()
    cached: dict[bytes, int] = {}
    farthest: list[tuple[int, int, bytes]] = []
    total = 0
    for chain, uses in zip(chains, after, strict=True):
        total += leading(chain, cached)
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            cached[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(cached) > capacity:
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
    return total


def ideal(chains: Chains, capacity: int) -> int:
    seen: set[bytes] = set()
    total = 0
    for chain in chains:
        total += leading(chain, seen)
        seen.update(chain)
    return total


POLICIES: dict[str, Callable[[Chains, int], int]] = {
    "lru": ours("lru"),
    "s3-fifo": s3_fifo,
    "returns": ours("returns"),
    "belady": belady,
    "ideal": ideal,
}


def hit_ratios(trace: Trace, capacity: int, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Hit ratio, and microseconds of processor time a block, by policy."""
    chains = [request.blocks for request in trace.requests]
    count = sum(len(chain) for chain in chains)
    found = {}
    for name in names:
        began = time.thread_time()
        hits = POLICIES[name](chains, capacity)
        found[name] = hits / count, 1e6 * (time.thread_time() - began) / count
        if sys.stderr.isatty():
            print(f"\r{trace.name} {capacity}: {name}\033[K", end="", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    command_line.add_traces(parser)
    add = parser.add_argument
    add(
        "--tokens",
        nargs="+",
        type=int,
        default=[500_000, 3_000_000, 10_000_000],
        help="sizes of the cache",
    )
    add(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        choices=tuple(POLICIES),
        help="which to compare",
    )
    options = parser.parse_args(arguments)
    names = options.policies
    print(f"{'trace':<24} {'tokens':>9} {'blocks':>7}", *(f"{name:>15}" for name in names))
    for file in options.trace or TRACES:
        path = Path(options.traces or ".") / file
        if not path.is_file():
            raise SystemExit(f"no trace {path}: name its folder with --traces or PDMESH_TRACES")
        trace = load(path)
        for tokens in options.tokens:
            capacity = tokens // trace.block
            found = hit_ratios(trace, capacity, names)
            cells = (f"{100 * hit:>5.1f} % {us:>4.1f} us" for hit, us in found.values())
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            print(f"{trace.name:<24} {tokens:>9} {capacity:>7}", *(f"{c:>15}" for c in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
