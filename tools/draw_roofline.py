"""Draws the CSV of bench/roofline.py: performance over arithmetic intensity; needs matplotlib.

    python tools/draw_roofline.py ROOFLINE.csv FOLDER

Writes `roofline_grouped.png`, `roofline_dense.png` and `roofline_mla.png`. The roofs are an H200's
dense rates and bandwidth from its datasheet; the dashed line is the bandwidth of a device copy.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import Any

MEMORY, COPY, FP8, BF16 = 4.8e12, 4.27e12, 1979e12, 989.5e12
"""Datasheet: bytes a second and operations a second; `COPY` was measured (docs/h200.md)."""
MARKERS = "osv^D<>p"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with args.csv.open() as file:
        rows = [row for row in csv.DictReader(file) if not math.isnan(float(row["us"]))]
    groups = {
        "grouped": ("grouped", lambda r: f"EP{r['ep']}, {r['name'].replace('_', ' ')}", FP8),
        "dense": ("dense", lambda r: r["name"], FP8),
        "mla": ("mla", lambda r: f"{r['heads']} heads, 1 to 4 rows", BF16),
    }
    for name, (family, label, roof) in groups.items():
        chosen = [row for row in rows if row["family"] == family]
        if chosen:
            draw(chosen, label, roof, args.folder / f"roofline_{name}.png")


def draw(rows: list[dict[str, str]], label: Any, roof: float, path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        sys.exit("this needs matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        operations, size, took = (float(row[key]) for key in ("operations", "bytes", "us"))
        curves.setdefault(label(row), []).append((operations / size, operations / took / 1e6))
    lowest = min(x for points in curves.values() for x, _ in points) / 1.5
    highest = max(max(x for points in curves.values() for x, _ in points) * 1.5, 2 * roof / MEMORY)
    for bandwidth, dash in ((MEMORY, "-"), (COPY, "--")):
        ridge = roof / bandwidth
        xs, ys = [lowest, ridge, highest], [lowest * bandwidth / 1e12, roof / 1e12, roof / 1e12]
        if dash == "--":
            xs, ys = xs[:2], ys[:2]
        text = f"{bandwidth / 1e12:.2f} TB/s" + (
            f", {roof / 1e12:.0f} TFLOP/s" if dash == "-" else ""
        )
        axes.plot(xs, ys, dash, color="0.35", lw=1.2, label=text)
    colours = plt.get_cmap("tab10").colors
    for number, (name, points) in enumerate(curves.items()):
        points.sort()
        down = name.endswith("routed down")
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            ":" if down else "-",
            marker=MARKERS[number % len(MARKERS)],
            ms=4,
            lw=1,
            color=colours[(number // 2 if "EP" in name else number) % 10],
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
