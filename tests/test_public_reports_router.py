"""Faults of routers that users of other systems reported; docs/testing.md lists them all."""

import asyncio
import contextlib
import random
import secrets
from contextlib import asynccontextmanager

import grpc
import router_fakes as fakes
from store_rig import until

from pdmesh.registry.client import RegistryView
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import read_members
from pdmesh.router.config import RouterConfig
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.server import Router
from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.hashes import placed
from pdmesh.wire.messages import PrefillRequest

KEY = b"k" * 32
PREFIX = tuple(range(100, 100 + 4 * 64))
TTL_S = 2.0


def prompt(number: int) -> chat_pb2.ChatRequest:
    """One of many that begin with the same four pages."""
    return chat_pb2.ChatRequest(
        prompt_token_ids=[*PREFIX, number],
        sampling=chat_pb2.Sampling(max_tokens=4, temperature=0.0, ignore_eos=True),
    )


@asynccontextmanager
async def registered_mesh(tmp_path, url):
    """A router over two prefill workers and a decode worker that hold real leases."""
    (tmp_path / "secret").write_bytes(KEY)
    mesh = secrets.token_hex(4)
    workers = [fakes.FakePrefill(f"prefill-{i}", "prefill") for i in range(2)]
    workers.append(fakes.FakeDecode("decode-0", "decode"))
    leases: list[WorkerLease] = []
    for worker in workers:
        leases.append(WorkerLease(url, mesh, await worker.start(), ttl_s=TTL_S))
        await leases[-1].start()
        await leases[-1].ready()
    view = RegistryView(url, mesh)
    await view.start()
    config = RouterConfig(
        model_path=fakes.MODEL_PATH,
        model_name="tiny",
        secret_file=tmp_path / "secret",
        redis_url=url,
        mesh=mesh,
        max_context=4096,
        poll_interval=0.02,
        stop_grace=0.0,
    )
    router = Router(config, view)
    await router.start()
    async with fakes.client_channel(router.address) as channel:
        await until(lambda: router.view.polled() >= len(workers), "polled")
        try:
            yield view, workers, leases, chat_pb2_grpc.ChatServiceStub(channel), mesh
        finally:
            await router.stop()
            await view.close()
            for lease in leases:
                await lease.close()
            for worker in workers:
                await worker.server.stop(None)


async def answer(stub, number: int) -> fakes.Answer:
    return fakes.Answer([r async for r in stub.StreamChat(prompt(number), timeout=60)])


async def test_the_owner_of_a_prefix_that_was_killed_is_picked_no_more(tmp_path, servers):
    """ai-dynamo/dynamo#11646: cache affinity won over liveness."""
    url = servers("a").url
    async with registered_mesh(tmp_path, url) as (view, workers, leases, stub, mesh):
        dead, other, _ = workers
        pages = PromptHashes(KEY, "", PREFIX).for_format(dead.page_format)
        leases[0].publish(placed(pages))
        await until(lambda: view.owned_prefix("prefill-0", pages) == 4, "the prefix is warm")
        assert (await answer(stub, 0)).last.timing.prefill_worker == "prefill-0"
        before = len(other.seen(PrefillRequest))
        await dead.die()
        await leases[0].stop()
        together = await asyncio.gather(*(answer(stub, i) for i in range(1, 11)))
        one_by_one = [await answer(stub, i) for i in range(11, 21)]
        assert {a.last.timing.prefill_worker for a in (*together, *one_by_one)} == {"prefill-1"}
        assert all(a.last.timing.attempts <= 2 and len(a.ids) == 4 for a in together)
        assert [a.last.timing.attempts for a in one_by_one] == [1] * 10
        assert len(other.seen(PrefillRequest)) == before + 20

        async def expired() -> bool:
            found = await read_members(url, mesh)
            return "prefill-0" not in [member.record.worker_id for member in found]

        await until(expired, "its lease ends")
        await until(lambda: view.owned_prefixes(pages) == {}, "nobody owns the prefix")
        later = [await answer(stub, i) for i in range(21, 26)]
        assert [a.last.timing.attempts for a in later] == [1] * 5
        assert {a.last.timing.prefill_worker for a in later} == {"prefill-1"}


STAGES = ("before anything", "after the first token", "in the middle", "after the last token")


async def leave(stub, stage: str, rng: random.Random) -> None:
    """A client that goes at that moment."""
    call = stub.StreamChat(fakes.ask(max_tokens=40, ignore_eos=True), timeout=60)
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        if stage == "before anything":
            await asyncio.sleep(rng.random() * 0.01)
        else:
            reads = {STAGES[1]: 1, STAGES[2]: rng.randint(2, 20), STAGES[3]: 1000}[stage]
            while reads and await call.read() is not grpc.aio.EOF:
                reads -= 1
    call.cancel()


async def test_clients_that_leave_at_any_moment_leave_every_count_exact(tmp_path):
    """vllm-project/router#215: each left its worker's count one too high, for ever."""
    rng = random.Random(215)
    async with fakes.mesh(tmp_path, prefill=2, decode=2) as mesh:
        view, long_text = mesh.router.view, fakes.ask(max_tokens=40, request_id="long")
        for worker in mesh.workers:
            worker.answer = list(range(300, 340))
        for _ in range(2):
            stages = [STAGES[i % 4] for i in range(50)]
            await asyncio.gather(*(leave(mesh.stub, stage, rng) for stage in stages))
            await mesh.at_rest()
            shown = view.snapshot(PromptHashes(KEY, "", PREFIX))
            for candidate in (*shown.prefill, *shown.decode):
                assert (candidate.own_requests, candidate.own_tokens) == (0, 0)
        # One that runs for long while others leave and the workers are polled: its worker has one.
        reached = [worker.wait_in("Token") for worker in mesh.decode]
        call = mesh.stub.StreamChat(long_text, timeout=60)
        await until(lambda: any(event.is_set() for event in reached), "it streams")
        (busy,) = [w for w in mesh.decode if w.leases]
        for _ in range(20):
            await leave(mesh.stub, STAGES[0], rng)

        def in_flight() -> list[int]:
            return [view.in_flight(worker.instance) for worker in mesh.decode]

        alone = [int(worker is busy) for worker in mesh.decode]
        running = mesh.router.metrics.value
        await until(
            lambda: running("pdmesh_num_requests_running") == 1 and in_flight() == alone, "alone"
        )
        polls = [worker.polls + 10 for worker in mesh.workers]
        while any(w.polls < wanted for w, wanted in zip(mesh.workers, polls, strict=True)):
            assert in_flight() == alone
            await asyncio.sleep(0.002)
        for worker in mesh.decode:
            worker.hold["Token"].set()
        assert len(fakes.Answer([r async for r in call]).ids) == 40
        await mesh.at_rest()
