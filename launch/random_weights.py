"""Settings of weights that are made instead of read: ``--random-weights`` and what goes with it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdmesh.wire.errors import ConfigError

if TYPE_CHECKING:
    from pdmesh.launch.topology import Topology

_ONLY_RANDOM = {"layers": "--layers", "experts": "--experts", "weights_seed": "--weights-seed"}


def add_random(parser: argparse.ArgumentParser) -> None:
    """Weights that no file holds; all processes of a mesh must agree on them too."""
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="make weights instead of reading them: for the config.json in --model DIR, or for "
        "--model deepseek-v3 (default) or small",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="random weights: so many layers, MTP's besides"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="random weights: routed experts of a layer"
    )
    parser.add_argument(
        "--weights-seed", type=int, metavar="N", help="random weights: which (default: 0)"
    )


def random_weights(topology: Topology, arguments: argparse.Namespace) -> Topology:
    """The topology, overridden by what a command line says of random weights."""
    a = arguments
    asked = True if a.random_weights else None
    topology = topology.changed("model", "--random-weights", random_weights=asked)
    for key, flag in _ONLY_RANDOM.items():
        topology = topology.changed("model", flag, **{key: getattr(a, key)})
    return topology


def config_with(topology: Topology, config: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of the checkpoint's ``config.json``, with those that random weights change."""
    made = topology.random
    if made is None or not config:
        return config
    changed = {"num_hidden_layers": made.layers, "n_routed_experts": made.experts}
    return {**config, **{name: value for name, value in changed.items() if value}}


def check_random(topology: Topology) -> None:
    """Raises ConfigError for what only random weights have and these are none."""
    if topology.model.random_weights:
        return
    for key, flag in _ONLY_RANDOM.items():
        if getattr(topology.model, key):
            with topology.blamed("model", key):
                raise ConfigError(
                    f"only random weights have {key.replace('_', ' ')} that can be chosen; add "
                    f"--random-weights, or leave {flag} out"
                )
