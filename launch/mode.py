"""What all processes of a mesh must agree on besides the checkpoint: its flags, what they set."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pdmesh.launch.random_weights import add_random, random_weights

if TYPE_CHECKING:
    from pdmesh.launch.topology import Topology


def add_mode(parser: argparse.ArgumentParser) -> None:
    """What all processes of a mesh must agree on besides the checkpoint."""
    add_random(parser)
    parser.add_argument(
        "--arithmetic",
        metavar="MODE",
        help="fast: prompts in MHA form (default); exact: prompts and answers in one form, slower, "
        "and a retry or a cached answer never changes a token",
    )
    parser.add_argument(
        "--device",
        help="where workers compute: cpu (default), cuda or cuda:N; up: cuda:N,cuda:M in turn",
    )
    parser.add_argument(
        "--precision", metavar="P", help="of products: plain, fp8 or auto: fp8 on CUDA (default)"
    )
    parser.add_argument("--latents", metavar="P", help="in the pages: plain (default) or fp8")
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="S",
        help="a worker whose step takes longer leaves (default: 60 on CUDA, 600 on a CPU)",
    )
    parser.add_argument(
        "--page-size", type=int, metavar="N", help="tokens a page: 16, 32 ... 512 (default: 64)"
    )


def with_mode(topology: Topology, arguments: argparse.Namespace) -> Topology:
    """The topology, overridden by what a command line says of them."""
    a = arguments
    topology = random_weights(topology, a)
    topology = topology.changed("model", "--arithmetic", arithmetic=a.arithmetic)
    topology = topology.changed("model", "--page-size", page_size=a.page_size)
    topology = topology.changed("model", "--device", device=a.device)
    topology = topology.changed("model", "--precision", precision=a.precision)
    topology = topology.changed("model", "--latents", latents=a.latents)
    return topology.changed("mesh", "--step-timeout", step_timeout_s=a.step_timeout)
