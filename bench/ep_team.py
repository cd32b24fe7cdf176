"""What sharing attention heads between two processes is worth, and what keeping pages alike costs.

    .venv/bin/python -P bench/ep_team.py        (--help for the options)

Two ranks, a core each, share the experts of the shipped model; one of them has all requests:
sequences behind contexts of several lengths, one new token each. The same steps are made by a group
where the other rank only serves experts (TP1), and by one where it computes half of the heads
(TP2). Printed are medians: the step of TP2 over that of TP1, and of the step of TP2 the part in
which the leader compares pages with what its follower has. Both give the same hidden states, which
is checked.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is loaded, here and in every rank

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from rank_processes import found_by, take_core  # noqa: E402

from pdmesh.launch.ports import claim_ports  # noqa: E402
from pdmesh.launch.ranks import FIRST_PORT  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.parallel.member import Member, Place  # noqa: E402
from pdmesh.model.parallel.team import Rows  # noqa: E402
from pdmesh.model.parallel.virtual import Settings  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

PAGE = 64


@dataclass
class Found:
    """Seconds by context: of steps with TP1, with TP2, and of comparing in these."""

    alone: dict[int, list[float]] = field(default_factory=dict)
    shared: dict[int, list[float]] = field(default_factory=dict)
    compared: dict[int, list[float]] = field(default_factory=dict)


def work(
    rank: int,
    addresses: Sequence[Sequence[str]],
    options: argparse.Namespace,
    over: Event,
    out: Connection,
) -> None:
    """The process of a rank, which is in two groups: one of TP1 and one of TP2."""
    take_core(rank)
    model = load_model(shipped_model())
    members = []
    for tp in (1, 2):
        place = Place(rank, tuple(addresses[tp - 1]), f"tp{tp}", silence_s=60.0)
        members.append(Member(model, place, settings=Settings(mode="dispatch_overlap"), tp=tp))
        members[-1].start()
    if rank == 0:
        with torch.inference_mode():
            out.send(led(model, members, options))
        over.set()
    else:
        out.send(None)
    over.wait()
    for member in members:
        member.close()


def led(model: DeepseekV3, members: Sequence[Member], options: argparse.Namespace) -> Found:
    """What the rank with the requests measures."""
    found, took = Found(), list[float]()

    def timed(lacking: Callable[[Rows], torch.Tensor], rows: Rows) -> torch.Tensor:
        began = time.monotonic()
        pages = lacking(rows)
        took.append(time.monotonic() - began)
        return pages

    for context in options.contexts:
        each = -(-(context + 1) // PAGE)
        pool = model.new_latents(each * options.rows)
        pool.normal_(generator=torch.Generator().manual_seed(context))
        tables = [tuple(range(each * i, each * i + each)) for i in range(options.rows)]
        slices = [SequenceSlice(table, context, context + 1, context) for table in tables]
        batch = Batch.build(slices, [[20 + i] for i in range(options.rows)])
        members[1].forward(batch, pool, "absorbed")  # the pages go over with it
        known = members[1]._team._known
        known.lacking = partial(timed, type(known).lacking.__get__(known))  # type: ignore[method-assign]
        for _ in range(options.steps):
            hidden = []
            for member, into in zip(members, (found.alone, found.shared), strict=True):
                began = time.monotonic()
                hidden.append(member.forward(batch, pool, "absorbed"))
                into.setdefault(context, []).append(time.monotonic() - began)
            found.compared.setdefault(context, []).append(took.pop())
            if not torch.equal(*hidden):
                sys.exit("hidden states differ")
    return found


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[100, 1000, 3000],
        help="tokens before the new one",
    )
    parser.add_argument("--rows", type=int, default=16, help="sequences (16)")
    parser.add_argument("--steps", type=int, default=20, help="of each context and way (20)")
    options = parser.parse_args()
    over = mp.get_context("spawn").Event()
    with claim_ports("127.0.0.1", FIRST_PORT, 4, ()) as ports:
        addresses = [[f"127.0.0.1:{port}" for port in ports[i : i + 2]] for i in (0, 2)]
        found, _ = found_by(work, 2, addresses, options, over)
    print("| context | step of TP2 over TP1 | of it comparing |")
    print("|---|---|---|")
    for length in options.contexts:
        pairs = zip(found.shared[length], found.alone[length], strict=True)
        ratio = statistics.median(two / one for two, one in pairs)
        pairs = zip(found.compared[length], found.shared[length], strict=True)
        part = statistics.median(compared / step for compared, step in pairs)
        print(f"| {length} | {ratio:.2f} | {part:.0%} |")


if __name__ == "__main__":
    main()
