"""From one layer to a whole model's step."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("project")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def wires():
    with (ROOT / "docs" / "data" / "communication.csv").open() as file:
        return list(csv.DictReader(file))


def measured(project, each=10.0, layer=900.0, side=880.0, copies=30.0):
    names = [*project.ATTENTION, "gate", "routed_up"]
    return {
        "steps": [{"step": name, "us": each} for name in names],
        "layer": {"side": side, "best": "side", "sustained": layer},
        "copies_us": copies,
    }


def test_a_layer_counts_without_its_copies_as_it_is_sustained(project):
    rest = {"dense_up": 100.0, "dense_act": 5.0, "dense_down": 50.0, "head": 480.0}
    parts = project.parts_of(measured(project), rest)
    assert parts == project.Parts(moe=870.0, dense=10 * 10.0 + 155.0, logits=480.0)


def test_a_step_is_59_moe_layers_three_dense_ones_and_two_heads(project):
    row = project.projection("x", project.Parts(1000.0, 500.0, 400.0), 1500.0)
    assert row.step_ms == pytest.approx((59 * 1500 + 3 * 500 + 2 * 400) / 1e3)
    assert row.gpu == pytest.approx(128 * 1.6 / row.step_ms * 1e3)
    assert row.request == pytest.approx(row.gpu / 128)


def test_transfers_are_added_or_hidden(project):
    parts, wire = project.Parts(1000.0, 500.0, 400.0), project.Wire(600.0, 1000.0)
    serial, split, hidden = project.projections("x", parts, wire, split=1900.0)
    assert [row.layer_us for row in (serial, split, hidden)] == [2600.0, 1900.0, 1600.0]


def test_the_bound_of_a_rank_of_128_gives_3961_tokens_a_second(project):
    ideal = project.Wire(*project.bounds.transfer(256, 50e9, 120 / 128))
    best = project.projections("x", project.bound_parts(128), ideal)[-1]
    assert best.gpu == pytest.approx(3961, rel=0.002)


def test_the_breakdown_of_256_tokens_is_in_the_table(project, wires):
    assert project.read_wire(wires, "Perplexity EP128 H100", 256).both == 1605
    with pytest.raises(LookupError, match="no row of x with 3 tokens"):
        project.read_wire(wires, "x", 3)


def test_a_batch_of_128_fits_a_rank_of_eight_with_latents_in_fp8_alone(project):
    assert project.memory_gb(1152) == pytest.approx(145.8, abs=0.3)
    assert project.memory_gb(656) < 141


def test_rows_come_with_their_bound_and_what_was_published(project, wires):
    rest = dict.fromkeys(project.DENSE, 50.0) | {"head": 480.0}
    layer = {"rest": rest, "ep128": measured(project), "ep8": measured(project)}
    overlap = {"us": {"128": {"microbatch": 1850.0}}}
    rows = project.all_rows(layer, overlap, wires)
    assert sum("bound" in row.name for row in rows) == 4
    assert any(row.layer_us == 1850.0 for row in rows)
    assert "2,200" in project.table(rows)


def test_a_layer_over_packed_latents_has_rows_and_bounds_of_its_own(project, wires):
    rest = dict.fromkeys(project.DENSE, 50.0) | {"head": 480.0}
    layer = {"rest": rest, "ep8": measured(project), "ep8_fp8": measured(project, layer=800.0)}
    plain, packed = (
        {r.name: r for r in project.all_rows(layer, None, wires) if ("FP8" in r.name) == packed}
        for packed in (False, True)
    )
    serial = "one after another"
    saved = plain[f"EP8, {serial}"].layer_us - packed[f"EP8, FP8 latents, {serial}"].layer_us
    assert saved == pytest.approx(100)
    bound = packed[f"EP8, FP8 latents, bound, {serial}"]
    assert bound.layer_us == pytest.approx(plain[f"EP8 bound, {serial}"].layer_us - 180.1, abs=0.1)
