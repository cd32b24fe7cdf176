"""What a router costs: the index of prefixes, the choice of workers, whole decisions, streaming.

    .venv/bin/python -P bench/router.py [PART ...] [--pages 1000 100000 1000000] [--json]

Processor time of the router's process, which other work on the machine disturbs less than the
clock; microseconds an operation, operations for each second of a core. Parts:

    match       owners of a 64-page prompt among 64 workers: in one index, as a whole and with a
                random part that is new, and in a running router's partitions; beside it, in turn,
                ai-dynamo-runtime's RadixTree, if installed or in --beside DIR (with its thread)
    choice      one choice among 64 prefill and 64 decode workers, every policy
    decision    all that comes before the first call to a worker: the hashes of a prompt of 64
                pages, the snapshot of 128 workers, the choice, its record, log line and booking
    streaming   a whole router between a process of decode workers and a process of clients that
                read as fast as they can. A pace of 0 ms is an answer that is there at once
    beside      a whole router and, in turn, SGLang's (``sglang-router``, installed or in --sglang
                DIR; policy cache_aware), each between workers that only stream and a client: the
                same prompts of 300 words, half of them shared by an eighth of the prompts, and the
                same answers. Once with one prefill and two decode workers on either side (PD), once
                with SGLang's two workers alike. What the two do is not the same: ours applies the
                chat template, tokenises, hashes pages, chooses a pair of workers, calls Reserve,
                Prefill, Stream and Release, makes text of token ids and looks for stop strings,
                over gRPC and in Python; SGLang's chooses by the text of the prompt and passes
                request and events on, over HTTP and in Rust

Chains of pages are owned to a random depth, by one worker each and every eighth by up to all, as
prefixes that many share are.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import router_beside  # noqa: E402 - the path is set above
import router_mesh as mesh  # noqa: E402
from figures import as_json  # noqa: E402
from router_load import Load  # noqa: E402
from router_match import (  # noqa: E402
    PROMPT_PAGES,
    WORKERS,
    Beside,
    Chain,
    Followed,
    Registered,
    chains,
    percentile,
    radix_tree,
    record,
    status_of,
)

from pdmesh.registry.index import PrefixIndex  # noqa: E402
from pdmesh.router.account import Account  # noqa: E402
from pdmesh.router.chooser import Chooser  # noqa: E402
from pdmesh.router.clients import WorkerClients  # noqa: E402
from pdmesh.router.metrics import Metrics  # noqa: E402
from pdmesh.router.policies import POLICY_NAMES, Costs, make_policy  # noqa: E402
from pdmesh.router.policies.costs import Link  # noqa: E402
from pdmesh.router.policy import Candidate, RequestFacts, Snapshot  # noqa: E402
from pdmesh.router.polled import Polled  # noqa: E402
from pdmesh.router.request import GenerateRequest  # noqa: E402
from pdmesh.router.run import Run  # noqa: E402
from pdmesh.router.server import settle  # noqa: E402
from pdmesh.router.stream import GatewayStream, Limits  # noqa: E402
from pdmesh.router.view import MeshView  # noqa: E402
from pdmesh.text.output import OutputText  # noqa: E402
from pdmesh.text.tokenizer import load_tokenizer  # noqa: E402
from pdmesh.wire.hashes import page_hashes, root_hash  # noqa: E402
from pdmesh.wire.messages import WorkerRecord  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

PARTS = ("match", "choice", "decision", "streaming", "beside")
PAGE_SIZE = mesh.FORMAT.page_size
KEY = b"k" * 32


@dataclass(frozen=True)
class Row:
    """One line of a table; what it is about, and numbers by name."""

    part: str
    case: str
    values: dict[str, float]

    def __str__(self) -> str:
        return f"{self.case:<36}" + "  ".join(f"{k} {v:,.4g}" for k, v in self.values.items())


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


# ---- the index ----------------------------------------------------------------------------


def match_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The index at each size."""
    tree = radix_tree(arguments.beside)
    if tree is None:
        say("ai-dynamo-runtime is not installed: the index is measured alone")
    for pages in arguments.pages:
        rng = random.Random(arguments.seed)
        index, live = PrefixIndex(), Followed([f"worker-{slot}" for slot in range(WORKERS)])
        other = None if tree is None else Beside(tree())
        asked: list[Chain] = []
        say(f"building an index of {pages:,} pages")
        for number, chain in enumerate(chains(pages, rng)):
            for slot, depth in chain.depths.items():
                index.apply(slot, 1, True, chain.pages[:depth])
                live.apply(slot, chain.pages[:depth])
                if other is not None:
                    other.apply(slot, chain.pages[:depth])
            if number < 4096 or rng.random() < 0.05:
                asked.append(chain)
        rng.shuffle(asked)
        settle()
        asked = asked[: arguments.repeats]
        name = f"{pages:,} pages"
        yield _match_row(name, index, live, other, asked)
        cut = [chain.cut(rng) for chain in asked]
        yield _match_row(f"{name}, part is new", index, live, other, cut)


def _match_row(
    name: str, index: PrefixIndex, live: Followed, other: Beside | None, asked: list[Chain]
) -> Row:
    ours: list[float] = []
    lives: list[float] = []
    theirs: list[float] = []
    for chain in asked[:50]:
        assert index.match(chain.pages) == chain.depths
        named = {live.names[slot]: depth for slot, depth in chain.depths.items()}
        assert live.match(chain.pages) == named
        assert other is None or other.match(other.key(chain.pages)) == chain.depths
    size = max(1, len(asked) // 10)
    for start in range(0, len(asked), size):
        prompts = [chain.pages for chain in asked[start : start + size]]
        ours.append(cpu_us(index.match, prompts))
        lives.append(cpu_us(live.match, prompts))
        if other is not None:
            theirs.append(cpu_us(other.match, [other.key(prompt) for prompt in prompts]))
    values = {
        "us": statistics.median(ours),
        "in partitions us": statistics.median(lives),
        "bytes a page": index.size().bytes_per_page,
    }
    if theirs:
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        values |= {"RadixTree us": statistics.median(theirs), "RadixTree / ours": ratio}
    return Row("match", name, values)


def cpu_us(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Processor time of one call, all threads, in microseconds."""
    began = time.process_time()
    for item in items:
        work(item)
    return (time.process_time() - began) / len(items) * 1e6


# ---- choices and decisions ----------------------------------------------------------------


def choice_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One choice among many workers, by each policy."""
    rng = random.Random(arguments.seed)
    records = {role: [record(role, i) for i in range(WORKERS)] for role in ("prefill", "decode")}
    snapshots = [
        Snapshot(
            prefill=tuple(_candidate(r, rng) for r in records["prefill"]),
            decode=tuple(_candidate(r, rng) for r in records["decode"]),
            anchor=rng.randbytes(16),
        )
        for _ in range(50)
    ]
    facts = RequestFacts(num_prompt_tokens=PROMPT_PAGES * PAGE_SIZE + 1, max_tokens=1000)
    links = Costs(pushes=(Link(0.2, 0.01), Link(0.2, 0.05), Link(0.2, 0.1)))
    policies = {name: make_policy(name) for name in POLICY_NAMES}
    policies["priced, links differ"] = make_policy("priced", links)
    for name, policy in policies.items():
        times = []
        for i in range(arguments.repeats):
            began = time.thread_time()
            policy.choose(facts, snapshots[i % len(snapshots)], rng, i / 100)
            times.append((time.thread_time() - began) * 1e6)
        values = {"p50 us": percentile(times, 0.5), "p99 us": percentile(times, 0.99)}
        yield Row("choice", name, values)


def _candidate(known: WorkerRecord, rng: random.Random) -> Candidate:
    return Candidate(
        record=known,
        owned_pages=rng.choice((0, 0, 0, rng.randint(0, PROMPT_PAGES))),
        own_requests=rng.randint(0, 8),
        own_tokens=rng.randint(0, 20_000),
        other_requests=rng.randint(0, 8),
        free_pages=rng.randint(0, 100_000),
        empty_pages=rng.randint(0, 1000),
    )


async def decision_rows(arguments: argparse.Namespace) -> list[Row]:
    """All that a router does for a request before it calls a worker."""
    rng = random.Random(arguments.seed)
    records = [record(role, i) for role in ("prefill", "decode") for i in range(WORKERS)]
    index = Followed([r.worker_id for r in records])
    root = root_hash(KEY, mesh.FORMAT.fingerprint())
    prompts = [tuple(rng.choices(range(4096), k=PROMPT_PAGES * PAGE_SIZE + 1)) for _ in range(64)]
    for prompt in prompts:
        pages = page_hashes(KEY, root, prompt, PAGE_SIZE)
        for slot in rng.sample(range(len(records)), rng.randint(1, 6)):
            index.apply(slot, pages[: rng.randint(1, PROMPT_PAGES)])
    for chain in chains(max(arguments.pages), rng):
        for slot, depth in chain.depths.items():
            index.apply(slot, chain.pages[:depth])
    metrics = Metrics()
    view = MeshView(Registered(records, index), WorkerClients(), "tiny", metrics)
    for known in records:
        view.note_poll(known.instance, Polled(status_of(known), 0))
    chooser = Chooser(rng, time.monotonic)
    account = Account(metrics, time.monotonic)
    gate = GatewayStream(
        OutputText(load_tokenizer(mesh.MODEL), ()), Limits(1000, frozenset(), 4096)
    )

    def decide(number: int) -> None:
        request = GenerateRequest(
            request_id=f"request-{number}",
            token_ids=prompts[number % len(prompts)],
            sampling=SamplingParams(max_tokens=1000),
            tenant="",
            received=0.0,
            deadline=1e12,
        )
        run = Run(request, 0, gate, KEY, (), time.monotonic)
        run.begin_attempt()
        route = chooser.choose(run, 1, view.snapshot(run.hashes))
        account.routed(run, route)
        with view.book(route, run.hashes) as booking:
            booking.prefilled()

    settle()
    for number in range(50):
        decide(number)
    each = cpu_us(decide, range(arguments.repeats))
    values = {"us": each, "a second and core": 1e6 / each}
    return [Row("decision", f"{PROMPT_PAGES} pages, {2 * WORKERS} workers", values)]


# ---- streaming ----------------------------------------------------------------------------


def streaming_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """A router between processes."""
    for pace in arguments.pace:
        say(f"{arguments.streams} streams of {arguments.tokens} tokens, one every {pace:g} ms")
        load = Load(arguments.streams, arguments.tokens, pace)
        done = asyncio.run(mesh.measure([load], workers=2))[0]
        values = {
            "tokens a second and core": done.tokens_per_core,
            "tokens a message": done.per_message,
            "messages a second and core": done.messages / done.router_s,
            "cores": done.busy,
        }
        if pace:
            values["between messages / pace"] = done.gap_ms / pace
        yield Row("streaming", f"{load.streams} streams, {pace:g} ms a token", values)


def beside_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """A whole router, and SGLang's in turn."""
    if not router_beside.available(arguments):
        say("sglang-router is not installed: this router is measured alone")
    for case, values in router_beside.rows(arguments):
        yield Row("beside", case, values)


# ---- all ----------------------------------------------------------------------------------


def rows(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The lines of one part, as they come."""
    if part == "match":
        yield from match_rows(arguments)
    elif part == "choice":
        yield from choice_rows(arguments)
    elif part == "decision":
        yield from asyncio.run(decision_rows(arguments))
    elif part == "streaming":
        yield from streaming_rows(arguments)
    else:
        yield from beside_rows(arguments)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--pages", type=int, nargs="+", default=[1000, 100_000], help="sizes of the index"
    )
    parser.add_argument("--beside", type=Path, help="directory that ai-dynamo-runtime is in")
    parser.add_argument("--sglang", type=Path, help="directory that sglang-router is in")
    parser.add_argument("--rounds", type=int, default=3, help="beside SGLang (default: 3)")
    parser.add_argument(
        "--requests", type=int, default=2048, help="beside SGLang, a round (default: 1024)"
    )
    parser.add_argument("--repeats", type=int, default=2000, help="operations (default: 2000)")
    parser.add_argument("--streams", type=int, default=64, help="at a time (default: 64)")
    parser.add_argument("--tokens", type=int, default=1024, help="of an answer (default: 1024)")
    parser.add_argument(
        "--pace",
        type=float,
        nargs="+",
        default=[10, 2, 1, 0.5, 0],
        help="milliseconds from token to token of each stream (default: 10 2 1 0.5 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and owners")
    parser.add_argument("--json", action="store_true", help="one object a line instead of text")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    for part in arguments.parts or PARTS:
        if not arguments.json:
            print(f"{part}:")
        for row in rows(part, arguments):
            print(as_json(asdict(row)) if arguments.json else f"  {row}", flush=True)


if __name__ == "__main__":
    main()
