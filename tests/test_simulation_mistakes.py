"""Mistakes planted into the mesh are found, each within few seeds."""

from itertools import islice

import pytest
from simulation_mistakes import FOUND_BY

from pdmesh.simulation.run import simulate

MOST = 80
"""Seeds within which each mistake has to be found; most show in the first ten."""
EACH = pytest.mark.parametrize("plant", FOUND_BY, ids=lambda plant: plant.__name__)


@EACH
def test_a_planted_mistake_is_found(plant, monkeypatch):
    plant(monkeypatch)
    seeds = dict.fromkeys((*FOUND_BY[plant], *range(MOST)))
    assert any(simulate(seed).problems for seed in seeds)


@pytest.mark.full
@EACH
def test_more_than_one_seed_finds_it(plant, monkeypatch):
    plant(monkeypatch)
    finding = (seed for seed in range(4 * MOST) if simulate(seed).problems)
    assert len(list(islice(finding, 3))) == 3


def test_the_seeds_that_show_mistakes_hold_without_them():
    for seed in sorted({seeds[0] for seeds in FOUND_BY.values()}):
        assert not simulate(seed).problems
