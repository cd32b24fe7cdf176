"""What a mesh has to do whose workers are ranks in FP8, on GPUs or on a CPU."""

import asyncio
import contextlib
import os
import signal

import grpc
import meshes
from device_cases import check_answer, conversations, logits_at

from pdmesh.launch.topology import shipped_model
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import PdmeshError


async def check_answers(mesh, tokens, together):
    """Answers are the reference's but for near ties; every rank took part in every step."""
    model = load_model(shipped_model())
    talks = [
        (whole[: len(whole) - count], whole[len(whole) - count :])
        for whole, count in conversations(model, shipped_model(), tokens)
    ][:together]
    async with meshes.chat_stub(mesh.address) as stub:
        calls = [meshes.ask(stub, prompt, max_tokens=tokens) for prompt, _ in talks]
        answers = await asyncio.gather(*calls)
        alone = await meshes.ask(stub, talks[0][0], max_tokens=tokens)
        long = [token for prompt, answer in talks for token in (*prompt, *answer)] * 16
        long = long[:700]  # two chunks
        after = await meshes.ask(stub, long, max_tokens=1)
    check_answer(model, long, after.token_ids, [int(logits_at(model, long, -1).argmax())])
    for answer, (prompt, expected) in zip([*answers, alone], [*talks, talks[0]], strict=True):
        assert answer.finish in ("stop", "length")
        check_answer(model, prompt, answer.token_ids, expected)
    statuses = await mesh.statuses()
    for role in ("prefill", "decode"):
        group = [status for status in statuses if status.role == role]
        assert len(group) > 1
        for status in group:
            assert status.ranks.members == tuple(range(len(group)))
            assert status.ranks.sent_bytes > 0
    assert sum(status.accepted for status in statuses) > 0
    assert await mesh.problems() == []


async def check_loss(mesh, tokens):
    """A killed rank ends the others: running answers fail and say so, or go on; then all serve."""
    before = mesh.pids()
    async with meshes.chat_stub(mesh.address) as stub:
        asked = {"max_tokens": tokens, "ignore_eos": True}
        async with (
            meshes.asking(stub, [7, 8, 9], **asked) as (one, first),
            meshes.asking(stub, [30] * 70, **asked) as (two, second),
        ):
            await meshes.first_token(one, first)
            await meshes.first_token(two, second)
            os.kill(before["decode-1"], signal.SIGKILL)
            results = await asyncio.gather(one, two, return_exceptions=True)
        for result in results:
            if isinstance(result, grpc.aio.AioRpcError):
                assert result.code() == grpc.StatusCode.UNAVAILABLE, result.details()
            else:
                assert len(result.token_ids) == tokens
        answer = await once_formed(mesh, stub)
    assert answer.token_ids
    after = mesh.pids()
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {"decode-0", "decode-1"}
    assert await mesh.problems() == []


async def check_prefill_loss(mesh, tokens):
    """A killed prefill rank ends the others and no running answer; a prompt that they were at is
    computed by their successors, or fails and says so; then all serve."""
    before = mesh.pids()
    async with meshes.chat_stub(mesh.address) as stub:
        asked = {"max_tokens": tokens, "ignore_eos": True}
        async with meshes.asking(stub, [7, 8, 9], **asked) as (running, first):
            await meshes.first_token(running, first)
            async with meshes.asking(stub, [31, 32] * 350, max_tokens=1) as (long, _):
                while not long.done() and not any(
                    status.running for status in await mesh.statuses() if status.role == "prefill"
                ):
                    await asyncio.sleep(0.01)
                os.kill(before["prefill-1"], signal.SIGKILL)
                (result,) = await asyncio.gather(long, return_exceptions=True)
            if isinstance(result, grpc.aio.AioRpcError):
                assert result.code() == grpc.StatusCode.UNAVAILABLE, result.details()
            else:
                assert len(result.token_ids) == 1
            assert len((await running).token_ids) == tokens
        answer = await once_formed(mesh, stub)
    assert answer.token_ids
    after = mesh.pids()
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {"prefill-0", "prefill-1"}
    assert await mesh.problems() == []


async def once_formed(mesh, stub, patience=150):
    """An answer, as soon as there is one; until then requests are refused, and none hangs."""
    async with asyncio.timeout(patience):
        while True:
            try:
                answer = await meshes.ask(stub, "Hello!", max_tokens=8, timeout=60)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                with contextlib.suppress(PdmeshError):
                    if len(await mesh.statuses()) == mesh.workers:
                        return answer
            await asyncio.sleep(0.2)
