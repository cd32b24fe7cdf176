"""A whole mesh as processes: answers that are moved about are the answers that are left alone."""

import json
from pathlib import Path

import pytest
from meshes import running_mesh

from pdmesh.launch.verify.mesh import Place
from pdmesh.launch.verify.run import VerifyOptions, verify
from pdmesh.wire.secret import read_secret


def place(mesh) -> Place:
    """A running test mesh as ``pdmesh verify`` sees it."""

    def now():
        return json.loads((mesh.state_dir / "mesh.json").read_text())

    info = now()
    return Place(
        info["name"],
        info["address"],
        info["router_admin"],
        info["redis_url"],
        read_secret(Path(info["join"]["secret_file"])),
        lambda: now()["pids"],
    )


async def verified(mesh, count, *, faults=False):
    options = VerifyOptions(count=count, faults=faults, at_once=8 if count > 100 else 3)
    report = await verify(place(mesh), options, lambda *_: None)
    assert report.ok, report.as_text() + mesh.log()
    return report


TOPOLOGY = """
[mesh]
lease_ttl_s = 4.0
[decode]
workers = 3
"""


@pytest.fixture(scope="module")
def mesh(request):
    flags = ("--arithmetic", request.param, "--draft-tokens", "2")
    with running_mesh(*flags, topology=TOPOLOGY) as mesh:
        mesh.workers, mesh.arithmetic = 4, request.param
        yield mesh


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        ("fast", 4),
        ("exact", 8),  # every feature of ``pdmesh verify``
        pytest.param("fast", 500, marks=pytest.mark.full),
        pytest.param("exact", 500, marks=pytest.mark.full),
    ],
    indirect=["mesh"],
)
async def test_tokens_logprobs_text_and_pages_do_not_depend_on_where_an_answer_is_generated(
    mesh, count
):
    report = await verified(mesh, count)
    tried = [r for r in report.results if r.group == "migration" and r.verdict == "passed"]
    assert len(tried) >= count * 3 // 4, report.as_text()
    assert report.moves > count
    assert sum(r.pages for r in tried) > 0
    assert await mesh.problems() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mesh", [pytest.param("fast", marks=pytest.mark.full), "exact"], indirect=True
)
async def test_after_every_fault_an_answer_is_right_and_everything_is_given_back(mesh):
    report = await verified(mesh, 4, faults=True)
    faults = [r for r in report.results if r.group == "faults"]
    assert {r.verdict for r in faults} == {"passed"}, report.as_text()
    assert len(faults) >= 6
    assert await mesh.problems() == []
