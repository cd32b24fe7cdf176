"""Ranks with different numbers of rows in one step: as they are, and filled up to a common number.

    .venv/bin/python -P bench/ep_unequal.py        (--help for the options)

Ranks are processes that share the experts of the shipped model, one on each core, as ranks have a
device each. In every step each has so many sequences with one new token, and the same steps are
made in three ways, which take turns:

- `as they are`: a rank sends and computes its own rows; one without a row only serves its experts;
- `own sizes`: each fills its batch up to the next power of two, as graphs captured for some sizes
  need, and no rank knows of another's size;
- `padded`: an all-reduce (gloo) first tells all ranks the largest batch, and each fills its own up
  to that.

Rows that fill up are rows like others: routed, sent and computed. A step lasts from its begin, for
which all ranks wait (not counted), until the last one has its logits. Bytes are those of dispatch
and combine between the ranks, uncompressed float32. The tokens of all rows that count are checked
to be the same in the three ways.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is loaded, here and in every rank

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
import torch.distributed as dist  # noqa: E402
from rank_processes import found_by, take_core  # noqa: E402

from pdmesh.launch.ports import claim_ports  # noqa: E402
from pdmesh.launch.ranks import FIRST_PORT  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.parallel.member import Member, Place  # noqa: E402
from pdmesh.model.parallel.virtual import Settings  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

CONTEXT = 100
PAGES = 2
WAYS = ("as they are", "own sizes", "padded")


@dataclass
class Found:
    """Of one way at one rank: seconds and bytes of each step, tokens of its rows, rows computed."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: int = 0


def work(
    rank: int,
    addresses: Sequence[str],
    meeting: str,
    counts: Sequence[Sequence[int]],
    out: Connection,
) -> None:
    """The process of a rank; counts[s] are the rows of all ranks in step s."""
    take_core(rank)
    model = load_model(shipped_model(), torch.float32, torch.device("cpu"))
    place = Place(rank, tuple(addresses), "bench", silence_s=60.0)
    member = Member(model, place, settings=Settings("exact", mode="auto"))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(addresses))
    member.start()
    most = 1 << (max(map(max, counts)) - 1).bit_length()
    pool = model.new_latents(PAGES * most)
    pages = [tuple(range(PAGES * i, PAGES * i + PAGES)) for i in range(most)]
    rng = random.Random(rank)
    contexts = [[rng.randrange(20, 4096) for _ in range(CONTEXT)] for _ in pages]
    slices = [SequenceSlice(table, 0, CONTEXT, 0) for table in pages]
    found = {way: Found() for way in WAYS}
    with torch.inference_mode():
        model.forward(Batch.build(slices, contexts), pool, "absorbed")
        for number, of_all in enumerate(counts):
            tokens = [rng.randrange(20, 4096) for _ in pages]
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                own = of_all[rank]
                dist.barrier()
                sent, began = member.status().sent_bytes, time.monotonic()
                rows = rows_of(way, own)
                chosen: list[int] = []
                if rows:
                    step = [SequenceSlice(p, CONTEXT, CONTEXT + 1, CONTEXT) for p in pages[:rows]]
                    batch = Batch.build(step, [[token] for token in tokens[:rows]])
                    hidden = member.forward(batch, pool, "absorbed")
                    chosen = model.logits(hidden).argmax(dim=-1).tolist()
                ended = time.monotonic()
                dist.barrier()
                into = found[way]
                into.seconds.append(ended - began)
                into.sent.append(member.status().sent_bytes - sent)
                into.tokens.append(chosen[:own])
                into.rows += rows
    out.send(found)
    dist.barrier()
    member.close()
    dist.destroy_process_group()


def rows_of(way: str, own: int) -> int:
    """Rows that a rank with `own` computes."""
    if way == "as they are" or (way == "own sizes" and not own):
        return own
    if way == "own sizes":
        return 1 << (own - 1).bit_length()
    largest = torch.tensor([own])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def measured(
    ranks: int, counts: Sequence[Sequence[int]], ports: Sequence[int]
) -> list[dict[str, Found]]:
    """What every rank found."""
    addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
    return found_by(work, ranks, addresses, f"tcp://127.0.0.1:{ports[0]}", counts)


def drawn(name: str, ranks: int, most: int, steps: int) -> list[list[int]]:
    """Rows of all ranks in each step; no step without any."""
    rng = random.Random(name)
    found = []
    for _ in range(steps):
        if name == "one full, the others few":
            counts = [rng.randint(0, max(1, most // 8)) for _ in range(ranks)]
            counts[rng.randrange(ranks)] = most
        else:
            counts = [rng.randint(0, most) for _ in range(ranks)]
            counts[rng.randrange(ranks)] = max(1, max(counts))
        found.append(counts)
    return found


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="best one a core (2)")
    parser.add_argument("--most", type=int, default=32, help="rows of the largest batch (32)")
    parser.add_argument("--steps", type=int, default=60, help="of each kind (60)")
    args = parser.parse_args()
    print("| rows of a rank | way | step, over as they are | bytes | rows computed |")
    print("|---|---|---|---|---|")
    for name in (f"0 to {args.most} at random", "one full, the others few"):
        counts = drawn(name, args.ranks, args.most, args.steps)
        with claim_ports("127.0.0.1", FIRST_PORT, args.ranks + 1, ()) as ports:
            found = measured(args.ranks, counts, ports)
        for rank in found:
            if any(rank[way].tokens != rank[WAYS[0]].tokens for way in WAYS):
                sys.exit("tokens differ")
        plain = [max(r[WAYS[0]].seconds[s] for r in found) for s in range(args.steps)]
        for way in WAYS:
            seconds = [max(r[way].seconds[s] for r in found) for s in range(args.steps)]
            ratio = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
            sent, rows = (
                sum(map(value, (r[way] for r in found)))
                / sum(map(value, (r[WAYS[0]] for r in found)))
                for value in (lambda f: sum(f.sent), lambda f: f.rows)
            )
            print(f"| {name} | {way} | {ratio:.2f} | {sent:.2f} | {rows:.2f} |")
    print("tokens of all ways are the same")


if __name__ == "__main__":
    main()
