"""Weights that no file holds, and what all processes of a mesh must know to make the same ones."""

from __future__ import annotations

import msgspec


class RandomWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which ones, for a given ``config.json``."""

    seed: int = 0
    """Other weights for another seed."""
    layers: int = 0
    """Layers of the main model; 0: as many as the config has."""
    experts: int = 0
    """Routed experts of a layer; 0: as many as the config has."""
