"""Grammars of answers: what can be one, what cannot, and that a bad one never stops the others."""

import asyncio
import json
from pathlib import Path

import llguidance
import pytest

from pdmesh.text import grammar_trial
from pdmesh.text.grammar import (
    MAX_NESTING,
    MAX_SOURCE,
    json_grammar,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
)
from pdmesh.text.grammar_trial import GrammarTrial
from pdmesh.wire.errors import InvalidRequest

PATIENCE = 60.0
MODEL_PATH = Path(__file__).resolve().parent.parent / "model" / "tiny"
TOKENIZER = llguidance.LLTokenizer(str(MODEL_PATH / "tokenizer.json"))
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
NEVER_ENDS = "start: A\nA: " + " & ".join(f"/.*x{{{i}}}.*/" for i in range(1, 40))
"""An intersection of many automata, which grows as their product."""


def matches(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_object_grammar(), ['{"a": [1]}', "{}"], ["[]", "{", "text"]),
        (json_grammar(SCHEMA), ['{"a": 7}'], ["{}", '{"a": "x"}']),
        (json_grammar("true"), ["[]", '"x"'], ["x"]),
        (json_grammar('{"enum": ["한 / \\n"]}'), ['"한 / \\n"'], ['"x"']),
        (regex_grammar("a/b+"), ["a/b", "a/bbb"], ["a/", "xa/b", "a/bx"]),
        (regex_grammar('"\\d{2}\n\\/"'), ['"42\n/"'], ['"4"']),
        (lark_grammar('start: "hi" name?\nname: " " /[a-z]+/'), ["hi", "hi you"], ["hi ", "you"]),
    ],
)
def test_a_grammar_takes_what_it_says_and_nothing_else(grammar, good, bad):
    assert all(matches(grammar, text) for text in good)
    assert not any(matches(grammar, text) for text in bad)


NESTED = '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}'


@pytest.mark.parametrize(
    "grammar",
    [
        *(json_object_grammar(), json_grammar('{"type": "object"}'), json_grammar("true")),
        *(json_grammar("{}"), json_grammar(" {\n} "), json_grammar(NESTED)),
    ],
)
def test_json_has_the_whitespace_that_people_write_and_no_endless_one(grammar):
    for text in ('{"a":[1]}', '{\n    "a": [\n\t\t1\n    ]\n}', '{\r\n  "a" : 1 ,\r\n "b" : 2}'):
        assert matches(grammar, text), text
    for text in ('{\n\n"a": 1}', '{"a":' + " " * 33 + "1}", "{\n" + " " * 33 + "}"):
        assert not matches(grammar, text), text


def test_a_schema_keeps_the_options_and_the_numbers_that_it_came_with():
    own = json_grammar('{"x-guidance": {"whitespace_flexible": true}, "type": "object"}')
    assert matches(own, '{\n\n\n"a": 1}')
    assert "1.00e2" in json_grammar('{"const": 1.00e2}')
    assert not matches(json_grammar("true"), "{\n\n}")
    assert "false" in json_grammar("false")


@pytest.mark.parametrize(
    ("make", "source", "sentence"),
    [
        (json_grammar, "", "response_format.json_schema is empty"),
        (json_grammar, "{", "response_format.json_schema is not JSON: "),
        (json_grammar, '{"const": NaN}', "response_format.json_schema is not JSON: NaN"),
        (json_grammar, "[1]", "response_format.json_schema must be a JSON object"),
        (json_grammar, '{"items":' * 65 + "{}" + "}" * 65, "is nested 66 deep; at most 64 is"),
        (json_grammar, "[" * 20_000, "is nested 20000 deep"),
        (json_grammar, " " * MAX_SOURCE + "{}", "has 32002 characters; at most 32000 are allowed"),
        (regex_grammar, " ", "response_format.regex is empty"),
        (regex_grammar, "(" * 100 + ")" * 100, "response_format.regex is nested 100 deep"),
        (lark_grammar, "x" * (MAX_SOURCE + 1), "response_format.grammar has 32001 characters"),
        (lark_grammar, "start: " + "(" * 65, f"65 deep; at most {MAX_NESTING} is allowed"),
    ],
)
def test_what_cannot_be_a_grammar_is_one_sentence(make, source, sentence):
    with pytest.raises(InvalidRequest) as raised:
        make(source)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (json_grammar('{"type": "objec"}'), "Invalid type: objec"),
        (json_grammar('{"$ref": "#/nowhere"}'), "Pointer '/nowhere' does not exist"),
        (json_grammar('{"$ref": "file:///etc/passwd"}'), "Default retriever does not fetch"),
        (json_grammar('{"not": {}}'), 'Unimplemented keys: ["not"]'),
        (json_grammar('{"$ref": "#"}'), "no text fits it"),
        (json_grammar("false"), "Unsatisfiable schema"),
        (regex_grammar("("), "a regular expression in it is wrong: unclosed group"),
        (regex_grammar("(?=a)"), "look-around, including look-ahead and look-behind, is not"),
        (lark_grammar('start: "a" b'), 'line 1, column 8: unknown name: "b"'),
        (lark_grammar('{"grammars": []}'), "line 1"),
        (lark_grammar("start: <|nothing|>"), 'unknown special token: "<|nothing|>"'),
    ],
)
async def test_an_unusable_grammar_is_one_sentence_with_its_reason(trial, grammar, sentence):
    with pytest.raises(InvalidRequest) as raised:
        await trial.check(grammar)
    assert str(raised.value).startswith("response_format cannot be used: ")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    await trial.check(json_object_grammar())


@pytest.fixture
async def trial():
    trial = GrammarTrial(MODEL_PATH, limit_s=PATIENCE)
    yield trial
    await trial.close()


async def test_a_grammar_that_never_ends_is_stopped_and_the_next_one_is_fine():
    trial = GrammarTrial(MODEL_PATH, limit_s=1.0)
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequest, match="it takes more than 1 s to compile"):
            await trial.check(lark_grammar(NEVER_ENDS))
    trial = GrammarTrial(MODEL_PATH, limit_s=PATIENCE)
    await trial.check(regex_grammar("a+"))
    await trial.close()


async def test_the_time_in_which_the_child_starts_is_not_the_grammars(monkeypatch):
    trial = GrammarTrial(MODEL_PATH, limit_s=20.0)
    loop, start, late = asyncio.get_running_loop(), asyncio.create_subprocess_exec, [0.0]
    now = loop.time

    async def slowly(*command, **options):
        child = await start(*command, **options)
        late[0] = 30.0
        return child

    monkeypatch.setattr(loop, "time", lambda: now() + late[0])
    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    await trial.check(regex_grammar("a+"))
    assert late == [30.0]
    await trial.close()


async def test_a_compiler_that_does_not_start_is_one_sentence_and_is_started_again(
    trial, monkeypatch
):
    monkeypatch.setattr(grammar_trial, "START_S", 0.0)
    with pytest.raises(InvalidRequest, match="its compiler does not start within 0 s"):
        await trial.check(regex_grammar("a+"))
    monkeypatch.undo()
    await trial.check(regex_grammar("a+"))


async def test_the_event_loop_runs_on_while_a_grammar_is_tried():
    trial = GrammarTrial(MODEL_PATH, limit_s=0.5)
    task = asyncio.create_task(trial.check(lark_grammar(NEVER_ENDS)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 1, "a loop that stood still turns once"
    with pytest.raises(InvalidRequest):
        await task


async def test_a_check_that_is_cancelled_or_whose_child_dies_leaves_a_working_trial(trial):
    check = asyncio.create_task(trial.check(lark_grammar(NEVER_ENDS)))
    await asyncio.sleep(0.3)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    await trial.check(regex_grammar("a+"))
    trial._child.kill()
    with pytest.raises(InvalidRequest, match="its compiler ended"):
        await trial.check(regex_grammar("b+"))
    await trial.check(regex_grammar("b+"))
    assert trial._child.returncode is None


async def test_many_checks_at_once_are_each_answered(trial):
    checks = [trial.check(regex_grammar(f"a{{{i}}}" if i % 2 else "(")) for i in range(20)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert [isinstance(result, InvalidRequest) for result in results] == [True, False] * 10
