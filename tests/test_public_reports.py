"""Faults that users of other systems reported, tried on a router over real workers.

docs/testing.md lists them all; most are tested beside the part that they are about.
"""

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from router_rig import whole_mesh
from worker_rig import MODEL, PAGE, ScriptedDrafts, prompt_of, reference, rig, until

from pdmesh.decode import leases as leases_module
from pdmesh.kvtransfer.faults import Faults
from pdmesh.model.reference import generate_reference
from pdmesh.model.tree import TokenTree
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InternalError
from pdmesh.wire.sampling import SamplingParams

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def question(prompt, **sampling):
    fields = {"temperature": 0.0, "top_p": 1.0, "ignore_eos": True, "max_tokens": 5} | sampling
    return chat_pb2.ChatRequest(
        prompt_token_ids=prompt, sampling=chat_pb2.Sampling(**fields), request_id="one"
    )


async def asked(stub, message, timeout=60):
    """All responses of a request."""
    return [r async for r in stub.StreamChat(message, timeout=timeout)]


def tokens_of_answer(responses, index=0):
    return [t for r in responses if r.index == index for t in r.token_ids]


# ---- NVIDIA/TensorRT-LLM#11727: the first token's logprob was lost at the hand-over -----------


def alone(prompt, index, max_tokens, count):
    """(token, logprob, likely ids, their logprobs) of an answer, from one process."""
    rows = []
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7)
    tokens = generate_reference(
        MODEL, prompt, max_tokens, sampling=params, index=index, on_logits=rows.append
    )
    found = []
    for token, logits in zip(tokens, rows, strict=True):
        logprobs = logits[0].double().log_softmax(-1)
        tops = logprobs.topk(count)
        found.append((token, float(logprobs[token]), tops.indices.tolist(), tops.values.tolist()))
    return found


@pytest.mark.parametrize("n", [1, 2])
async def test_every_token_has_the_logprobs_of_one_process_the_first_included(tmp_path, n):
    """NVIDIA/TensorRT-LLM#11727; with a cached prefix too (vllm-project/vllm#27491)."""
    prompt = prompt_of(2 * PAGE + 9)
    async with whole_mesh(tmp_path, drafts=2) as (_, stub):
        for count in (0, 1, 5):
            for max_tokens in (1, 5):
                message = question(
                    prompt, n=n, logprobs=count, max_tokens=max_tokens, temperature=1.0, seed=7
                )
                responses = await asked(stub, message)
                cached = responses[-1].usage.cached_tokens
                assert (cached >= PAGE) == ((count, max_tokens) != (0, 1))
                for index in range(n):
                    entries = [e for r in responses if r.index == index for e in r.logprobs]
                    tokens = tokens_of_answer(responses, index)
                    want = alone(prompt, index, max_tokens, count)
                    assert len(entries) == len(tokens) == len(want) == max_tokens
                    for token, entry, (id_, logprob, ids, values) in zip(
                        tokens, entries, want, strict=True
                    ):
                        assert token == id_
                        assert entry.logprob == pytest.approx(logprob, abs=1e-4)
                        assert list(entry.top_token_ids) == ids
                        assert list(entry.top_logprobs) == pytest.approx(values, abs=1e-4)
        message.sampling.prompt_logprobs = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked(stub, message)
        assert caught.value.code() is INVALID


# ---- vllm-project/vllm#44701: two labels that join to the same string shared pages -------------


async def test_a_prompt_finds_pages_of_its_own_tenant_only(tmp_path):
    """vllm-project/vllm#44701."""
    prompt, seen = prompt_of(3 * PAGE + 5), set()
    async with whole_mesh(tmp_path) as (workers, stub):
        for tenant in ("", "x", "ab", "a", "abc", "xab", "x ab"):
            message = question(prompt)
            message.tenant = tenant
            first, again = [(await asked(stub, message))[-1].usage for _ in range(2)]
            assert first.cached_tokens == 0, f"{tenant!r} found pages of another"
            assert again.cached_tokens >= 2 * PAGE
            for side in (workers.prefill, workers.decode):
                owned = set(side.kv.owned_hashes())
                assert owned
                seen |= owned
        root = {h for h in seen if h in workers.hashes(prompt)}
        assert len(root) == 3
        assert len(seen) >= 7 * 3, "no page is shared by two tenants"


# ---- sgl-project/sglang#30233: what was rejected or aborted ended as a success ----------------


async def test_a_prompt_above_the_pool_gets_no_token_and_the_next_one_is_right(tmp_path):
    """sgl-project/sglang#30233, through the router."""
    above, normal = prompt_of(8 * PAGE + 1), prompt_of(3 * PAGE)
    async with whole_mesh(tmp_path, pages=8) as (workers, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked(stub, question(above))
        assert caught.value.code() is INVALID
        assert workers.prefill.gate.batches == []
        responses = await asked(stub, question(normal))
        assert tokens_of_answer(responses) == reference(normal, 5)
        assert responses[-1].usage.prompt_tokens == len(normal)
        await workers.rest()


@pytest.mark.parametrize("how", ["client leaves", "deadline", "transfer lost"])
async def test_a_request_that_ends_in_its_transfer_never_ends_as_a_success(tmp_path, how):
    """sgl-project/sglang#30233: neither "length" nor "stop", and nothing stays in use."""
    prompt = prompt_of(3 * PAGE)
    stalled = {"transport": "loopback", "stall_after": 2}
    async with whole_mesh(tmp_path, **stalled) as (workers, stub):
        if how == "transfer lost":
            workers.decode.listener.faults = Faults(disconnect_after=4)
        timeout = 2 if how == "deadline" else 60
        call = stub.StreamChat(question(prompt), timeout=timeout)
        reasons, tokens = [], []

        async def read():
            async for r in call:
                reasons.append(r.finish_reason)
                tokens.extend(r.token_ids)

        reading = asyncio.ensure_future(read())
        if how == "client leaves":
            await until(lambda: tokens)
            call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await reading
        assert set(reasons) <= {""}
        assert tokens == reference(prompt, 1)[: len(tokens)]
        value = workers.router.metrics.value
        await until(lambda: value("pdmesh_num_requests_running") == 0)
        outcomes = [value("pdmesh_requests_total", outcome=o) for o in ("length", "stop")]
        assert not any(outcomes)
        await workers.rest()


# ---- sgl-project/sglang#30723: a transfer id that is not one attempt's own --------------------


async def test_three_answers_are_right_after_a_first_attempt_that_failed(tmp_path):
    """sgl-project/sglang#30723: each attempt has leases of its own."""
    prompt = prompt_of(2 * PAGE + 3)
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3)
    options = {"transport": "loopback", "decodes": 2, "drafts": 2}
    async with whole_mesh(tmp_path, max_attempts=4, **options) as (workers, stub):
        first, second = workers.decodes
        first.listener.faults = Faults(disconnect_after=3)
        workers.router.view.add(second.instance, "decode", 20, 0)  # so that it is not the first
        message = question(prompt, n=3, max_tokens=6, temperature=0.8, seed=3)
        responses = await asked(stub, message)
        workers.router.view.add(second.instance, "decode", -20, 0)
        assert responses[-1].timing.attempts > 1
        # Prefill gives each first token; those of the attempt that failed stand once they are out.
        assert first.worker.tokens_generated == 0
        assert 12 <= second.worker.tokens_generated <= 15
        assert responses[-1].usage.completion_tokens == 18
        assert responses[-1].usage.prompt_tokens == len(prompt)
        for index in range(3):
            want = generate_reference(MODEL, prompt, 6, sampling=params, index=index)
            assert tokens_of_answer(responses, index) == want
            ends = [r.finish_reason for r in responses if r.index == index and r.finish_reason]
            assert ends == ["length"]
        await workers.rest()


async def test_a_second_reservation_with_the_same_transfer_id_is_refused(monkeypatch):
    """sgl-project/sglang#30723: the first goes on, and nothing of the second stays."""
    prompt = prompt_of(PAGE + 9)
    async with rig() as mesh:
        monkeypatch.setattr(leases_module, "new_request_id", lambda: "same")
        lease = await mesh.reserve(prompt)
        used = mesh.decode.kv.status()
        with pytest.raises(InternalError, match="same"):
            await mesh.reserve(prompt_of(PAGE, 1))
        assert mesh.decode.kv.status() == used
        first = await mesh.compute(prompt, lease)
        chunks = await mesh.read(prompt, lease, first)
        tokens = [first.token_ids[0], *(t for c in chunks for t in c.token_ids)]
        assert tokens == reference(prompt, 8)


# ---- vllm-project/vllm#16370: drafts beyond the end of a page ---------------------------------


class AllRight(ScriptedDrafts):
    def _scripted(self, s, tree):
        known = self.truth[tuple(s.tokens[:PAGE])]
        place = s.sampling.position
        depth = len(tree.tokens) - 1
        return TokenTree.chain((tree.tokens[0], *self.change(known[place : place + depth])))

    def change(self, tokens):
        return tokens


class AllWrong(AllRight):
    def change(self, tokens):
        return [(token + 1) % self.vocab_size for token in tokens]


class HalfRight(AllRight):
    def change(self, tokens):
        half = len(tokens) // 2
        return [*tokens[:half], *((token + 1) % self.vocab_size for token in tokens[half:])]


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("drafter", [AllRight, HalfRight, AllWrong])
async def test_drafts_beyond_a_page_hurt_nobody_after_the_hand_over(drafter, drafts):
    """vllm-project/vllm#16370: lengths modulo 16 of 12 to 15, and no page to spare."""
    lengths = [PAGE + rest for rest in (12, 13, 14, 15)]
    prompts = [prompt_of(length, length) for length in lengths]
    want = [reference(p, 20) for p in prompts]
    truth = {tuple(p[:PAGE]): w for p, w in zip(prompts, want, strict=True)}
    pages = sum(-(-(length + 20) // 16) for length in lengths)
    options = {"page_size": 16, "pages": pages, "drafter": drafter, "truth": truth}
    async with rig(drafts=drafts, **options) as mesh:
        answers = await asyncio.gather(*(mesh.ask(p, 20) for p in prompts))
        assert [answer.tokens for answer in answers] == want
        accepted = mesh.decode.worker.accepted
        generated = mesh.decode.worker.tokens_generated
        if drafter is AllRight:
            assert accepted >= generated * drafts // (drafts + 1) - 4
        else:
            assert (accepted > 0) == (drafter is HalfRight and drafts > 1)
        # What is shared as a prefix ends with the last full page of true tokens.
        own = {h for p, w in zip(prompts, want, strict=True) for h in mesh.hashes([*p, *w[:-1]])}
        assert set(mesh.decode.kv.owned_hashes()) <= own


# ---- the list -----------------------------------------------------------------------------------


def test_every_test_in_the_list_of_reports_exists():
    here = Path(__file__).parent
    listed = (here.parent / "docs" / "testing.md").read_text().split("Public bug reports")[1]
    names = re.findall(r"`(test_\w+\.py)::(\w+)`", listed)
    assert len(names) > 20
    for file, name in names:
        assert f"def {name}(" in (here / file).read_text(), (file, name)
