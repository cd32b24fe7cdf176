"""From how many rows on two microbatches pay, on this machine: what ``microbatch_rows`` is to be.

    .venv/bin/python -P bench/ep_microbatch.py        (--help for the options)

Ranks are processes that share the experts of a model, each on one core, and have equal batches of
sequences with one new token. The same steps are made in one microbatch (``dispatch_overlap``) and
in two, which take turns; printed are the medians of their ratio, and the smallest batch from which
on two are faster. A step lasts from its begin, for which all ranks wait, until the last one has its
hidden states. Both ways are checked to give the same bits.

``--trace FILE`` writes what every rank did in one step of ``--trace-rows`` rows as a Chrome trace,
with its waits for others on a track of their own: open it in Perfetto, or draw it with
``tools/draw_trace.py``.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import get_args

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
from pdmesh.model.parallel.member import Member, Place  # noqa: E402
from pdmesh.model.parallel.schedule import Mode  # noqa: E402
from pdmesh.model.parallel.timeline import Event, Timeline, chrome_trace  # noqa: E402
from pdmesh.model.parallel.virtual import Settings  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

CONTEXT = 100
PAGES = 2
MODES: tuple[Mode, Mode] = ("dispatch_overlap", "microbatch")


@dataclass
class Plan:
    """What ranks do: steps of so many rows each, and which step is recorded."""

    model: Path
    rows: Sequence[int]
    steps: int
    trace_rows: int
    trace_mode: Mode


@dataclass
class Found:
    """Of one rank: seconds by rows and mode, and the events of the step that was recorded."""

    seconds: dict[tuple[int, Mode], list[float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    same: bool = True


def work(rank: int, addresses: Sequence[str], meet: Barrier, plan: Plan, out: Connection) -> None:
    """The process of a rank."""
    take_core(rank)
    model = load_model(plan.model)
    timeline = Timeline(time.monotonic)
    place = Place(rank, tuple(addresses), "bench", silence_s=60.0)
    member = Member(model, place, timeline=timeline)
    member.start()
    most = max(*plan.rows, plan.trace_rows)
    pool = model.new_latents(PAGES * most)
    pages = [tuple(range(PAGES * i, PAGES * i + PAGES)) for i in range(most)]
    rng, vocabulary = random.Random(rank), model.config.vocab_size
    found = Found()
    with torch.inference_mode():
        for table in pages:
            context = [[rng.randrange(20, vocabulary) for _ in range(CONTEXT)]]
            item = SequenceSlice(table, 0, CONTEXT, 0)
            model.forward(Batch.build([item], context), pool, "mha")

        def step(rows: int, mode: Mode) -> tuple[float, torch.Tensor]:
            slices = [SequenceSlice(p, CONTEXT, CONTEXT + 1, CONTEXT) for p in pages[:rows]]
            batch = Batch.build(slices, [[20 + i] for i in range(rows)])
            member.settings = Settings(mode=mode)
            meet.wait()
            began = time.monotonic()
            hidden = member.forward(batch, pool, "absorbed")
            took = time.monotonic() - began
            meet.wait()
            return took, hidden

        for rows in plan.rows:
            for number in range(plan.steps + 1):
                hidden = []
                for turn in range(2):
                    mode = MODES[(number + turn) % 2]
                    took, got = step(rows, mode)
                    hidden.append(got)
                    if number:  # the first one warms up
                        found.seconds.setdefault((rows, mode), []).append(took)
                found.same &= torch.equal(*hidden)
        timeline.events.clear()
        step(plan.trace_rows, plan.trace_mode)
        found.events = list(timeline.events)
    out.send(found)
    meet.wait()
    member.close()


def measured(ranks: int, plan: Plan) -> list[Found]:
    """What every rank found."""
    meet = mp.get_context("spawn").Barrier(ranks)
    with claim_ports("127.0.0.1", FIRST_PORT, ranks, ()) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        return found_by(work, ranks, addresses, meet, plan)


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and a trace to --trace FILE")
    parser.add_argument("--ranks", type=int, default=2, help="best one a core (2)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="batches of a rank"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each size and way (20)")
    parser.add_argument("--model", type=Path, default=shipped_model(), help="checkpoint directory")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace to this file")
    parser.add_argument("--trace-rows", type=int, default=64, help="of its step (64)")
    parser.add_argument(
        "--trace-mode", choices=get_args(Mode), default="microbatch", help="its schedule"
    )
    args = parser.parse_args()
    plan = Plan(args.model, sorted(args.rows), args.steps, args.trace_rows, args.trace_mode)
    found = measured(args.ranks, plan)
    if not all(one.same for one in found):
        sys.exit("hidden states differ")
    print("| rows of a rank | two microbatches over one: step, median | quartiles |")
    print("|---|---|---|")
    ratios: list[tuple[int, float]] = []
    for rows in plan.rows:
        of_modes = [
            [max(one.seconds[rows, mode][s] for one in found) for s in range(plan.steps)]
            for mode in MODES
        ]
        each = [two / one for one, two in zip(*of_modes, strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        ratios.append((rows, middle))
        print(f"| {rows} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    slower = [rows for rows, ratio in ratios if ratio >= 1]
    paying = [rows for rows, _ in ratios if rows > max(slower, default=0)]
    print(f"microbatch_rows = {paying[0]}" if paying else "two microbatches never pay here")
    if args.trace is not None:
        events = [event for one in found for event in one.events]
        args.trace.write_text(chrome_trace(events))
        print(f"{len(events)} events of {args.ranks} ranks in {args.trace}")


if __name__ == "__main__":
    main()
