"""Replays request traces against simulated prefill workers, with the router's own policies.

    .venv/bin/python -P bench/route_replay.py --traces DIR        (--help for the options)

DIR holds traces in Mooncake's format, one JSON object a line: timestamp (ms), input_length,
output_length and hash_ids, the chained ids of the prompt's blocks. Every request is routed in order
and at its time by ``pdmesh.router.policies`` over ``pdmesh.registry.index``; a worker is

- a queue, first come first served, that computes so many tokens a second that all workers together
  need nine tenths of the trace's time for all input tokens. The time to the first token is the wait
  and the tokens that are not cached over that rate; transfer and decode are left out;
- a cache of whole blocks, the total divided evenly. A prompt's blocks are there from its arrival
  on, what is generated is never inserted, and the block used longest ago goes, the end of a prompt
  before its beginning.

Printed for each policy: hit, the share of input tokens found in the cache; imbalance, the most
tokens that a worker computed over the mean; and the mean and 99th percentile of the time to the
first token. Where DIR has ``stats_mooncake.json``, its figures stand beside. With ``--seeds`` each
policy runs with several seeds of its ties; ``--check`` compares means within two standard errors.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402

from pdmesh.registry.index import PrefixIndex  # noqa: E402 - the path is set above
from pdmesh.router.policies import POLICY_NAMES, Costs, Policy, make_policy  # noqa: E402
from pdmesh.router.policy import Candidate, RequestFacts, Snapshot  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import Role, WorkerRecord  # noqa: E402

BUSY = 0.9
"""Share of the trace's time that computing everything would take."""
TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")
SHARED = "shared"
"""One worker with all the memory: the most that any routing can hit."""
PLAIN = ("random", "round_robin", "least_load", "session_affinity", "longest_prefix")
POLICIES = (SHARED, *PLAIN, "bounded_load", "min_ttft", "priced")
REFERENCE = {
    "random": "random{n}",
    "least_load": "least{n}",
    "longest_prefix": "best{n}",
    "bounded_load": "bound1.25_{n}",
    "min_ttft": "ttft{n}",
    SHARED: "shared",
}
HIT_SHARE = 0.97
LEAST_BLOCKS = 3000
"""``--check``: from so many blocks on, ``priced`` has to hit at least so much of what
``bounded_load`` does, and to be no slower than ``min_ttft``."""


@dataclass(frozen=True)
class Request:
    at: float
    tokens: int
    output: int
    blocks: tuple[bytes, ...]


@dataclass(frozen=True)
class Trace:
    name: str
    block: int
    requests: tuple[Request, ...]

    @property
    def rate(self) -> float:
        """Tokens a second of all workers together."""
        total = sum(request.tokens for request in self.requests)
        return total / max(self.requests[-1].at, 1e-3) / BUSY


@dataclass(frozen=True)
class Result:
    trace: str
    blocks: int | None
    workers: int
    policy: str
    hit: float
    imbalance: float
    mean_s: float
    p99_s: float
    choice_us: float
    reference: tuple[float, float, float] | None = None
    """Hit, imbalance and mean time of the same policy elsewhere."""
    error_s: float = 0.0
    """Standard error of ``mean_s`` over several seeds of the ties."""


def load(path: Path, limit: int | None = None) -> Trace:
    """Reads a trace; the block size is the one that fits all lengths."""
    packed = path.suffix == ".gz"
    with gzip.open(path, "rt") if packed else path.open() as lines:
        rows = [json.loads(line) for line in islice(lines, limit)]

    def fits(size: int) -> bool:
        return all(-(-row["input_length"] // size) == len(row["hash_ids"]) for row in rows)

    fitting = [size for size in (1 << bits for bits in range(2, 12)) if fits(size)]
    if not fitting:
        raise SystemExit(f"{path}: no block size fits the lengths and the hash_ids")
    names: dict[int, bytes] = {}
    requests = tuple(
        Request(
            at=row["timestamp"] / 1000,
            tokens=row["input_length"],
            output=row["output_length"],
            blocks=tuple(names.setdefault(i, i.to_bytes(16, "big")) for i in row["hash_ids"]),
        )
        for row in rows
    )
    return Trace(path.stem, fitting[0], requests)


class First(random.Random):
    """Breaks ties in favour of the first, as the reference does."""

    def choice(self, seq):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return seq[0]


class Worker:
    """A queue and a cache."""

    def __init__(self, slot: int, record: WorkerRecord, capacity: int | None, rate: float) -> None:
        self.record = record
        self.computed = 0
        self._slot = slot
        self._capacity = capacity
        self._rate = rate
        self._free_at = 0.0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def seen(self, owned: int, now: float) -> Candidate:
        waiting = max(0.0, self._free_at - now) * self._rate
        empty = None if self._capacity is None else self._capacity - len(self._blocks)
        return Candidate(self.record, owned, own_tokens=waiting, empty_pages=empty)

    def matched(self, blocks: Sequence[bytes]) -> int:
        """Leading blocks that are really here."""
        return next((i for i, b in enumerate(blocks) if b not in self._blocks), len(blocks))

    def serve(self, request: Request, cached: int, index: PrefixIndex) -> float:
        """Seconds to the first token; the cache and the index follow."""
        work = request.tokens - cached
        self.computed += work
        self._free_at = max(self._free_at, request.at) + work / self._rate
        new = [b for b in request.blocks if b not in self._blocks]
        for block in reversed(request.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = []
        while self._capacity is not None and len(self._blocks) > self._capacity:
            gone.append(self._blocks.popitem(last=False)[0])
        index.apply(self._slot, 1, True, new)
        index.apply(self._slot, 1, False, gone)
        return self._free_at - request.at


def record(name: str, role: Role, block: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        instance=name,
        role=role,
        address=f"{name}:1",
        page_format=PageFormat(
            model="trace",
            weights="trace",
            num_layers=1,
            page_size=block,
            latent_width=1,
            dtype="float32",
            mtp_layers=0,
        ),
        model="trace",
        vocab_size=1,
        max_context=1 << 30,
        capacity_pages=1 << 30,
    )


def replay(
    trace: Trace, blocks: int | None, count: int, name: str, rng: random.Random, progress: str = ""
) -> Result:
    """One policy over one mesh; ``blocks`` None: a cache without end."""
    workers = 1 if name == SHARED else count
    rate = trace.rate / workers
    share = None if blocks is None else blocks // workers
    pool = [
        Worker(slot, record(f"p{slot:02}", "prefill", trace.block), share, rate)
        for slot in range(workers)
    ]
    by_name = {worker.record.instance: worker for worker in pool}
    decode = (Candidate(record("d0", "decode", trace.block)),)
    costs = Costs(token_ms=1000 / rate, fetching=False)
    policy: Policy = make_policy("min_ttft" if name == SHARED else name, costs)
    index = PrefixIndex()
    hit, times, spent = 0, [], 0.0
    said = time.monotonic()
    for i, request in enumerate(trace.requests):
        began = time.thread_time()
        depths = index.match(request.blocks)
        prefill = tuple(w.seen(depths.get(s, 0), request.at) for s, w in enumerate(pool))
        facts = RequestFacts(request.tokens, request.output)
        # The first block is the same for all prompts of some traces; the second is not.
        anchor = request.blocks[min(1, len(request.blocks) - 1)]
        route = policy.choose(facts, Snapshot(prefill, decode, anchor), rng, request.at)
        spent += time.thread_time() - began
        worker = by_name[route.prefill.instance]
        cached = min(worker.matched(request.blocks) * trace.block, request.tokens - 1)
        hit += cached
        times.append(worker.serve(request, cached, index))
        if progress and time.monotonic() - said > 0.5:
            said = time.monotonic()
            done = 100 * i // len(trace.requests)
            print(f"\r{progress} {name}: {done:3} % \033[K", end="", file=sys.stderr, flush=True)
    times.sort()
    mean = sum(w.computed for w in pool) / workers
    return Result(
        trace=trace.name,
        blocks=blocks,
        workers=count,
        policy=name,
        hit=hit / sum(r.tokens for r in trace.requests),
        imbalance=max(w.computed for w in pool) / mean,
        mean_s=sum(times) / len(times),
        p99_s=times[int(0.99 * len(times))],
        choice_us=1e6 * spent / len(times),
    )


def averaged(results: Sequence[Result]) -> Result:
    """One policy's runs with several seeds as one."""
    if len(results) == 1:
        return results[0]

    def mean(name: str) -> float:
        return statistics.mean(getattr(result, name) for result in results)

    figures = ("hit", "imbalance", "mean_s", "p99_s", "choice_us")
    error = statistics.stdev(r.mean_s for r in results) / len(results) ** 0.5
    return replace(results[0], **{name: mean(name) for name in figures}, error_s=error)


def references(path: Path) -> dict[tuple[str, str], dict[str, object]]:
    """Rows of ``stats_mooncake.json`` by trace and capacity; none where there is no such file."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return {
        (trace.removesuffix(".jsonl"), row["cap"]): row
        for trace, stats in found.items()
        for row in stats["table"]
    }


def with_reference(result: Result, rows: dict[tuple[str, str], dict[str, object]]) -> Result:
    row = rows.get((result.trace, "inf" if result.blocks is None else str(result.blocks)), {})
    key = REFERENCE.get(result.policy, "").format(n=result.workers)
    if not key or key not in row:
        return result
    mean = row.get(f"{key}_ttft", [0.0])[0]  # type: ignore[index]
    triple = (float(row[key]), float(row.get(f"{key}_imb", 0.0)), float(mean))  # type: ignore
    return replace(result, reference=triple)


def line(result: Result) -> str:
    blocks = "inf" if result.blocks is None else str(result.blocks)
    text = (
        f"{result.trace:<24.24} {blocks:>7} {result.workers:>3} {result.policy:<17}"
        f"{100 * result.hit:>6.2f} {result.imbalance:>6.2f} {result.mean_s:>9.2f}"
        f" {result.p99_s:>9.2f} {result.choice_us:>6.0f}"
    )
    if result.reference is not None:
        hit, imbalance, mean = result.reference
        text += f"   | {100 * hit:>5.2f} {imbalance:>6.2f} {mean:>9.2f}"
    return text


HEADER = (
    f"{'trace':<24} {'blocks':>7} {'n':>3} {'policy':<17}{'hit %':>6} {'imbal.':>6}"
    f" {'mean s':>9} {'p99 s':>9} {'us':>6}   | reference: hit, imbalance, mean"
)


def shortfalls(results: Sequence[Result], exact: bool) -> Iterator[str]:
    """Where ``priced`` falls short and, if ``exact``, where hits are not the reference's."""
    cells: dict[tuple[str, int | None, int], dict[str, Result]] = {}
    for result in results:
        key = (result.trace, result.blocks, result.workers)
        cells.setdefault(key, {})[result.policy] = result
        if exact and result.reference and abs(result.hit - result.reference[0]) > 0.005:
            yield f"{key}: {result.policy} hits {result.hit:.4f}, not {result.reference[0]:.4f}"
    for key, cell in cells.items():
        if not {"priced", "bounded_load", "min_ttft"} <= cell.keys():
            continue
        ours, bounded, quickest = (cell[n] for n in ("priced", "bounded_load", "min_ttft"))
        if key[1] is not None and key[1] < LEAST_BLOCKS:
            continue
        if ours.hit < HIT_SHARE * bounded.hit:
            yield f"{key}: priced hits {ours.hit:.4f}, bounded_load {bounded.hit:.4f}"
        noise = 2 * math.hypot(ours.error_s, quickest.error_s)
        if ours.mean_s > quickest.mean_s + noise:
            yield f"{key}: priced takes {ours.mean_s:.4f} s, min_ttft {quickest.mean_s:.4f} s"
        if quickest.reference and ours.mean_s > quickest.reference[2] + 0.005 + noise:
            yield f"{key}: priced takes {ours.mean_s:.4f} s, elsewhere {quickest.reference[2]} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    command_line.add_traces(parser)
    add = parser.add_argument
    add(
        "--blocks",
        nargs="+",
        default=["1000", "3000", "10000", "30000", "100000", "inf"],
        help="cached blocks of a worker",
    )
    add("--workers", nargs="+", type=int, default=[4, 8, 16], help="numbers of workers")
    add(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        choices=(SHARED, *POLICY_NAMES),
        help="which to compare",
    )
    add("--first", type=int, metavar="N", help="the first N requests only")
    add("--ties", choices=("random", "first"), default="random", help="first: as the reference")
    add("--seed", type=int, default=0, help="of ties")
    add("--seeds", type=int, default=1, metavar="N", help="means of N runs, from --seed on")
    add("--json", type=Path, metavar="FILE", help="write the results here as well")
    add("--check", action="store_true", help="say where priced falls short; exit 1 if anywhere")
    options = parser.parse_args(arguments)
    folder = Path(options.traces or ".")
    results: list[Result] = []
    print(HEADER)
    for name in options.trace or TRACES:
        path = folder / name
        if not path.is_file():
            raise SystemExit(f"no trace {path}: name its folder with --traces or PDMESH_TRACES")
        trace, rows = load(path, options.first), references(folder / "stats_mooncake.json")
        for text in options.blocks:
            blocks = None if text == "inf" else int(text)
            for count in options.workers:
                for policy in options.policies:
                    first = options.ties == "first" and policy != "random"
                    make = First if first else random.Random
                    progress = f"{trace.name} {text} x{count}" if sys.stderr.isatty() else ""
                    seeds = range(options.seed, options.seed + max(1, options.seeds))
                    result = averaged(
                        [replay(trace, blocks, count, policy, make(s), progress) for s in seeds]
                    )
                    results.append(with_reference(result, rows if not options.first else {}))
                    print("\r\033[K" * bool(progress) + line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(as_json([asdict(result) for result in results], 1))
    wrong = list(shortfalls(results, options.ties == "first")) if options.check else []
    for text in wrong:
        print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
