"""The router's index and choice: time of a match among a million pages, and of a joint choice.

    .venv/bin/python -P bench/index.py            (--help for the options)

Prompts of 64 pages, each owned whole by one of 64 workers and in part by up to three more. Matched
are prompts as they are, and prompts of which a random part is new. If the package
``ai-dynamo-runtime`` is installed, or named by --dynamo DIR, its ``RadixTree`` holds the same pages
and takes the same prompts, in turns. A choice is ``priced`` over 64 x 64 workers behind a match.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

from route_replay import record  # noqa: E402 - the path is set above

from pdmesh.router.index import PrefixIndex  # noqa: E402
from pdmesh.router.policies import make_policy  # noqa: E402
from pdmesh.router.policy import Candidate, RequestFacts, Snapshot  # noqa: E402

PAGES = 64
"""Of a prompt."""
Match = Callable[[Sequence[int]], object]


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Page hashes as 64-bit numbers, which is what the other index takes."""
    return [[rng.getrandbits(63) for _ in range(PAGES)] for _ in range(count)]


def owners(workers: int, rng: random.Random) -> list[tuple[int, int]]:
    """(worker, leading pages) of a prompt, the first one of all."""
    chosen = rng.sample(range(workers), min(workers, rng.choice((1, 1, 1, 2, 4))))
    return [(w, PAGES if i == 0 else rng.randint(1, PAGES)) for i, w in enumerate(chosen)]


def named(hashes: Sequence[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in hashes]


def other_index(chains: Sequence[list[int]], held: Sequence[list[tuple[int, int]]]) -> Match | None:
    """``find_matches`` of a RadixTree with the same pages; None where it is not installed."""
    try:
        from dynamo._core import RadixTree
    except ImportError:
        return None
    tree, number = RadixTree(), 0
    for chain, holders in zip(chains, held, strict=True):
        for worker, depth in holders:
            number += 1
            blocks = [{"block_hash": h, "tokens_hash": h} for h in chain[:depth]]
            data = {"stored": {"parent_hash": None, "blocks": blocks}}
            event = {"event_id": number, "data": data, "dp_rank": 0}
            tree.apply_event(worker, json.dumps(event).encode())
    return lambda hashes: tree.find_matches(hashes)


def measured(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return 1e6 * (clock() - began)


def row(name: str, times: list[float], over: list[float] | None = None) -> None:
    times.sort()
    text = f"{name:<38} {times[len(times) // 2]:>8.1f} {times[int(0.99 * len(times))]:>8.1f}"
    if over:
        over.sort()
        text += f"   {times[len(times) // 2] / over[len(over) // 2]:.2f}"
    print(text, flush=True)


def choices(index: PrefixIndex, chains: list[list[int]], workers: int, rounds: int) -> list[float]:
    """Processor time of a match and a choice, in us; making the snapshot is the view's work."""
    rng = random.Random(2)
    policy = make_policy("priced")
    prefill = [record(f"p{i}", "prefill", 64) for i in range(workers)]
    decode = [record(f"d{i}", "decode", 64) for i in range(workers)]
    facts = RequestFacts(num_prompt_tokens=64 * PAGES + 10, max_tokens=512)
    idle = tuple(Candidate(r, own_requests=rng.randrange(8), free_pages=9000) for r in decode)
    times = []
    for i in range(rounds):
        hashes = named(rng.choice(chains))
        depths = index.match(hashes)
        waiting = [rng.randrange(20_000) for _ in prefill]
        busy = tuple(
            Candidate(r, depths.get(slot, 0), own_tokens=waiting[slot], empty_pages=0)
            for slot, r in enumerate(prefill)
        )
        snapshot = Snapshot(busy, idle, hashes[0])
        times.append(
            measured(
                lambda h=hashes, s=snapshot, t=i / 100: (  # type: ignore[misc]
                    index.match(h),
                    policy.choose(facts, s, rng, t),
                ),
                time.thread_time,
            )
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the router's index and choice.")
    add = parser.add_argument
    add("--pages", type=int, default=1_000_000)
    add("--workers", type=int, default=64)
    add("--rounds", type=int, default=5000)
    add("--dynamo", metavar="DIR", help="folder into which ai-dynamo-runtime was installed")
    options = parser.parse_args()
    if options.dynamo:
        sys.path.append(options.dynamo)
    rng = random.Random(1)
    chains = prompts(options.pages // PAGES, rng)
    held = [owners(options.workers, rng) for _ in chains]
    index = PrefixIndex()
    for chain, holders in zip(chains, held, strict=True):
        for worker, depth in holders:
            index.apply(worker, 1, True, named(chain[:depth]))
    gc.freeze()  # the prompts of this benchmark are no part of a router
    size = index.size()
    print(f"{size.pages} pages, {size.owners} workers, {size.bytes_per_page:.0f} bytes a page")
    other = other_index(chains, held)
    print(f"{'us':<38} {'median':>8} {'p99':>8}   over RadixTree")
    for name, whole in (("match, prompt of 64 cached pages", True), ("match, part is new", False)):
        ours, theirs = [], []
        for _ in range(options.rounds):
            chain = rng.choice(chains)
            if not whole:
                depth = rng.randrange(PAGES)
                chain = chain[:depth] + [rng.getrandbits(63) for _ in range(PAGES - depth)]
            hashes = named(chain)
            ours.append(measured(lambda h=hashes: index.match(h)))  # type: ignore[misc]
            if other is not None:
                theirs.append(measured(lambda c=chain: other(c)))  # type: ignore[misc]
        row(name, ours, theirs)
        if theirs:
            row("  RadixTree", theirs)
    row("match and choice, 64 x 64 workers", choices(index, chains, options.workers, 2000))


if __name__ == "__main__":
    main()
