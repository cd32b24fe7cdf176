"""The arguments of ``pdmesh registry``, with help and examples."""

from __future__ import annotations

import argparse

TEXT = """\
What the store says about who owns which pages. It is a cache of hints: a mesh gives the same
answers whatever is in it, only slower.

  inspect    workers, slots, epochs, and how many pages each has in the store
  check      compares with the workers' own lists, partition by partition
  gc         removes the records of workers and epochs that are gone

examples:
  pdmesh registry inspect
  pdmesh registry check --json
  pdmesh registry gc --redis 'rediss://user:word@10.0.0.5?cluster=true' --mesh default

exit codes: 0 all is well, 1 the store and the workers differ, 2 wrong usage or no answer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``pdmesh registry``."""
    parser.add_argument("action", choices=("inspect", "check", "gc"), help="see below")
    parser.add_argument("--mesh", metavar="NAME", help="which mesh")
    parser.add_argument("--redis", metavar="URL", help="ask this store (a mesh elsewhere)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
