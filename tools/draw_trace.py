"""Draws a Chrome trace of expert parallelism as a PNG; needs matplotlib.

    python tools/draw_trace.py TRACE.json OUT.png [--begin MS] [--end MS]

A row for each rank and track. Colours are stages; the second microbatch is hatched.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "dense": "#999999",
    "project": "#4e79a7",
    "attend": "#76b7b2",
    "send": "#f28e2b",
    "shared": "#edc948",
    "shared_first": "#f28e2b",
    "experts": "#e15759",
    "receive": "#b07aa1",
    "dispatch": "#9c755f",
    "combine": "#bab0ac",
    "wait": "#ffffff",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--begin", type=float, default=0.0, help="milliseconds (0)")
    parser.add_argument("--end", type=float, help="milliseconds (the last event)")
    args = parser.parse_args()
    entries: list[dict[str, Any]] = json.loads(args.trace.read_text())["traceEvents"]
    draw(entries, args.out, args.begin * 1e3, None if args.end is None else args.end * 1e3)


def draw(entries: list[dict[str, Any]], out: Path, begin: float, end: float | None) -> None:
    try:
        from matplotlib import pyplot as plt
        from matplotlib.patches import Patch
    except ImportError:
        sys.exit("this needs matplotlib: pip install matplotlib")
    names = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    events = [e for e in entries if e["ph"] == "X"]
    last = max(e["ts"] + e["dur"] for e in events) if end is None else end
    rows = sorted({(e["pid"], e["tid"]) for e in events})
    tracks = {(e["pid"], e["tid"]): e["cat"] for e in events}
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.45 * len(rows)), layout="constrained")
    for event in events:
        if event["ts"] + event["dur"] < begin or event["ts"] > last:
            continue
        axes.barh(
            rows.index((event["pid"], event["tid"])),
            event["dur"] / 1e3,
            left=event["ts"] / 1e3,
            height=0.8,
            color=COLOURS[event["name"]],
            edgecolor="0.25",
            linewidth=0.5,
            hatch="///" if event["args"]["microbatch"] == 1 else None,
        )
    axes.set_yticks(range(len(rows)), [f"{names[pid]}: {tracks[pid, tid]}" for pid, tid in rows])
    axes.invert_yaxis()
    axes.set_xlim(begin / 1e3, last / 1e3)
    axes.set_xlabel("ms")
    seen = [name for name in COLOURS if any(e["name"] == name for e in events)]
    patches = [
        Patch(facecolor=COLOURS[n], edgecolor="0.25", label=n.replace("_", " ")) for n in seen
    ]
    if any(e["args"]["microbatch"] == 1 for e in events):
        patches.append(
            Patch(facecolor="white", edgecolor="0.25", hatch="///", label="microbatch 1")
        )
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
