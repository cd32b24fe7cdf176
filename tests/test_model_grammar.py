"""Grammars: what a mask lets through always ends in a text that matches."""

import json
import random
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

import pdmesh.model.tiny
from pdmesh.model import grammar as grammar_module
from pdmesh.model.grammar import Grammars
from pdmesh.model.sampler import SamplingState, sample
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.errors import InternalError, InvalidRequest
from pdmesh.wire.sampling import SamplingParams

TINY = Path(str(pdmesh.model.tiny.__path__[0]))
VOCAB = 4096
WIDER = 4200
EOS = 1

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "legs", "tags"],
    "additionalProperties": False,
}
PATTERN = r"(ab|c[0-9]{1,3})+(xyz)?"
LARK = """
start: greeting " " NAME "!"
greeting: "hello" | "good day"
NAME: /[A-Z][a-z]{0,8}/
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TINY, WIDER)


def json_text():
    return LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))


def regex_text(pattern=PATTERN):
    return LLMatcher.grammar_from_regex(pattern)


def ids_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammar, seed, limit=400):
    """Tokens by random choices under the mask, up to an end that the grammar allows."""
    choose = random.Random(seed)
    tokens = []
    while not grammar.ended and len(tokens) < limit:
        token = choose.choice(ids_of(grammar.mask()))
        if token == EOS:
            break
        grammar.advance([token])
        tokens.append(token)
    assert len(tokens) < limit
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_under_a_schema_are_json_of_that_schema(grammars, tokenizer, seed):
    value = json.loads(tokenizer.decode(walk(grammars.compile(json_text()), seed)))
    assert set(value) == {"name", "kind", "legs", "tags"}
    assert len(value["name"]) <= 12
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 1000
    assert len(value["tags"]) <= 3


@pytest.mark.parametrize("seed", range(25))
def test_random_tokens_under_a_regex_match_it_as_a_whole(grammars, tokenizer, seed):
    text = tokenizer.decode(walk(grammars.compile(regex_text()), seed))
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_under_a_lark_grammar_are_of_its_language(grammars, tokenizer, seed):
    for text in (LARK, LLMatcher.grammar_from_lark(LARK)):
        answer = tokenizer.decode(walk(grammars.compile(text), seed))
        assert re.fullmatch(r"(hello|good day) [A-Z][a-z]{0,8}!", answer)


def test_the_mask_lets_through_exactly_the_tokens_that_can_begin_a_match(grammars, tokenizer):
    allowed = {t for t in range(VOCAB) if re.fullmatch(rb"[0-9]{1,3}", tokenizer.token_bytes(t))}
    assert set(ids_of(grammars.compile(regex_text("[0-9]{1,3}")).mask())) == allowed


def test_end_of_text_may_follow_exactly_where_the_text_is_complete(grammars, tokenizer):
    pattern = "a(bc)*"
    for text in ("", "a", "ab", "abc", "abcb", "abcbc"):
        path = [t for c in text for t in tokenizer.encode(c)]
        may_end = EOS in ids_of(grammars.compile(regex_text(pattern)).mask(path))
        assert may_end == bool(re.fullmatch(pattern, text)), text


def test_nothing_but_end_of_text_follows_a_text_that_cannot_go_on(grammars, tokenizer):
    matcher = grammars.compile(regex_text("abc"))
    assert not matcher.ended
    matcher.advance(tokenizer.encode("abc"))
    assert matcher.ended
    assert ids_of(matcher.mask()) == [EOS]


def test_after_end_of_text_only_end_of_text_is_left(grammars, tokenizer):
    matcher = grammars.compile(regex_text("a+"))
    path = [*tokenizer.encode("a"), EOS]
    assert ids_of(matcher.mask(path)) == [EOS]
    assert matcher.allowed([*path, *path]) == 2
    matcher.advance(path)
    assert matcher.ended


def test_every_end_token_of_the_checkpoint_counts(tmp_path, tokenizer):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    matcher = Grammars(tmp_path, VOCAB).compile(regex_text("abc"))
    assert not {1, 3, 4} & set(ids_of(matcher.mask()))
    assert ids_of(matcher.mask(tokenizer.encode("abc"))) == [1, 3, 4]


def test_ids_that_the_tokenizer_lacks_and_control_tokens_are_never_allowed(grammars):
    matcher = grammars.compile(regex_text("(.|\n)+"))
    ids = ids_of(matcher.mask())
    assert len(ids) > 3000
    assert max(ids) < VOCAB
    assert not {0, 1, 2, 3, 4} & set(ids)
    assert max(ids_of(matcher.mask(ids[:5]))) < VOCAB


def test_masks_of_paths_copies_and_refused_drafts_leave_the_matcher_as_it_was(grammars):
    matcher = grammars.compile(json_text())
    path = walk(grammars.compile(json_text()), 5)
    for n in range(0, len(path), 3):
        before = matcher.mask().tolist()
        draft = path[n : n + 6]
        matcher.mask(draft)
        matcher.mask([*draft[:2], EOS, 0])
        assert matcher.allowed([*draft, 0]) == len(draft)
        assert matcher.allowed([0, *draft]) == 0
        other = matcher.copy()
        other.advance(draft)
        with pytest.raises(InternalError, match="token 0 of the answer"):
            matcher.advance([*draft[:1], 0])
        assert matcher.mask().tolist() == before
        assert other.mask().tolist() == matcher.mask(draft).tolist()
        matcher.advance(path[n : n + 3])


def test_the_same_text_is_compiled_once_and_gives_matchers_of_their_own(monkeypatch, tokenizer):
    compiled = []
    original = grammar_module._compile
    monkeypatch.setattr(grammar_module, "_compile", lambda *a: compiled.append(a) or original(*a))
    monkeypatch.setattr(grammar_module, "KEPT_GRAMMARS", 2)
    grammars = Grammars(TINY, VOCAB)
    one, two = grammars.compile(regex_text("ab")), grammars.compile(regex_text("ab"))
    one.advance(tokenizer.encode("ab"))
    assert one.ended
    assert not two.ended
    assert len(compiled) == 1
    for pattern in ("x", "ab", "y", "ab", "x"):
        grammars.compile(regex_text(pattern))
    assert [text for _, text in compiled] == [regex_text(p) for p in ("ab", "x", "y", "x")]


def test_threads_may_compile_and_follow_at_the_same_time(grammars):
    errors = []

    def work(seed):
        try:
            for i in range(3):
                walk(grammars.compile(json_text()), seed * 10 + i)
                grammars.compile(regex_text(f"a{{{seed},{seed + i + 1}}}"))
        except BaseException as error:  # noqa: BLE001 - the assertion below shows it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: missing", "unknown name"),
        ("no grammar at all", "Expected token"),
        ("", "Empty grammar"),
        ('{"grammars": ', "EOF while parsing"),
        (LLMatcher.grammar_from_regex("((("), "unclosed group"),
        (LLMatcher.grammar_from_json_schema({"type": "nothing"}), "Invalid type"),
        (LLMatcher.grammar_from_json_schema({"enum": []}), "Unsatisfiable"),
        ("start: x\nx: x", "no text that matches"),
        ("start: " + "(" * 3000, ""),
    ],
)
def test_a_wrong_grammar_is_one_sentence(grammars, text, reason):
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(text)
    message = str(caught.value)
    assert re.match(r"the grammar (is wrong|cannot be followed): .", message)
    assert reason in message
    assert "\n" not in message
    assert "<" not in message
    assert len(message) < 400


def test_a_model_without_tokenizer_says_so(tmp_path):
    with pytest.raises(InvalidRequest, match=r"without tokenizer\.json"):
        Grammars(tmp_path, VOCAB).compile(LARK)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match="without end-of-text token"):
        Grammars(tmp_path, VOCAB).compile(LARK)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {}}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(InvalidRequest, match="cannot follow a grammar: "):
        Grammars(tmp_path, VOCAB).compile(LARK)


def constrained(grammars, text, **params):
    params = SamplingParams(grammar=text, **params)
    return SamplingState(params, [5, 6], eos=(EOS,), grammar=grammars.compile(text))


def answer(sequence, seed):
    """Tokens of an answer to random logits that would like end-of-text best."""
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    while not sequence.ended and len(tokens) < 300:
        logits = torch.randn(1, WIDER, generator=generator)
        logits[0, EOS] = 5.0
        logits[0, VOCAB:] = 9.0
        token = sample(logits, [sequence.choice()])[0][0]
        if token in sequence.stop_tokens:
            break
        sequence.advance([token])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_answers_of_the_sampler_follow_their_grammar(grammars, tokenizer, seed):
    kinds = ({}, {"temperature": 1.0, "seed": seed}, {"temperature": 2.0, "top_p": 0.5})
    for params in kinds:
        state = constrained(grammars, json_text(), repetition_penalty=1.1, **params)
        assert set(json.loads(tokenizer.decode(answer(state, seed)))) == set(SCHEMA["properties"])


def test_the_grammar_ends_an_answer_before_min_tokens_and_in_spite_of_ignore_eos(grammars):
    state = constrained(grammars, regex_text("abc"), min_tokens=50, ignore_eos=True)
    assert state.stop_tokens == {EOS}
    tokens = answer(state, 0)
    assert 1 <= len(tokens) <= 3
    assert state.ended
    assert sample(torch.randn(1, WIDER), [state.choice()])[0] == [EOS]


def test_min_tokens_keeps_an_answer_open_while_its_grammar_can_go_on(grammars):
    assert len(answer(constrained(grammars, regex_text("a*"), min_tokens=20), 0)) >= 20
    assert answer(constrained(grammars, regex_text("a*")), 0) == []


def test_a_draft_is_allowed_up_to_the_first_token_that_a_rule_forbids(grammars, tokenizer):
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    text = regex_text("(a|b)+")
    assert constrained(grammars, text).allowed([a, b, a, 0]) == 3
    assert constrained(grammars, text, bad_words=((b, a),)).allowed([a, b, a, 0]) == 2
    assert constrained(grammars, text, min_tokens=2).allowed([a, EOS]) == 1
    assert constrained(grammars, text, min_tokens=1).allowed([a, EOS, a]) == 2


def test_states_of_one_compiled_grammar_go_on_without_each_other(grammars, tokenizer):
    compiled = grammars.compile(regex_text("ab"))
    params = SamplingParams(grammar=regex_text("ab"))
    first, second = (SamplingState(params, [], eos=(EOS,), grammar=compiled) for _ in range(2))
    first.advance(tokenizer.encode("ab"))
    assert (first.ended, second.ended, compiled.ended) == (True, False, False)


def test_an_answer_that_breaks_its_grammar_cannot_be_taken_up(grammars):
    compiled = grammars.compile(regex_text("ab"))
    with pytest.raises(InternalError, match="token 9 of the answer"):
        SamplingState(SamplingParams(), [], grammar=compiled, output=[9])
