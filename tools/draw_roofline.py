"""Draws the CSV of bench/roofline.py; needs matplotlib.

    python tools/draw_roofline.py ROOFLINE.csv FOLDER

Writes `roofline_grouped.png`, `roofline_dense.png` and `roofline_mla.png`, each with two panels:
performance over arithmetic intensity, and microseconds over the batch (attention: microseconds for
each row of a sequence over its rows). The roofs are an H200's dense rates and bandwidth from its
datasheet; the dashed line is the bandwidth of a device copy.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY, COPY, FP8, BF16 = 4.8e12, 4.17e12, 1979e12, 989.5e12
"""Datasheet: bytes a second and operations a second; `COPY` was measured (docs/h200.md)."""
MARKERS = "osv^D<>p"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Figure:
    """A family of rows: what names a curve, its roof, and what its right panel is over."""

    label: Callable[[Row], str]
    roof: float
    over: str
    time: str


FIGURES = {
    "grouped": Figure(
        lambda row: f"EP{row['ep']}, {row['name'].replace('_', ' ')}",
        FP8,
        "batch",
        "microseconds",
    ),
    "dense": Figure(lambda row: row["name"], FP8, "batch", "microseconds"),
    "mla": Figure(
        lambda row: f"{row['heads']} heads",
        BF16,
        "query",
        "microseconds for a row of each sequence",
    ),
}


@dataclass(frozen=True)
class Point:
    intensity: float
    """Operations a byte."""
    rate: float
    """TFLOP/s."""
    over: int
    us: float


def curves(rows: Sequence[Row], figure: Figure) -> dict[str, list[Point]]:
    """The points of each curve, by what the right panel is over."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        operations, size, took = (float(row[key]) for key in ("operations", "bytes", "us"))
        over = int(row[figure.over])
        each = took / over if figure.over == "query" else took
        point = Point(operations / size, operations / took / 1e6, over, each)
        found.setdefault(figure.label(row), []).append(point)
    return {name: sorted(points, key=lambda p: p.over) for name, points in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with args.csv.open() as file:
        rows = [row for row in csv.DictReader(file) if not math.isnan(float(row["us"]))]
    for family, figure in FIGURES.items():
        found = curves([row for row in rows if row["family"] == family], figure)
        if found:
            draw(found, figure, args.folder / f"roofline_{family}.png")


def draw(found: Mapping[str, Sequence[Point]], figure: Figure, path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        sys.exit("this needs matplotlib: pip install matplotlib")
    sheet, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    roofs(left, [point.intensity for points in found.values() for point in points], figure.roof)
    for (name, points), style in zip(found.items(), styles(list(found)), strict=True):
        left.plot([p.intensity for p in points], [p.rate for p in points], **style)
        right.plot([p.over for p in points], [p.us for p in points], label=name, **style)
    left.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    left.legend(frameon=False, fontsize=9, loc="lower right")
    over = sorted({point.over for points in found.values() for point in points})
    right.set(yscale="log", xlabel=figure.over, ylabel=figure.time)
    if figure.over == "batch":
        right.set_xscale("log", base=2)
    else:
        right.set_xlabel("rows of a sequence")
    right.yaxis.set_minor_formatter("{x:g}")
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    right.set_xticks(over, [str(value) for value in over])
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.2)
    sheet.legend(
        *right.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right center"
    )
    sheet.savefig(path, dpi=90)


def roofs(axes: Any, intensities: Sequence[float], roof: float) -> None:
    lowest, highest = min(intensities) / 1.5, max(*intensities, roof / MEMORY) * 1.5
    for bandwidth, dash, text in (
        (MEMORY, "-", f"4.80 TB/s, {roof / 1e12:,.0f} TFLOP/s"),
        (COPY, "--", f"{COPY / 1e12:.2f} TB/s, a copy"),
    ):
        xs = [lowest, roof / bandwidth, highest]
        ys = [lowest * bandwidth / 1e12, roof / 1e12, roof / 1e12]
        axes.plot(xs, ys, dash, color="0.35", lw=1.2, label=f"limit: {text}")


def styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """How each curve is drawn; both products of a rank's experts in one colour."""
    ranks = list(dict.fromkeys(name.split(",")[0] for name in names))
    return [
        {
            "color": f"C{ranks.index(name.split(',')[0])}",
            "marker": MARKERS[ranks.index(name.split(",")[0]) % len(MARKERS)],
            "linestyle": ":" if name.endswith("down") and "," in name else "-",
            "markerfacecolor": "none",
            "markersize": 6,
            "linewidth": 1.2,
        }
        for name in names
    ]


if __name__ == "__main__":
    main()
