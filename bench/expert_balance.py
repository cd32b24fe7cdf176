"""Balance of expert placements on real loads, and the online balancer over a change of workload.

    .venv/bin/python -P bench/expert_balance.py --data DIR        (--help for the options)

DIR holds ``expert_load_58x256.npz``: for each workload the rows that each of 256 experts of the 58
MoE layers of DeepSeek-V3 got, [layers, experts] (expert statistics published by the SGLang team,
sgl-project/sglang issue 6017), and may hold ``summary.json`` with the reference's own results.

Printed for each workload and number of ranks, all with 288 copies: the busiest rank's load over the
mean of the ranks, mean over the layers, under the plan made for the same load (`own`), what the
reference came to (`EPLB`), under the plan made for the workload before (`stale`), and the shares of
copies that a rank has to load to go from that plan to its own, numbered as the planner gives them
and numbered to stay.

Then three workloads follow one another, each for some intervals. In an interval every layer's rows
are drawn from the workload's shares. Printed, and drawn with --plot (needs matplotlib): the same
figure of every interval under the plan of the first workload, under the balancer's plan, which
knows the intervals before only, and under a plan made for the interval's own load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above

from pdmesh.model.parallel.balancer import (  # noqa: E402 - the path is set above
    Balancer,
    BalanceRule,
    imbalance,
    place,
)
from pdmesh.model.parallel.placement import Placement  # noqa: E402

Loads = NDArray[np.float64]

COPIES = 288
RANKS_PER_HOST = 8
EXPERTS_PER_TOKEN = 8
SIZES = (32, 72, 144)
SEQUENCE = ("decode_in2000out100", "decode_in500out1500", "prefill_in4096")
BOUND = 1.01


def rule_for(ranks: int) -> BalanceRule:
    return BalanceRule(COPIES, num_groups=8, num_hosts=ranks // RANKS_PER_HOST)


def loaded(new: Placement, old: Placement) -> float:
    return len(new.moves_from(old)) / (len(new.layers) * COPIES)


def table(
    loads: dict[str, Loads], reference: dict[str, dict[str, float]], sizes: Sequence[int]
) -> list[str]:
    """Prints the first table; the rows that are worse than the reference's by more than 1 %."""
    worse = []
    print("| workload | EP | own | EPLB | stale | loaded, as planned | loaded, numbered to stay |")
    print("|---|---|---|---|---|---|---|")
    for ranks in sizes:
        rule, before = rule_for(ranks), None
        for name, load in loads.items():
            plan = place(load, ranks, rule)
            own = float(imbalance(plan, load).mean())
            known = reference.get(name, {}).get(f"EP{ranks}")
            cells = [f"{own:.3f}", "-" if known is None else f"{known:.3f}"]
            if before is None:
                cells += ["-", "-", "-"]
            else:
                kept = place(load, ranks, rule, before)
                cells.append(f"{imbalance(before, load).mean():.3f}")
                cells += [f"{loaded(p, before):.0%}" for p in (plan, kept)]
                assert np.allclose(imbalance(kept, load), imbalance(plan, load))
            print(f"| {name} | {ranks} | {' | '.join(cells)} |")
            if known is not None and own > BOUND * known:
                worse.append(f"{name} EP{ranks}: {own:.3f}, the reference {known:.3f}")
            before = plan
    return worse


def trajectory(
    loads: Sequence[Loads], ranks: int, intervals: int, tokens: int, seed: int
) -> dict[str, list[float]]:
    """The three lines of the plot, and the share of copies loaded before each interval."""
    rng = np.random.default_rng(seed)
    rule = rule_for(ranks)
    first = place(loads[0], ranks, rule)
    balancer = Balancer(first, rule)
    lines: dict[str, list[float]] = {"first plan": [], "balancer": [], "own plan": [], "loaded": []}
    for workload in loads:
        shares = workload / workload.sum(axis=1, keepdims=True)
        for _ in range(intervals):
            load = np.stack([rng.multinomial(tokens * EXPERTS_PER_TOKEN, row) for row in shares])
            lines["first plan"].append(float(imbalance(first, load).mean()))
            lines["balancer"].append(float(imbalance(balancer.placement, load).mean()))
            lines["own plan"].append(float(imbalance(place(load, ranks, rule), load).mean()))
            balancer.observe(load)
            plan = balancer.proposal()
            lines["loaded"].append(0.0 if plan is None else loaded(plan, balancer.placement))
            if plan is not None:
                balancer.use(plan)
    return lines


def draw(lines: dict[str, list[float]], names: Sequence[str], ranks: int, path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    count = len(lines["balancer"])
    each = count // len(names)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    styles = {
        "first plan": ("tab:red", "--"),
        "balancer": ("tab:blue", "-"),
        "own plan": ("0.5", ":"),
    }
    labels = {
        "first plan": "plan of the first workload, kept",
        "balancer": "online balancer",
        "own plan": "plan made for the interval's own load",
    }
    for name, (colour, dash) in styles.items():
        top.step(
            range(count), lines[name], dash, color=colour, label=labels[name], lw=2, where="mid"
        )
    for number, name in enumerate(names):
        if number:
            for axes in (top, bottom):
                axes.axvline(number * each - 0.5, color="0.8", zorder=0)
        middle = (number + 0.5) * each - 0.5
        top.text(middle, 0.97, name, ha="center", va="top", transform=top.get_xaxis_transform())
    top.set_ylim(1.0, 1.0 + 1.15 * (max(map(max, (lines[n] for n in styles))) - 1.0))
    top.set_ylabel("busiest rank / mean,\nmean of 58 layers")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    bottom.bar(range(count), [100 * share for share in lines["loaded"]], color="tab:blue")
    bottom.set_ylabel("copies loaded\nafterwards, %")
    bottom.set_xlabel(f"interval (EP{ranks}, {COPIES} copies of 256 experts)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and a drawing to --plot FILE")
    parser.add_argument("--data", type=Path, required=True, help="folder with the loads")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="EP of the table")
    parser.add_argument("--ranks", type=int, default=144, help="of the second part (144)")
    parser.add_argument("--intervals", type=int, default=8, help="a workload (8)")
    parser.add_argument("--tokens", type=int, default=50_000, help="an interval (50000)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--plot", type=Path, help="draw the second part into this PNG")
    parser.add_argument("--check", action="store_true", help=f"fail above {BOUND} of EPLB's figure")
    args = parser.parse_args()
    with np.load(args.data / "expert_load_58x256.npz") as file:
        loads = {name: file[name].astype(np.float64) for name in file.files}
    reference: dict[str, dict[str, float]] = {}
    if (summary := args.data / "summary.json").is_file():
        for name, entry in json.loads(summary.read_text())["per_file"].items():
            found = [key for key in entry if key.startswith("eplb_") and key.endswith(f"_{COPIES}")]
            reference[name] = {key.split("_")[1]: entry[key]["mean"] for key in found}
    worse = table(loads, reference, args.sizes)
    lines = trajectory(
        [loads[name] for name in SEQUENCE], args.ranks, args.intervals, args.tokens, args.seed
    )
    print(f"\nEP{args.ranks}: {', then '.join(SEQUENCE)}, {args.intervals} intervals each\n")
    print("| interval | first plan | balancer | own plan | copies loaded afterwards |")
    print("|---|---|---|---|---|")
    for row, values in enumerate(zip(*lines.values(), strict=True)):
        print(f"| {row} | " + " | ".join(f"{v:.3f}" for v in values[:3]) + f" | {values[3]:.1%} |")
    if args.plot is not None:
        draw(lines, SEQUENCE, args.ranks, args.plot)
    if args.check and worse:
        sys.exit("worse than the reference by more than 1 %: " + "; ".join(worse))


if __name__ == "__main__":
    main()
