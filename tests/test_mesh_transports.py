"""Whole meshes over one transport each: prompts and moved answers go over it and are right."""

from __future__ import annotations

import random
import re

import meshes
import pytest
from mesh_changes import moved_in_the_middle

from pdmesh.kvtransfer.choice import missing_nixl

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(missing_nixl() is not None, reason=str(missing_nixl()))
)


def transports_used(mesh) -> set[str]:
    """By all links over which pages went."""
    logs = "".join(path.read_text() for path in mesh.state_dir.rglob("*.log"))
    return set(re.findall(r"event=pages_connected .*?transport=\"?(\w+)", logs))


@pytest.mark.parametrize("transport", [NIXL, "tcp", pytest.param("shm", marks=pytest.mark.full)])
async def test_a_mesh_over_one_transport_moves_prompts_and_answers_over_it(transport):
    prompt = [random.Random(i).randrange(20, 4000) for i in range(150)]
    with meshes.running_mesh("--transports", transport) as mesh:
        await moved_in_the_middle(mesh, prompt, ("decode-0", "decode-1"))
        assert transports_used(mesh) == {transport}
        assert await mesh.problems() == []
