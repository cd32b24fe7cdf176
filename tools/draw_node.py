"""Draws the CSV of bench/node_ep8.py: throughput of a node over output speed; needs matplotlib.

    python tools/draw_node.py node_ep8.csv node_ep8.png

Points are measured cells by mode, a line is their Pareto front, lines without points are the bound
(dispatch and combine after the rest, and all overlapped), other marks what was published, and what
one GPU emulated.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

Row = dict[str, str]
MARKS = {"no_overlap": "o", "dispatch_overlap": "s", "microbatch": "^"}


def points(rows: list[Row]) -> list[tuple[float, float]]:
    return [(float(row["tokens_s_request"]), float(row["tokens_s_node"])) for row in rows]


def front(rows: list[Row]) -> list[tuple[float, float]]:
    """The points that no other beats in both, fastest request first."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points(rows), reverse=True):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return kept


def draw(rows: list[Row], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        sys.exit("no plot: this needs matplotlib (pip install matplotlib); the CSV has all points")
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    measured = [row for row in rows if row["kind"] == "measured" and row["finite"] == "True"]
    for mode, mark in MARKS.items():
        of_mode = [row for row in measured if row["mode"] == mode]
        if of_mode:
            axes.plot(*zip(*points(of_mode), strict=True), mark, label=mode, alpha=0.7)
    if measured:
        extrapolated = any(row["extrapolated"] == "True" for row in measured)
        label = "Pareto front" + (", some steps extrapolated" if extrapolated else "")
        axes.plot(*zip(*front(measured), strict=True), "-", color="black", label=label)
    for kind, dash in (("bound", "--"), ("bound_overlapped", ":")):
        limits = front([row for row in rows if row["kind"] == kind])
        if limits:
            name = kind.replace("_", ", ")
            axes.plot(*zip(*limits, strict=True), dash, color="grey", label=name)
    for kind, mark in (("published", "*"), ("emulated", "D")):
        for row in (row for row in rows if row["kind"] == kind):
            axes.plot(*points([row])[0], mark, markersize=9, label=row["name"])
    axes.set_yscale("log")
    axes.set(xlabel="output speed of a request, tokens/s", ylabel="throughput of a node, tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    with args.csv.open() as file:
        draw(list(csv.DictReader(file)), args.png)


if __name__ == "__main__":
    main()
