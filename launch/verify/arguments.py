"""The arguments of ``pdmesh verify``."""

from __future__ import annotations

import argparse
from pathlib import Path

TEXT = "check on a running mesh that moved answers are right to the last bit"
EPILOG = """\
Asks the mesh for answers twice: left alone, and moved between decode workers at many places.
Tokens, log-probabilities and text have to be equal, and the pages of both workers too, by checksum.
The mesh may serve others meanwhile. With --faults, workers are killed and paused: every answer has
to be right or an explicit error, and nothing may stay behind.

examples:
  pdmesh verify                                the mesh of this machine
  pdmesh verify --cases 500 --html report.html
  pdmesh verify --faults                       kills workers; they are started again
  pdmesh verify --mesh 10.0.0.1:7080 --admin 10.0.0.1:7090 --redis redis://10.0.0.5 --name prod

In a test suite of your own: pytest --pdmesh-verify MESH
exit code: 0 verified, 1 something is wrong, 2 the mesh cannot be verified as it is
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--mesh", metavar="NAME|HOST:PORT", help="a mesh of this machine, or a router's address"
    )
    parser.add_argument("--admin", metavar="HOST:PORT", help="the router's internal service")
    parser.add_argument("--redis", metavar="URL", help="the store of a mesh elsewhere")
    parser.add_argument("--name", help="the name of a mesh elsewhere (default: default)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="key of a mesh elsewhere; without it pages are not compared",
    )
    parser.add_argument("--cases", type=int, default=40, metavar="N", help="default: 40")
    parser.add_argument(
        "--at-once", type=int, default=3, metavar="N", help="cases under way at a time (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: 0)")
    parser.add_argument(
        "--faults", action="store_true", help="kill and pause workers (a mesh of this machine)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
