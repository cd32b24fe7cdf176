"""First tokens of a prefill worker: several answers, failover, grammars, forms of attention."""

import threading

import msgspec
import numpy as np
import pytest
from worker_rig import MODEL, PAGE, VOCAB, prompt_of, rig

from pdmesh.kvcache.store import LatentStore
from pdmesh.model.reference import generate_reference
from pdmesh.prefill.runner import PrefillRunner
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.sampling import SamplingParams

WARM = SamplingParams(max_tokens=8, temperature=1.0, seed=7)


def answer_of(prompt, count, sampling=WARM, index=0, **options):
    return generate_reference(MODEL, prompt, count, sampling=sampling, index=index, **options)


# ---- answers ----------------------------------------------------------------------------------


async def test_one_prompt_gives_the_first_token_of_every_answer():
    prompt = prompt_of(2 * PAGE + 9)
    sampling = msgspec.structs.replace(WARM, logprobs=1)
    wanted = [answer_of(prompt, 8, index=index) for index in range(4)]
    assert len({tokens[0] for tokens in wanted}) > 1
    async with rig() as mesh:
        lease = await mesh.reserve(prompt, n=4)
        first = await mesh.compute(prompt, lease, sampling, n=4)
        assert list(first.token_ids) == [tokens[0] for tokens in wanted]
        assert len(first.logprobs) == 4
        assert mesh.prefill.worker.tokens_computed == len(prompt)
        for index in range(4):
            chunks = await mesh.read(prompt, lease, first, sampling, answer=index)
            rest = [token for chunk in chunks for token in chunk.token_ids]
            assert [first.token_ids[index], *rest] == wanted[index]
            await mesh.release(lease, answer=index)


async def test_a_later_answer_alone_gets_the_token_it_has_among_all():
    prompt = prompt_of(PAGE + 9)
    async with rig() as mesh:
        for index in range(3):
            lease = await mesh.reserve(prompt)
            first = await mesh.compute(prompt, lease, WARM, sample_index=index)
            assert first.token_ids == (answer_of(prompt, 1, index=index)[0],)
            await mesh.release(lease)


@pytest.mark.parametrize("known", [1, 5])
async def test_after_a_failover_the_answer_goes_on_as_it_would_have(known):
    """Penalties count tokens of the answer, not of the prompt; min_tokens counts from its start."""
    prompt = prompt_of(PAGE - 3)
    sampling = msgspec.structs.replace(
        WARM, frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=8, stop_token_ids=(3,)
    )
    wanted = answer_of(prompt, 8, sampling, index=2, arithmetic="exact", eos=(5,))
    tokens = [*prompt, *wanted[:known]]
    async with rig(arithmetic="exact") as mesh:
        lease = await mesh.reserve(tokens)
        fields = {"output_offset": known, "sample_index": 2, "eos_token_ids": (5,)}
        first = await mesh.compute(tokens, lease, sampling, **fields)
        assert first.token_ids == (wanted[known],)
        await mesh.release(lease)


async def test_an_answer_with_min_tokens_does_not_begin_with_an_end():
    prompt = prompt_of(40)
    greedy = generate_reference(MODEL, prompt, 1)[0]
    async with rig() as mesh:
        for fields in ({"eos_token_ids": (greedy,)}, {}):
            lease = await mesh.reserve(prompt)
            sampling = SamplingParams(max_tokens=8, min_tokens=1)
            first = await mesh.compute(prompt, lease, sampling, **fields)
            assert (first.token_ids == (greedy,)) is not bool(fields)
            await mesh.release(lease)


async def test_answers_that_do_not_fit_the_lease_are_refused():
    prompt = prompt_of(70)
    async with rig() as mesh:
        lease = await mesh.reserve(prompt, n=2)
        request = msgspec.structs.replace(mesh.prefill_request(prompt, lease), n=2)
        for change, word in [
            ({"n": 1}, "lease is for 2 answers"),
            ({"n": 3}, "lease is for 2 answers"),
            ({"sample_index": -1}, "sample_index"),
            ({"waited_ms": -1}, "waited_ms"),
            ({"output_offset": 70}, "leaves a prompt"),
            ({"output_offset": 1}, "can have this answer only"),
            ({"eos_token_ids": (VOCAB,)}, "eos_token_ids"),
            ({"sampling": SamplingParams(grammar="start: /x/")}, "no grammars"),
        ]:
            with pytest.raises(InvalidRequest, match=word):
                await mesh.prefill.worker.prefill(msgspec.structs.replace(request, **change))
        first = await mesh.prefill.worker.prefill(request)
        assert len(first.token_ids) == 2
        for answer in range(2):
            await mesh.release(lease, answer=answer)


# ---- grammars ---------------------------------------------------------------------------------


class OnlyOdd:
    """A grammar of odd tokens."""

    ended = False

    def copy(self):
        return self

    def mask(self, path=()):
        return np.full(-(-VOCAB // 32), -1431655766, dtype=np.int32)

    def allowed(self, path):
        return len(path)

    def advance(self, tokens):
        assert all(token % 2 for token in tokens)


class FakeGrammars:
    def __init__(self):
        self.threads = []

    def compile(self, grammar):
        self.threads.append(threading.current_thread())
        if grammar != "odd":
            raise InvalidRequest("the grammar is refused: it is none")
        return OnlyOdd()


async def test_a_grammar_shapes_the_first_tokens_and_is_compiled_beside_the_event_loop():
    prompts = [prompt_of(n) for n in range(40, 48)]
    assert any(generate_reference(MODEL, p, 1)[0] % 2 == 0 for p in prompts)
    grammars = FakeGrammars()
    async with rig(grammars=grammars) as mesh:
        for prompt in prompts:
            lease = await mesh.reserve(prompt)
            first = await mesh.compute(prompt, lease, SamplingParams(max_tokens=8, grammar="odd"))
            assert first.token_ids[0] % 2 == 1
            await mesh.release(lease)
    assert threading.main_thread() not in grammars.threads


async def test_what_is_no_grammar_is_refused_before_anything_is_opened():
    prompt = prompt_of(70)
    async with rig(grammars=FakeGrammars()) as mesh:
        lease = await mesh.reserve(prompt)
        with pytest.raises(InvalidRequest, match="it is none"):
            await mesh.compute(prompt, lease, SamplingParams(max_tokens=8, grammar="even"))
        assert mesh.prefill.worker._sender.num_transfers == 0
        first = await mesh.compute(prompt, lease)
        assert len(await mesh.read(prompt, lease, first)) >= 1


# ---- arithmetic -------------------------------------------------------------------------------


def runner_of(arithmetic):
    store = LatentStore(1, MODEL.num_latent_layers, PAGE, 48, MODEL.dtype)
    return PrefillRunner(MODEL, store, PAGE, True, arithmetic)


def test_fast_computes_a_short_rest_of_a_long_cached_prompt_in_absorbed_form():
    fast, exact = runner_of("fast"), runner_of("exact")
    assert fast.form(0, 1) == fast.form(0, 900) == fast.form(PAGE, 900) == "mha"
    assert fast.form(14 * PAGE, 14 * PAGE + 2) == "absorbed"
    assert exact.form(0, 900) == exact.form(PAGE, 900) == "absorbed"


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_exact_pages_do_not_depend_on_what_was_cached_or_how_prompts_were_cut(mtp):
    """Latents of all layers, the MTP layer's too, bit for bit."""
    prompt, part = prompt_of(4 * PAGE), 3 * PAGE
    copies = []
    for chunk_tokens, ahead in [(1000, None), (PAGE, None), (1000, prompt[:part])]:
        options = {"chunk_tokens": chunk_tokens, "mtp": mtp, "arithmetic": "exact"}
        async with rig(**options) as mesh:
            if ahead:
                await mesh.ask(ahead, 1)
            await mesh.ask(prompt, 1)
            held = mesh.prefill.kv.reserve(mesh.hashes(prompt), 4, 4)
            assert held.matched == 4
            copies.append(mesh.prefill.store.tensor[held.pages].clone())
            held.release()
    for copy in copies:
        if mtp:
            copy[0, -1, 0] = 0.0
        assert not copy.isnan().any()
        assert (copy == copies[0]).all()
