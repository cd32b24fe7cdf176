"""Whole meshes over one transport each: prompts and moved answers go over it and are right."""

from __future__ import annotations

import asyncio
import random
import re

import meshes
import pytest

from pdmesh.kvtransfer.choice import missing_nixl
from pdmesh.wire.admin import MoveOrder, MoveReport
from pdmesh.wire.rpc import Client

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(missing_nixl() is not None, reason=str(missing_nixl()))
)


def transports_used(mesh) -> set[str]:
    """By all links over which pages went."""
    logs = "".join(path.read_text() for path in mesh.state_dir.rglob("*.log"))
    return set(re.findall(r"event=pages_connected .*?transport=\"?(\w+)", logs))


async def moved_once(mesh, request_id: str) -> str:
    client = Client(mesh.info["router_admin"], "router")
    try:
        order = MoveOrder(request_id=request_id)
        async for report in client.stream("MigrateAnswer", order, MoveReport, timeout=60):
            if report.state != "moving":
                return f"{report.state} {report.reason}".strip()
    finally:
        await client.close()
    return "nothing"


@pytest.mark.parametrize("transport", [NIXL, "tcp", pytest.param("shm", marks=pytest.mark.full)])
async def test_a_mesh_over_one_transport_moves_prompts_and_answers_over_it(transport):
    prompt = [random.Random(i).randrange(20, 4000) for i in range(150)]
    with meshes.running_mesh("--transports", transport) as mesh:
        async with meshes.chat_stub(mesh.address) as stub:
            wanted = {"max_tokens": 60, "ignore_eos": True}
            still = await meshes.ask(stub, prompt, tenant="other", **wanted)
            asking = meshes.asking(stub, prompt, request_id="moved", **wanted)
            async with asking as (task, answer):
                await meshes.first_token(task, answer)
                while len(answer.token_ids) < 3:  # it runs
                    await asyncio.sleep(0.01)
                assert await moved_once(mesh, "moved") == "moved"
                await asyncio.wait_for(task, 120)
            assert answer.token_ids == still.token_ids
        assert transports_used(mesh) == {transport}
        assert await mesh.problems() == []
