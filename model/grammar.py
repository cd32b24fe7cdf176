"""Grammars that answers must follow, matched by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from pdmesh.model.choice import Mask
from pdmesh.wire.errors import ConfigError, InternalError, InvalidRequest

KEPT_GRAMMARS = 64
"""How many compiled grammars one model keeps."""

_REASON_LENGTH = 300


class Grammar:
    """A grammar and how far one answer has come in it. Made by ``Grammars.compile``.

    End-of-text tokens are part of it: each is allowed exactly where the text so far is complete,
    and nothing else is allowed after one of them, or where the text cannot go on.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._masks: dict[tuple[int, ...], Mask] = {}
        """By path, at the present place: ``allowed`` needs what ``mask`` is asked for next."""

    def copy(self) -> Grammar:
        """The same place in the same grammar; the two go on without each other."""
        return Grammar(self._matcher.deep_copy())

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but end-of-text."""
        return bool(self._matcher.is_stopped())

    def mask(self, path: Sequence[int] = ()) -> Mask:
        """What may follow ``path``: int32 words, bit ``t % 32`` of word ``t // 32`` for token t.

        Of a path that the grammar refuses, the part before the first refused token counts.

        Raises:
            InvalidRequest: the grammar is too complex to go on here, or nothing matches it.
        """
        known = self._masks.get(tuple(path))
        if known is not None:
            return known
        matcher = self._matcher.deep_copy() if path else self._matcher
        if path:
            matcher.try_consume_tokens(list(path))
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {_stuck(matcher)}")
        self._masks[tuple(path)] = bits
        return bits

    def allowed(self, path: Sequence[int]) -> int:
        """How many leading tokens of ``path`` may follow and can be followed by something.

        A token after which the grammar is stuck may be chosen and then ends the request with an
        error; as a draft that is never chosen it must not.
        """
        most = int(self._matcher.validate_tokens(list(path)))
        for length in range(1, most + 1):
            try:
                self.mask(path[:length])
            except InvalidRequest:
                return length - 1
        return most

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes tokens into the answer.

        Raises:
            InternalError: the grammar does not allow one of them; the place stays as it was.
        """
        ahead = self._matcher.deep_copy()
        taken = int(ahead.try_consume_tokens(list(tokens)))
        if taken < len(tokens):
            raise InternalError(
                f"token {tokens[taken]} of the answer is not one that its grammar allows"
            )
        self._matcher = ahead
        self._masks = {}


class Grammars:
    """The grammars of one model, compiled once each. Safe to share between threads."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        """
        Args:
            model_path: checkpoint directory; its tokenizer is read with the first grammar.
            vocab_size: how many logits the model gives; ids that the tokenizer lacks are never
                allowed.
        """
        self._path = model_path
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, grammar: str) -> Grammar:
        """The beginning of a grammar: the serialised form of llguidance, or its Lark dialect.

        Raises:
            InvalidRequest: the grammar is wrong or too large, or this model cannot follow any.
        """
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._load()
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.copy()
        fresh = _compile(tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = fresh
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return fresh.copy()

    def _load(self) -> llguidance.LLTokenizer:
        path = self._path / "tokenizer.json"
        eos = _end_tokens(self._path)
        if not path.is_file() or not eos:
            lack = "end-of-text token" if path.is_file() else "tokenizer.json"
            raise InvalidRequest(f"this model cannot follow a grammar: it comes without {lack}")
        try:
            return llguidance.LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=list(eos))
        except Exception as error:  # noqa: BLE001 - the library raises what its reader raises
            raise InvalidRequest(
                f"this model cannot follow a grammar: {_reason(str(error))}"
            ) from error


def _compile(tokenizer: llguidance.LLTokenizer, grammar: str) -> Grammar:
    try:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    except ValueError as error:
        raise InvalidRequest(f"the grammar is wrong: {_reason(str(error))}") from error
    if matcher.is_error():
        raise InvalidRequest(f"the grammar is wrong: {_reason(matcher.get_error())}")
    compiled = Grammar(matcher)
    compiled.mask()
    return compiled


def _stuck(matcher: llguidance.LLMatcher) -> str:
    why = _reason(matcher.get_error())
    return "no text that matches it goes on from here" if "NoExtension" in why else why


def _reason(text: str) -> str:
    """The library's message as part of a sentence: one line, without quotes of the source."""
    text = text.replace("<non-verbose/>", "")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    told = [line for line in lines if line.strip("^ ") and not line.split("|")[0].strip().isdigit()]
    return " ".join(told)[:_REASON_LENGTH] or "no reason is given"


def _end_tokens(directory: Path) -> tuple[int, ...]:
    """Every end-of-text id that the checkpoint's files name, without repetition."""
    ids: list[int] = []
    name = _read(directory / "tokenizer_config.json").get("eos_token")
    text = name.get("content") if isinstance(name, dict) else name
    for entry in _read(directory / "tokenizer.json").get("added_tokens") or []:
        if entry["content"] == text:
            ids.append(entry["id"])
    for file in ("generation_config.json", "config.json"):
        value = _read(directory / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(ids))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
