"""A decode worker whose step hangs leaves, is started again, and its answers go on elsewhere."""

import asyncio
from pathlib import Path

import hanging
import meshes
import pytest


def restarted(before, after):
    return [name for name, pid in before.items() if after.get(name, pid) != pid]


@pytest.mark.full
async def test_an_answer_goes_on_when_its_worker_hangs(tmp_path):
    file = tmp_path / "hang"
    with meshes.running_mesh(
        topology="[mesh]\nstep_timeout_s = 2\n",
        program=(str(Path(hanging.__file__).absolute()),),
        variables={hanging.VARIABLE: str(file)},
    ) as mesh:
        before = mesh.pids()
        async with meshes.chat_stub(mesh.address) as stub:
            expected = await meshes.ask(stub, "Tell me a story.", max_tokens=24)
            file.touch()
            given = await meshes.ask(stub, "Tell me a story.", max_tokens=24)
        assert not file.exists()
        assert given.token_ids == expected.token_ids
        async with asyncio.timeout(60):
            while not (changed := restarted(before, mesh.pids())):
                await asyncio.sleep(0.1)
        assert changed in (["decode-0"], ["decode-1"])
        assert await mesh.problems() == []
        assert "a step has not ended within 2 s" in mesh.log()
