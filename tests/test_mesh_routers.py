"""Two routers of one mesh: each is whole by itself, and they share nothing but the store."""

import asyncio
import json
import os
import signal

import grpc
import meshes
import pytest
from mesh_changes import pdmesh

PROMPTS = [list(range(300 + 200 * n, 470 + 200 * n)) for n in range(4)]


@pytest.fixture(scope="module")
def mesh():
    with meshes.running_mesh("--routers", "2", "--arithmetic", "exact") as running:
        yield running


def both(mesh):
    """The addresses of the routers: the one that is first asked, and the other."""
    info = json.loads((mesh.state_dir / "mesh.json").read_text())
    first, second = info["address"], *(a for a in info["addresses"] if a != info["address"])
    return first, second


async def known_pages(stub, prompt, patience=30):
    """Asks until the answer stands on pages that were there before; the answer."""
    async with asyncio.timeout(patience):
        while True:
            answer = await meshes.ask(stub, prompt, max_tokens=4, ignore_eos=True)
            if answer.usage.cached_tokens:
                return answer
            await asyncio.sleep(0.1)


async def test_pages_computed_for_one_router_are_known_to_the_other(mesh):
    first, second = both(mesh)
    async with meshes.chat_stub(first) as one, meshes.chat_stub(second) as two:
        cold = await meshes.ask(one, PROMPTS[0], max_tokens=4, ignore_eos=True)
        assert cold.usage.cached_tokens == 0
        warm = await meshes.ask(two, PROMPTS[0], max_tokens=4, ignore_eos=True)
        assert warm.token_ids == cold.token_ids
        assert (await known_pages(two, PROMPTS[0])).token_ids == cold.token_ids
    assert await mesh.problems() == []


async def test_every_choice_is_explained_whichever_router_made_it(mesh):
    for number, address in enumerate(both(mesh)):
        async with meshes.chat_stub(address) as stub:
            name = f"asked-{number}"
            answer = await meshes.ask(
                stub, PROMPTS[3], max_tokens=4, ignore_eos=True, request_id=name
            )
        text = "\n".join(await pdmesh(mesh, "explain", name))
        assert f"request {name}, policy priced" in text
        assert "170 prompt tokens" in text
        chosen = {line.split()[1] for line in text.splitlines() if line.startswith("->")}
        assert chosen == {answer.timing.prefill_worker, answer.timing.decode_worker}
        told = json.loads("".join(await pdmesh(mesh, "explain", name, "--json")))
        assert {c["worker_id"] for c in told["choices"][0]["candidates"]} == {
            "prefill-0",
            "decode-0",
            "decode-1",
        }


async def test_a_router_that_is_killed_takes_only_its_own_streams_along(mesh):
    first, second = both(mesh)
    async with meshes.chat_stub(first) as one, meshes.chat_stub(second) as two:
        want = await meshes.ask(two, PROMPTS[1], max_tokens=150, ignore_eos=True, tenant="alone")
        ours = {"max_tokens": 150, "ignore_eos": True}
        async with (
            meshes.asking(one, PROMPTS[2], max_tokens=3000, ignore_eos=True) as (lost, begun),
            meshes.asking(two, PROMPTS[1], tenant="kept", **ours) as (kept, running),
        ):
            await meshes.first_token(lost, begun)
            await meshes.first_token(kept, running)
            os.kill(mesh.pids()[router_at(mesh, first)], signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await lost
            assert caught.value.code() in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.CANCELLED,
            )
            meanwhile = await meshes.ask(two, PROMPTS[1], tenant="new", **ours)
            await kept
        assert running.token_ids == meanwhile.token_ids == want.token_ids
        assert await mesh.problems() == []
    async with asyncio.timeout(120), meshes.chat_stub(first) as back:
        while True:
            try:
                answer = await meshes.ask(back, PROMPTS[1], tenant="back", **ours)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
    assert answer.token_ids == want.token_ids
    assert await mesh.problems() == []


def router_at(mesh, address):
    """The name of the router that serves at an address: they have the ports in order."""
    info = json.loads((mesh.state_dir / "mesh.json").read_text())
    ports = sorted(int(a.rpartition(":")[2]) for a in info["addresses"])
    index = ports.index(int(address.rpartition(":")[2]))
    return f"router-{index}" if index else "router"
