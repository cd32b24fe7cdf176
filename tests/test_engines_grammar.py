"""Structured output through the engines: real grammars at both workers, MTP drafts, two answers.

The model is random, so that nothing but the grammar makes its text valid.
"""

import asyncio
import json
import re

import grpc
import pytest
from model_cases import tiny_model, tokens_of
from router_fakes import MODEL_PATH
from router_rig import whole_mesh
from worker_rig import PAGE, ScriptedDrafts, rig

from pdmesh.model.grammar import Grammars
from pdmesh.model.reference import generate_reference
from pdmesh.model.tree import TokenTree
from pdmesh.text.grammar import json_grammar, lark_grammar, regex_grammar
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.sampling import SamplingParams

TOKENIZER = load_tokenizer(MODEL_PATH)
VOCAB = TOKENIZER.vocab_size
EOS = TOKENIZER.ids.eos
MODEL = tiny_model(3, vocab_size=VOCAB, num_hidden_layers=2)
GRAMMARS = Grammars(MODEL_PATH, VOCAB)
OPTIONS = {"served": MODEL, "grammars": GRAMMARS, "drafts": 3, "branches": 2}

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        },
        "required": ["kind", "legs", "tags"],
        "additionalProperties": False,
    }
)
PATTERN = r"(ab|c[0-9]{1,3}){2,6}(xyz)?"
LARK = """
start: greeting " " NAME ("," " " NAME){1,3} "!"
greeting: "hello" | "good day"
NAME: /[A-Z][a-z]{0,8}/
"""
STUCK = """
start: "a" | "b" lost
lost: NEVER lost
NEVER: /c/ & /d/
"""
"""After "a" the answer is complete; after "b" nothing may follow, not even the end."""


def is_json(text):
    value = json.loads(text)
    assert set(value) == {"kind", "legs", "tags"}
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 99
    assert 2 <= len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


def is_pattern(text):
    assert re.fullmatch(PATTERN, text)


def is_lark(text):
    name = "[A-Z][a-z]{0,8}"
    assert re.fullmatch(rf"(hello|good day) {name}(, {name}){{1,3}}!", text)


KINDS = {
    "json_schema": (SCHEMA, json_grammar(SCHEMA), is_json),
    "regex": (PATTERN, regex_grammar(PATTERN), is_pattern),
    "grammar": (LARK, lark_grammar(LARK), is_lark),
}


def alone(prompt, sampling, index):
    """The answer as one process makes it, without the token that ends it."""
    tokens = generate_reference(
        MODEL,
        prompt,
        sampling.max_tokens,
        eos=EOS,
        sampling=sampling,
        index=index,
        grammar=GRAMMARS.compile(sampling.grammar),
    )
    return tokens[:-1] if tokens[-1] in EOS else tokens


def question(prompt, seed, **fields):
    sampling = {"n": 2, "seed": seed, "temperature": 1.0, "top_p": 1.0, "max_tokens": 120}
    return chat_pb2.ChatRequest(
        prompt_token_ids=prompt,
        response_format=chat_pb2.ResponseFormat(**fields),
        sampling=chat_pb2.Sampling(**sampling),
    )


async def asked(stub, message):
    """(tokens, text, finish) by index."""
    found = {i: ([], "", "") for i in range(message.sampling.n)}
    async for r in stub.StreamChat(message, timeout=60):
        tokens, text, finish = found[r.index]
        found[r.index] = ([*tokens, *r.token_ids], text + r.text, finish + r.finish_reason)
    return [found[i] for i in sorted(found)]


class KnownDrafts(ScriptedDrafts):
    """Drafts the true continuation of an answer, but for every fifth token; the random model's own
    drafts hardly ever obey a grammar."""

    def _scripted(self, s, tree):
        position = s.sampling.position
        ahead = self._answer(s)[position : position + min(3, s.most_drafts(PAGE))]
        ahead = [
            (token + 1) % VOCAB if place % 5 == 4 else token
            for place, token in enumerate(ahead, position)
        ]
        ahead = ahead[: s.sampling.allowed(ahead)]
        return TokenTree.chain((s.tokens[s.computed], *ahead))

    def _answer(self, s):
        for (prompt, index), answer in self.truth.items():
            if tuple(s.tokens[: len(prompt)]) == prompt and s.sampling.index == index:
                return answer
        return []


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("own", [True, False], ids=["own drafts", "known drafts"])
async def test_answers_obey_their_grammar_and_equal_the_reference_token_by_token(
    tmp_path, kind, own
):
    source, grammar, check = KINDS[kind]
    first = GRAMMARS.compile(grammar)
    prompts = [tuple(tokens_of(length, length, VOCAB)) for length in (5, PAGE, 90)]
    want = {}
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=120, temperature=1.0, seed=seed, grammar=grammar)
        want |= {(prompt, index): alone(prompt, sampling, index) for index in range(2)}
    drafts = {} if own else {"drafter": KnownDrafts, "truth": want}
    async with whole_mesh(tmp_path, **OPTIONS, **drafts) as (workers, stub):
        answers = await asyncio.gather(
            *(asked(stub, question(p, seed, **{kind: source})) for seed, p in enumerate(prompts))
        )
        if not own:
            worker = workers.decode.worker
            assert worker.accepted > worker.tokens_generated // 3
            assert worker.drafted > worker.accepted
    texts = set()
    for prompt, pair in zip(prompts, answers, strict=True):
        for index, (tokens, text, finish) in enumerate(pair):
            assert tokens == want[prompt, index]
            assert finish == "stop"
            assert text == TOKENIZER.decode(tokens)
            check(text)
            assert first.allowed(tokens[:1]) == 1, "the first token is prefill's"
            texts.add(text)
    assert len(texts) >= 4


# ---- a grammar that is stuck ------------------------------------------------------------------


def letter(text):
    (token,) = TOKENIZER.encode(text)
    return token


def biased(text, **fields):
    """Sampling that always chooses a letter of the grammar that may be stuck."""
    bias = ((letter(text), 50.0),)
    return SamplingParams(max_tokens=8, grammar=lark_grammar(STUCK), logit_bias=bias, **fields)


async def test_a_stuck_grammar_fails_its_own_request_as_the_clients_error(tmp_path):
    prompt = tokens_of(20, 1, VOCAB)
    stuck = question(prompt, 1, grammar=STUCK)
    stuck.sampling.logit_bias[letter("b")] = 50.0
    well = [question(prompt, seed, regex=PATTERN) for seed in range(3)]
    async with whole_mesh(tmp_path, max_attempts=3, **OPTIONS) as (workers, stub):
        results = await asyncio.gather(
            *(asked(stub, message) for message in (stuck, *well)), return_exceptions=True
        )
        error = results[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no text that matches it goes on from here" in error.details()
        assert workers.prefill.worker.tokens_computed <= 4 * len(prompt), "it is not tried again"
        for message, answer in zip(well, results[1:], strict=True):
            sampling = SamplingParams(
                max_tokens=120,
                temperature=1.0,
                seed=message.sampling.seed,
                grammar=KINDS["regex"][1],
            )
            assert [tokens for tokens, _, _ in answer] == [
                alone(prompt, sampling, index) for index in range(2)
            ]


async def test_a_grammar_that_is_stuck_in_a_prompts_step_is_the_clients_error_too():
    prompt = tokens_of(20, 1, VOCAB)
    async with rig(**OPTIONS) as mesh:
        sampling = biased("b")
        lease = await mesh.reserve(prompt)
        longer = [*prompt, letter("b")]
        other = await mesh.reserve(longer)
        with pytest.raises(InvalidRequest, match="goes on from here"):
            await mesh.compute(longer, other, sampling, output_offset=1)
        await mesh.release(other)
        first = await mesh.compute(prompt, lease, sampling)
        assert first.token_ids == (letter("b"),)
        with pytest.raises(InvalidRequest, match="goes on from here"):
            await mesh.read(prompt, lease, first, sampling)
        await mesh.release(lease)


def test_a_draft_after_which_the_grammar_is_stuck_is_no_draft():
    """Without drafts nobody would have looked there."""
    grammar = GRAMMARS.compile(lark_grammar(STUCK))
    assert grammar.allowed([letter("a")]) == 1
    assert grammar.allowed([letter("b")]) == 0
    assert grammar.copy().allowed([letter("a"), letter("b")]) == 1
    grammar.advance([letter("b")])
    with pytest.raises(InvalidRequest, match="goes on from here"):
        grammar.mask()
