"""What is drawn of the table of bench/roofline.py."""

import csv
from pathlib import Path

from pdmesh.tools import draw_roofline as tool

ROOT = Path(__file__).resolve().parent.parent


def row(**values):
    empty = dict.fromkeys(("ep", "batch", "heads", "query"), "")
    return empty | {"operations": "2e9", "bytes": "1e6", "us": "10"} | values


def test_a_point_is_its_work_over_its_bytes_and_over_its_time():
    found = tool.curves([row(name="q_a", batch="8")], tool.FIGURES["dense"])
    assert found == {"q_a": [tool.Point(intensity=2000.0, rate=200.0, over=8, us=10.0)]}


def test_attention_is_timed_for_each_row_of_a_sequence_in_their_order():
    rows = [row(name="mla", heads="16", query=query, us="12") for query in ("3", "1")]
    (points,) = tool.curves(rows, tool.FIGURES["mla"]).values()
    assert [(point.over, point.us) for point in points] == [(1, 12.0), (3, 4.0)]


def test_the_measured_table_has_every_rank_projection_and_number_of_heads():
    with (ROOT / "docs" / "data" / "h200_roofline.csv").open() as file:
        rows = list(csv.DictReader(file))
    lengths = {}
    for family, figure in tool.FIGURES.items():
        found = tool.curves([r for r in rows if r["family"] == family], figure)
        lengths[family] = [len(points) for points in found.values()]
        names = list(found)
        looks = [(style["color"], style["linestyle"]) for style in tool.styles(names)]
        assert len(set(looks)) == len(names)
    assert lengths == {"grouped": [8] * 10, "dense": [8] * 7, "mla": [4] * 4}
