"""Balanced placement of experts against the reference's own results."""

from pathlib import Path

import numpy as np
import pytest

from pdmesh.model.parallel.eplb import balance_experts, rank_loads
from pdmesh.wire.errors import ConfigError

VECTORS = np.load(Path(__file__).parent / "data" / "eplb_vectors.npz")
NAMES = VECTORS["names"].tolist()
TIED = {
    "zipf1.0_256e_288r_8g_4n_32gpu(prefill EP32)",
    "zipf1.0_64e_72r_8g_2n_8gpu",
    "uniform_256e_256r_8g_1n_8gpu",
}
"""Equal loads come in the order of the reference's sort there: only loads can be compared."""


def case(name):
    n = NAMES.index(name)
    return [VECTORS[f"{n}/{key}"] for key in ("load", "shape", "physical_to_logical", "counts")]


@pytest.mark.parametrize("name", NAMES)
def test_plans_equal_the_reference(name):
    load, shape, logical, counts = case(name)
    plan = balance_experts(load, *shape.tolist())
    assert np.array_equal(plan.counts, counts)
    if name not in TIED:
        assert np.array_equal(plan.logical, logical)
    found, wanted = (np.sort(rank_loads(load, x, shape[3])) for x in (plan.logical, logical))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_an_expert_are_numbered_from_zero(name):
    load, shape, *_ = case(name)
    plan = balance_experts(load, *shape.tolist())
    for logical, copy, counts in zip(plan.logical, plan.copy, plan.counts, strict=True):
        for expert in range(load.shape[1]):
            assert sorted(copy[logical == expert]) == list(range(counts[expert]))


def test_the_hierarchical_policy_keeps_a_group_on_one_host():
    load, shape, *_ = case(NAMES[2])
    _, groups, hosts, _ = shape.tolist()
    plan = balance_experts(load, *shape.tolist())
    for row in plan.logical:
        on_host = row.reshape(hosts, -1) // (load.shape[1] // groups)
        homes = [set(np.nonzero((on_host == g).any(axis=1))[0]) for g in range(groups)]
        assert all(len(home) == 1 for home in homes)


def test_an_expert_that_gets_nothing_still_has_a_place():
    load = np.zeros((1, 16))
    load[0, 3] = 5
    plan = balance_experts(load, 24, 4, 2, 8)
    assert (plan.counts >= 1).all()
    assert plan.counts.sum() == 24


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((10, 1, 1, 4), "4 ranks do not divide 10 physical experts"),
        ((8, 4, 2, 8), "8 physical experts cannot hold 12 logical ones"),
        ((16, 5, 1, 8), "5 groups do not divide 12 experts"),
        ((12, 4, 4, 6), "4 hosts do not divide 6 ranks"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(shape, words):
    with pytest.raises(ConfigError, match=words):
        balance_experts(np.ones((1, 12)), *shape)
