"""What an answer has to look like, as a grammar that llguidance reads.

The functions check what can be checked at once: size, nesting, and that JSON is JSON. Whether the
grammar can be used is found by ``GrammarTrial``, which compiles it in a process of its own.
"""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher

from pdmesh.wire.errors import InvalidRequest

MAX_SOURCE = 32_000
"""Characters of a schema, a regular expression or a grammar."""
MAX_NESTING = 64
"""Arrays and objects inside one another in a schema; brackets inside one another elsewhere."""
_WHITESPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,32}"
"""Between parts of JSON: without a limit a model may write line breaks to its answer's end."""
_OPTIONS = "x-guidance"
"""The key under which llguidance takes options in a schema; a client's own stay."""
_MAX_REASON = 300
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")


def json_object_grammar() -> str:
    """Any JSON object."""
    return _json('{"type":"object"}')


def json_grammar(schema: str) -> str:
    """JSON that fits a JSON schema. Raises InvalidRequest: it is too large, or no JSON schema."""
    _check_source("json_schema", schema, "[{", "]}")
    try:
        value = json.loads(schema, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidRequest(f"response_format.json_schema is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise InvalidRequest("response_format.json_schema must be a JSON object")
    if isinstance(value, bool):
        return _json("{}") if value else _grammar("json_schema", schema)
    return _json(schema) if _OPTIONS not in value else _grammar("json_schema", schema)


def regex_grammar(pattern: str) -> str:
    """Text that matches the whole of a regular expression. Raises InvalidRequest: too large."""
    _check_source("regex", pattern, "(", ")")
    return str(LLMatcher.grammar_from_regex(pattern))


def lark_grammar(text: str) -> str:
    """Text of a grammar in llguidance's variant of Lark. Raises InvalidRequest: too large."""
    _check_source("grammar", text, "([{", ")]}")
    return _grammar("lark_grammar", json.dumps(text, ensure_ascii=False))


def unusable(error: str) -> InvalidRequest:
    """One sentence from what llguidance says of a grammar."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    first = lines[0] if lines else "no reason is given"
    # The reason of a wrong regular expression follows a picture of it.
    reason = next((line[7:] for line in lines if line.startswith("error: ")), None)
    if reason is not None:
        first = f"a regular expression in it is wrong: {reason}"
    elif first.startswith("NoExtension"):
        first = "no text fits it"
    elif found := _POSITION.match(first):
        first = f"line {found[1]}, column {found[2]}: {found[3]}"
    first = first.split("; following")[0][:_MAX_REASON]  # it lists every token of the model
    return InvalidRequest(f"response_format cannot be used: {first}")


def _json(schema: str) -> str:
    """The grammar of a JSON schema that is an object, with whitespace bounded. Its text stays as it
    is: to read and write numbers could change them."""
    options = json.dumps({_OPTIONS: {"whitespace_pattern": _WHITESPACE}})
    rest = schema.strip()[1:].lstrip()
    return _grammar("json_schema", f"{options[:-1]}{'' if rest == '}' else ', '}{rest}")


def _grammar(kind: str, value: str) -> str:
    return f'{{"grammars":[{{"{kind}":{value}}}]}}'


def _check_source(field: str, text: str, opening: str, closing: str) -> None:
    if not text.strip():
        raise InvalidRequest(f"response_format.{field} is empty")
    if len(text) > MAX_SOURCE:
        raise InvalidRequest(
            f"response_format.{field} has {len(text)} characters; at most {MAX_SOURCE} are allowed"
        )
    depth = deepest = 0
    for char in text:
        depth += (char in opening) - (char in closing)
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise InvalidRequest(
            f"response_format.{field} is nested {deepest} deep; at most {MAX_NESTING} is allowed"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
