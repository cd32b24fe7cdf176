"""``pdmesh verify`` as a command: from its arguments to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pdmesh.launch.runtime import MeshInfo, RunDir, find_mesh, run_root
from pdmesh.launch.verify.mesh import Place
from pdmesh.launch.verify.run import VerifyOptions, show_progress, verify, write_reports
from pdmesh.registry.address import redacted
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.secret import read_secret


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 0 if the mesh is verified, else 1."""
    if arguments.cases < 1:
        raise ConfigError(f"--cases is {arguments.cases}; at least one is needed")
    if arguments.at_once < 1:
        raise ConfigError(f"--at-once is {arguments.at_once}; at least one is needed")
    options = VerifyOptions(
        count=arguments.cases,
        faults=arguments.faults,
        seed=arguments.seed,
        at_once=arguments.at_once,
        command=without_password(["pdmesh", *sys.argv[1:]]),
    )
    report = asyncio.run(verify(place_of(arguments), options, show_progress))
    print(report.as_text())
    write_reports(report, arguments.json, arguments.html)
    return 0 if report.ok else 1


def without_password(words: Sequence[str]) -> str:
    """A command line for a report that others read."""
    return shlex.join(redacted(word) for word in words)


def place_of(arguments: argparse.Namespace) -> Place:
    """Where the mesh is.

    Raises:
        ConfigError: too little is said of a mesh elsewhere.
        Unavailable: no such mesh runs on this machine.
    """
    mesh = arguments.mesh or ""
    if ":" not in mesh:
        return local_place(mesh or None)
    if not arguments.admin or not arguments.redis:
        raise ConfigError(
            "of a mesh elsewhere its internal service and its store are needed too; "
            "add --admin HOST:PORT and --redis URL"
        )
    secret = read_secret(arguments.secret_file) if arguments.secret_file else b""
    name = arguments.name or "default"
    return Place(name, mesh, arguments.admin, arguments.redis, secret)


def local_place(name: str | None) -> Place:
    """A mesh that ``pdmesh up`` runs on this machine.

    Raises:
        Unavailable: there is none of that name.
    """
    info = find_mesh(name)
    secret_file = info.join.secret_file if info.join is not None else ""

    def pids() -> dict[str, int]:
        now: MeshInfo | None = RunDir(run_root() / info.name).read()
        return now.pids if now is not None else {}

    return Place(
        info.name,
        info.address,
        info.router_admin,
        info.redis_url,
        read_secret(Path(secret_file)) if secret_file else b"",
        pids,
    )
