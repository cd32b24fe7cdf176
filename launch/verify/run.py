"""``pdmesh verify``: runs the checks against a mesh, with a progress line, and reports."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pdmesh.launch.verify.cases import Case, Room, cases
from pdmesh.launch.verify.checks import (
    FAULTS,
    check_fault,
    check_handoff,
    check_move,
    check_rest,
)
from pdmesh.launch.verify.mesh import MeshUnderTest, Place, mesh_under_test
from pdmesh.launch.verify.report import Report, Result
from pdmesh.wire.errors import ConfigError


@dataclass(frozen=True)
class VerifyOptions:
    """How much to check.

    Attributes:
        count: cases that are moved about; a quarter of them is also asked for twice.
        faults: kill and pause the workers of the mesh, which must be this machine's.
        seed: of the cases.
        at_once: cases under way at a time: each is in a batch with the others.
        command: that repeats the run.
    """

    count: int = 40
    faults: bool = False
    seed: int = 0
    at_once: int = 3
    command: str = "pdmesh verify"


Progress = Callable[[int, int, Result], None]
"""Told of each result: how many there are, of how many."""


async def verify(place: Place, options: VerifyOptions, progress: Progress) -> Report:
    """Runs all checks.

    Raises:
        ConfigError: the mesh cannot be verified as it is.
        Unavailable: it does not answer.
    """
    async with mesh_under_test(place) as mesh:
        if len(mesh.decode) < 2:
            raise ConfigError(
                "an answer moves between decode workers and this mesh has one; "
                "add another (pdmesh scale decode=2)"
            )
        if options.faults and not place.pids():
            raise ConfigError(
                "the processes of this mesh are not this machine's, so none can be killed here; "
                "leave out --faults"
            )
        found = list(islice(cases(await _room(mesh), options.seed), options.count))
        report = Report(
            mesh=place.name,
            workers=tuple(record.worker_id for record in mesh.records),
            arithmetic=mesh.records[0].page_format.arithmetic,
            seed=options.seed,
            command=options.command,
        )
        twice = found[:: 4 if len(found) > 4 else 1]
        faulty = list(zip(FAULTS, found * len(FAULTS), strict=False)) if options.faults else []
        total = len(found) + len(twice) + len(faulty) + 1

        def note(result: Result) -> None:
            report.results.append(result)
            progress(len(report.results), total, result)

        await _several(check_handoff, mesh, twice, note, options.at_once)
        await _several(check_move, mesh, found, note, options.at_once)
        note(await check_rest(mesh))
        for fault, case in faulty:
            note(await check_fault(mesh, case, fault))
        return report


async def _room(mesh: MeshUnderTest) -> Room:
    card = await mesh.model()
    return Room(mesh.records[0].page_format.page_size, card.vocab_size, card.max_context)


async def _several(
    check: Callable[[MeshUnderTest, Case], Awaitable[Result]],
    mesh: MeshUnderTest,
    found: Sequence[Case],
    note: Callable[[Result], None],
    at_once: int,
) -> None:
    """Checks cases, ``at_once`` at a time, and notes the results as they come."""
    waiting: Iterator[Case] = iter(found)

    async def work() -> None:
        for case in waiting:
            note(await check(mesh, case))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


def show_progress(done: int, total: int, result: Result) -> None:
    """A bar on a terminal, else a line for every tenth result and for each that is not passed."""
    if result.verdict == "failed":
        end = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{end}failed: {result.group}, {result.name}: {result.detail}", file=sys.stderr)
    if sys.stderr.isatty():
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        end = "\n" if done == total else ""
        print(f"\r[{bar}] {done}/{total} {result.group:<10}", end=end, file=sys.stderr, flush=True)
    elif done % 10 == 0 or done == total:
        print(f"{done} of {total} checks", file=sys.stderr, flush=True)


def write_reports(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    """Writes the report where it was asked for.

    Raises:
        ConfigError: a file cannot be written.
    """
    for path, text in ((json_file, report.as_json), (html_file, report.as_html)):
        if path is None:
            continue
        try:
            path.write_text(text())
        except OSError as error:
            raise ConfigError(f"cannot write the report {path}: {error.strerror}") from error
