"""Answers that move between decode workers while they are generated: bit for bit the same."""

import asyncio
import json
from collections import Counter

import pytest
from migration_rig import moving
from model_cases import tiny_model
from router_fakes import MODEL_PATH
from worker_rig import PAGE, prompt_of, reference, rig

from pdmesh.model.grammar import Grammars
from pdmesh.text.grammar import json_grammar
from pdmesh.text.tokenizer import load_tokenizer

BOTH = pytest.mark.parametrize("arithmetic", ["fast", "exact"])
THERE_AND_BACK = [(3, 1), (9, 0), (20, 1), (33, 0)]


async def unmoved(prompt, max_tokens, options, n=1, eos=(), **sampling):
    """Tokens and log-probabilities of each answer at one worker that has no other request."""
    async with rig(**options) as mesh:
        answers = await moving(
            mesh, prompt, n=n, eos=eos, **{"max_tokens": max_tokens, "logprobs": 2, **sampling}
        )
        done = await asyncio.gather(*(answer.run() for answer in answers))
        return [(a.tokens, a.logprobs, a.finish) for a in done]


async def moved(mesh, prompt, points, max_tokens, n=1, eos=(), **sampling):
    answers = await moving(
        mesh,
        prompt,
        points,
        n=n,
        eos=eos,
        **{"max_tokens": max_tokens, "logprobs": 2, **sampling},
    )
    return await asyncio.gather(*(answer.run() for answer in answers))


def told(answers):
    return [(a.tokens, a.logprobs, a.finish) for a in answers]


def commits(answers):
    return Counter(decision for a in answers for decision in a.decisions)


@BOTH
@pytest.mark.parametrize("transport", ["tcp", "loopback"])
async def test_an_answer_that_moves_around_page_boundaries_is_the_same(arithmetic, transport):
    options = {"arithmetic": arithmetic, "transport": transport, "drafts": 0}
    prompt = prompt_of(PAGE - 5)
    want = await unmoved(prompt, 24, options)
    for at in (1, 3, 4, 5) if transport == "tcp" else (4, 20):
        async with rig(decodes=2, **options) as mesh:
            answers = await moved(mesh, prompt, [(at, 1)], 24)
            assert answers[0].decisions == ["committed to decode1"]
            assert answers[0].frozen_at == [at + 1]
            assert told(answers) == want
            await mesh.rest()
            assert mesh.decodes[0].worker.migrations.moved_out == 1
            assert mesh.decodes[1].worker.adoptions.moved_in == 1


@BOTH
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_the_places_around_boundaries_of_a_long_answer(arithmetic, mtp):
    """Full pages go in rounds while the answer goes on; what is left is at most two pages."""
    options = {"arithmetic": arithmetic, "transport": "loopback", "drafts": 0, "mtp": mtp}
    options["page_size"] = 16
    prompt = prompt_of(70)
    want = await unmoved(prompt, 40, options)
    for at in (9, 10, 11, 26):
        async with rig(decodes=2, **options) as mesh:
            rounds = []

            async def note(method, request, _, rounds=rounds):
                if method == "AdoptRound":
                    rounds.append(request.num_pages)

            mesh.on_call = note
            answers = await moved(mesh, prompt, [(at, 1)], 40)
            assert told(answers) == want
            assert commits(answers) == {"committed to decode1": 1}
            assert sum(rounds) == -(-(70 + at) // 16)
            assert rounds[-1] <= 2


@BOTH
@pytest.mark.parametrize("drafts", [1, 2, 3])
async def test_an_answer_with_drafts_goes_there_and_back_and_there_again(arithmetic, drafts):
    prompt = prompt_of(2 * PAGE - 9)
    options = {"arithmetic": arithmetic, "transport": "loopback"}
    want = await unmoved(prompt, 50, {**options, "drafts": 0})
    truth = {tuple(prompt[:PAGE]): want[0][0]}
    async with rig(decodes=2, drafts=drafts, truth=truth, **options) as mesh:
        answers = await moved(mesh, prompt, THERE_AND_BACK, 50)
        assert told(answers) == want
        assert commits(answers) == {"committed to decode1": 2, "committed to decode": 2}
        (answer,) = answers
        counted = sum(side.worker.drafted for side in mesh.decodes)
        assert answer.drafted == counted > 0
        assert sum(side.worker.accepted for side in mesh.decodes) > 5


@BOTH
@pytest.mark.parametrize("lag", [1, 4, 1000])
async def test_an_answer_whose_reader_is_behind_moves_and_is_the_same(arithmetic, lag):
    """What waits is merged, and what the source still has goes along in the tail."""
    prompt = prompt_of(2 * PAGE - 9)
    options = {"arithmetic": arithmetic, "transport": "loopback"}
    want = await unmoved(prompt, 50, options)
    truth = {tuple(prompt[:PAGE]): want[0][0]}
    async with rig(decodes=2, truth=truth, **options) as mesh:
        (answer,) = await moving(
            mesh, prompt, [(7, 1), (20, 0), (33, 1)], max_tokens=50, logprobs=2
        )
        answer.lag = lag
        await answer.run()
        assert told([answer]) == want
        assert commits([answer]) == {"committed to decode1": 2, "committed to decode": 1}
        assert answer.drafted == sum(side.worker.drafted for side in mesh.decodes)
        assert answer.longest > 2, "more than a step gives"
        await mesh.rest()


KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
    },
    "shaped": {
        "temperature": 1.0,
        "min_p": 0.02,
        "top_k": 40,
        "seed": 5,
        "logit_bias": ((5, 3.0), (7, -100.0)),
        "bad_words": ((9, 11), (13,), (5, 5)),
    },
}


@BOTH
@pytest.mark.parametrize("kind", list(KINDS))
async def test_two_answers_of_a_request_each_move_on_their_own(arithmetic, kind):
    prompt = prompt_of(PAGE + 20)
    options = {"arithmetic": arithmetic, "transport": "loopback", "page_size": 16}
    want = await unmoved(prompt, 40, {**options, "drafts": 0}, n=2, **KINDS[kind])
    async with rig(decodes=2, drafts=2, **options) as mesh:
        offered = []

        async def note(method, request, _):
            if method == "Adopt":
                offered.append(len(request.hashes))

        mesh.on_call = note
        answers = await moved(mesh, prompt, THERE_AND_BACK, 40, n=2, **KINDS[kind])
        assert told(answers) == want
        assert commits(answers).total() == 8
        assert max(offered) >= 5, "the prompt's pages are sent once"


@BOTH
async def test_the_end_comes_where_it_would_have_come(arithmetic):
    """Stop tokens, end of text and min_tokens, on both sides of a move."""
    prompt = prompt_of(PAGE - 3)
    options = {"arithmetic": arithmetic, "transport": "loopback"}
    random = KINDS["sampled"]
    ((tokens, *_),) = await unmoved(prompt, 30, {**options, "drafts": 0}, **random)
    stop = next(token for at, token in enumerate(tokens) if at == tokens.index(token) > 11)
    for sampling in (
        {"stop_token_ids": (stop,)},
        {"eos": (stop,), "ignore_eos": True},
        {"stop_token_ids": (stop,), "min_tokens": 20},
    ):
        want = await unmoved(prompt, 30, {**options, "drafts": 0}, **random, **sampling)
        async with rig(decodes=2, **options) as mesh:
            points = [(4, 1), (10, 0), (14, 1)]
            answers = await moved(mesh, prompt, points, 30, **random, **sampling)
            assert told(answers) == want
            assert commits(answers).total() >= 2
            await mesh.rest()
            assert [side.worker.cancelled for side in mesh.decodes] == [0, 0]


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        },
        "required": ["kind", "tags"],
        "additionalProperties": False,
    }
)


@BOTH
async def test_structured_output_goes_on_in_the_middle_of_its_grammar(arithmetic):
    tokenizer = load_tokenizer(MODEL_PATH)
    vocab = tokenizer.vocab_size
    options = {
        "arithmetic": arithmetic,
        "transport": "loopback",
        "served": tiny_model(3, vocab_size=vocab, num_hidden_layers=2),
        "grammars": Grammars(MODEL_PATH, vocab),
        "page_size": 16,
        "drafts": 2,
    }
    prompt = prompt_of(40)
    sampling = {
        "grammar": json_grammar(SCHEMA),
        "temperature": 1.0,
        "seed": 2,
        "eos": tokenizer.ids.eos,
    }
    want = await unmoved(prompt, 80, options, **sampling)
    assert want[0][2] == "stop"
    async with rig(decodes=2, **options) as mesh:
        answers = await moved(mesh, prompt, [(2, 1), (8, 0), (12, 1)], 80, **sampling)
        assert told(answers) == want
        assert commits(answers).total() == 3


@BOTH
async def test_pages_that_the_target_has_in_another_form_are_not_used(arithmetic):
    """A first turn was generated there; here the same tokens are a prompt."""
    prompt = prompt_of(PAGE // 2)
    options = {"arithmetic": arithmetic, "transport": "loopback", "chunk_tokens": 256}
    turn = [*prompt, *reference(prompt, 2 * PAGE + 8)]
    want = await unmoved(turn, 20, options)
    async with rig(decodes=2, prefills=2, **options) as mesh:
        await mesh.ask(prompt, 2 * PAGE, decode=1, prefill=1)
        assert mesh.decodes[1].kv.match(mesh.hashes(turn)) == 2
        adopted = []

        async def note(method, request, _):
            if method == "Adopt":
                adopted.append(len(request.hashes))

        mesh.on_call = note
        answers = await moved(mesh, turn, [(5, 1)], 20)
        assert commits(answers) == {"committed to decode1": 1}
        assert told(answers) == want
        assert adopted == [0 if arithmetic == "fast" else 2]
        await mesh.rest()


@BOTH
async def test_an_answer_that_comes_back_finds_its_pages(arithmetic):
    prompt = prompt_of(2 * PAGE)
    options = {"arithmetic": arithmetic, "transport": "loopback"}
    want = await unmoved(prompt, 30, options)
    async with rig(decodes=2, **options) as mesh:
        found = []

        async def note(method, request, instance):
            if method == "AdoptRound":
                found.append((instance, request.first_page))

        mesh.on_call = note
        answers = await moved(mesh, prompt, [(5, 1), (12, 0)], 30)
        assert told(answers) == want
        assert ("decode", 2) in found
        assert ("decode", 0) not in found


@BOTH
async def test_answers_beside_it_go_on_unhurt_at_both_workers(arithmetic):
    options = {"arithmetic": arithmetic, "transport": "loopback", "page_size": 16, "drafts": 1}
    prompts = [prompt_of(30 + 11 * i, i) for i in range(4)]
    wants = [await unmoved(p, 24, options, **KINDS["sampled"]) for p in prompts]
    async with rig(decodes=2, pages=200, **options) as mesh:

        async def one(i):
            points = [THERE_AND_BACK[:3], []][i % 2]
            (answer,) = await moving(
                mesh,
                prompts[i],
                [(at, 1 - to) for at, to in points] if i >= 2 else points,
                worker=i // 2,
                max_tokens=24,
                logprobs=2,
                request_id=f"r{i}",
                **KINDS["sampled"],
            )
            return await answer.run()

        answers = await asyncio.gather(*(one(i) for i in range(4)))
        assert [told([a])[0] for a in answers] == [want[0] for want in wants]
        assert commits(answers).total() == 6


@BOTH
async def test_a_promise_that_grows_is_whole_at_the_target_and_grows_on(arithmetic):
    options = {"arithmetic": arithmetic, "transport": "loopback", "page_size": 16}
    prompt = prompt_of(40)
    want = await unmoved(prompt, 60, options)
    async with rig(decodes=2, growth_tokens=8, **options) as mesh:
        (answer,) = await moving(mesh, prompt, [(5, 1), (30, 0)], max_tokens=60, logprobs=2)
        pages = []

        def note(rows):
            pages.append(mesh.decodes[1].kv.status().reserved)

        mesh.decodes[1].gate.before.append(note)
        assert told([await answer.run()]) == want
        assert commits([answer]).total() == 2
        assert len(pages) > 0
        assert max(pages) <= 1, "what is promised beyond eight tokens was given back"


async def test_an_answer_that_waits_for_a_place_moves_before_its_first_step():
    prompt, other = prompt_of(50), prompt_of(70)
    want = await unmoved(prompt, 12, {"transport": "loopback"})
    async with rig(decodes=2, max_batch=1, transport="loopback") as mesh:
        gate = mesh.decode.gate
        gate.hold()
        blocking = asyncio.ensure_future(mesh.ask(other, 10))
        await gate.step_begins()
        (answer,) = await moving(mesh, prompt, max_tokens=12, logprobs=2)
        running = asyncio.ensure_future(answer.run())
        while answer.sequence is None:
            await asyncio.sleep(0)
        await answer.move(1)
        sequence = answer.sequence
        while not sequence.stopping:
            await asyncio.sleep(0.001)
        gate.let_go()
        assert told([await running]) == want
        assert answer.frozen_at == [1]
        assert (await blocking).tokens == reference(other, 10)
