"""``pytest --pdmesh-verify MESH``: the checks of ``pdmesh verify`` as tests of another project."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pdmesh.wire.errors import PdmeshError

if TYPE_CHECKING:
    from pdmesh.launch.verify.report import Report, Result

_GROUPS = ("hand-off", "migration", "rest", "faults")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the plugin."""
    group = parser.getgroup("pdmesh")
    group.addoption(
        "--pdmesh-verify",
        metavar="MESH",
        help="also verify this running mesh: its name, or default for the only one",
    )
    group.addoption("--pdmesh-cases", type=int, default=40, metavar="N", help="default: 40")
    group.addoption(
        "--pdmesh-faults", action="store_true", help="kill and pause workers of the mesh too"
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds one test for each group of checks."""
    mesh = config.getoption("--pdmesh-verify")
    if mesh is None:
        return
    wanted = _GROUPS if config.getoption("--pdmesh-faults") else _GROUPS[:-1]
    collector = VerifyCollector.from_parent(session, name="pdmesh-verify")
    collector.mesh = mesh
    items.extend(item for item in collector.collect() if item.name in wanted)


class VerifyCollector(pytest.Collector):
    """The checks of one mesh, run once, by the first of its tests."""

    mesh = ""
    _report: Report | None = None

    def collect(self) -> Iterator[VerifyItem]:
        """One test a group."""
        for group in _GROUPS:
            yield VerifyItem.from_parent(self, name=group)

    def results(self) -> list[Result]:
        """What all checks found."""
        if self._report is None:
            from pdmesh.launch.verify.command import place_of
            from pdmesh.launch.verify.run import VerifyOptions, verify

            option = self.config.getoption
            where = argparse.Namespace(mesh=self.mesh, admin="", redis="", name="", secret_file="")
            options = VerifyOptions(option("--pdmesh-cases"), option("--pdmesh-faults"))
            place = place_of(where)
            self._report = asyncio.run(verify(place, options, lambda *_: None))
        return self._report.results


class VerifyItem(pytest.Item):
    """The checks of one group."""

    def runtest(self) -> None:
        """Fails if one of them does, and skips if none could be tried."""
        assert isinstance(self.parent, VerifyCollector)
        mine = [result for result in self.parent.results() if result.group == self.name]
        wrong = [f"{result.name}: {result.detail}" for result in mine if result.verdict == "failed"]
        if wrong:
            raise VerifyFailed("\n".join(wrong))
        if not any(result.verdict == "passed" for result in mine):
            pytest.skip("; ".join(result.detail for result in mine) or "nothing was tried")

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        """The sentences alone."""
        if isinstance(excinfo.value, VerifyFailed | PdmeshError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[str, None, str]:
        return "pdmesh-verify", None, f"pdmesh verify: {self.name}"


class VerifyFailed(AssertionError):
    """Something is wrong with the mesh."""
