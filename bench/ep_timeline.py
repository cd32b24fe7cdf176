"""What overlapping the all-to-all is worth: a predicted timeline, and a recorded one.

    .venv/bin/python -P bench/ep_timeline.py        (--help for the options)

Predicted: one rank's layers under the three schedules of ``model/parallel/schedule.py``, with a
unit that computes and a wire beside it. The times are those of Perplexity's article on multi-node
DeepSeek deployment (18 April 2025) for EP128 on H100s, batch 128, two tokens a request: 2,667 us a
layer without overlap, of which dispatch takes 593 and combine 1,012; shared experts 16; half a
batch takes 0.61 of a whole one's compute (1,292 / 1,062 / 2) and half of its bytes. How the other
1,046 us of compute divide into stages 1, 2 and 4 is an assumption (110, 706, 230), not the
article's. ``--sweep`` shows what other divisions give.

Recorded: ``--record EP`` runs that many ranks over a small random model in this process, one after
the other, and writes what each stage took. Nothing overlaps there; it shows order, not speed.

Traces open in Perfetto or chrome://tracing; ``tools/draw_trace.py`` draws them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above

from pdmesh.model.parallel.schedule import Mode, plan_schedule  # noqa: E402 - the path is set above
from pdmesh.model.parallel.timeline import (  # noqa: E402
    StageCosts,
    Timeline,
    chrome_trace,
    predict,
)

COSTS = StageCosts(project=110, attend=706, shared=16, experts=230, dispatch=593, combine=1012)
HALF_COMPUTE, HALF_WIRE = 0.61, 0.5
LAYERS = 58
PUBLISHED = {"no_overlap": 2667, "dispatch_overlap": 2651, "microbatch": 1896}


def predicted(trace: Path | None) -> None:
    events = []
    print("| schedule | us a layer, predicted | us a layer, published |")
    print("|---|---|---|")
    half = COSTS.halved(HALF_COMPUTE, HALF_WIRE)
    for number, mode in enumerate(get_args(Mode)):
        schedule = plan_schedule([(layer, True) for layer in range(LAYERS)], mode)
        found = predict(schedule, COSTS, half, rank=number)
        events += found
        print(f"| {mode} | {max(e.end_us for e in found) / LAYERS:.0f} | {PUBLISHED[mode]} |")
    if trace is not None:
        trace.write_text(chrome_trace(events, dict(enumerate(get_args(Mode)))))


def sweep() -> None:
    """Stage 1 from 50 to 350 us and the experts from 150 to 450; stage 2 takes the rest."""
    compute = COSTS.project + COSTS.attend + COSTS.experts
    schedule = plan_schedule([(layer, True) for layer in range(LAYERS)], "microbatch")
    print("| stage 1 | experts | us a layer with microbatches, predicted |")
    print("|---|---|---|")
    for project in (50, 110, 200, 350):
        for experts in (150, 230, 350, 450):
            costs = replace(
                COSTS, project=project, experts=experts, attend=compute - project - experts
            )
            events = predict(schedule, costs, costs.halved(HALF_COMPUTE, HALF_WIRE))
            print(f"| {project} | {experts} | {max(e.end_us for e in events) / LAYERS:.0f} |")


def recorded(ep: int, mode: Mode, tokens: int, trace: Path) -> None:
    import torch

    from pdmesh.launch.topology import shipped_model
    from pdmesh.model.batch import Batch, SequenceSlice
    from pdmesh.model.parallel.groups import Groups
    from pdmesh.model.parallel.step import RankBatch
    from pdmesh.model.parallel.virtual import Settings, VirtualRanks
    from pdmesh.model.weights import load_model

    torch.set_num_threads(1)
    model = load_model(shipped_model())
    timeline = Timeline(time.perf_counter)
    ranks = VirtualRanks(model, Groups(ep), settings=Settings(mode=mode), timeline=timeline)
    inputs = []
    for rank in range(ep):
        batch = Batch.build([SequenceSlice((0, 1), 0, tokens, 0)], [range(rank, rank + tokens)])
        inputs.append(RankBatch(batch, (model.new_latents(2),)))
    ranks.forward(inputs)
    trace.write_text(chrome_trace(timeline.events))
    print(f"{len(timeline.events)} events of {ep} ranks in {trace}")


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and a trace to --trace FILE")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace to this file")
    parser.add_argument("--sweep", action="store_true", help="other divisions of the compute")
    parser.add_argument("--record", type=int, metavar="EP", help="record so many virtual ranks")
    parser.add_argument("--mode", choices=get_args(Mode), default="microbatch", help="of --record")
    parser.add_argument("--tokens", type=int, default=32, help="a rank, of --record (32)")
    args = parser.parse_args()
    if args.sweep:
        sweep()
    elif args.record is None:
        predicted(args.trace)
    elif args.trace is None:
        parser.error("--record needs --trace FILE")
    else:
        recorded(args.record, args.mode, args.tokens, args.trace)


if __name__ == "__main__":
    main()
