"""Mistakes planted into the mesh are found within a few seeds."""

import pytest
import simulation_mistakes

from pdmesh.simulation.run import simulate

MOST = 80
"""Seeds within which each mistake has to be found; most show in the first ten."""


@pytest.mark.parametrize("plant", simulation_mistakes.MISTAKES, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert any(simulate(seed).problems for seed in range(MOST))
