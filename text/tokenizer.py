"""A byte-level BPE tokenizer read from a checkpoint directory in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pdmesh.wire.errors import ConfigError


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, reversed.

    Source: the byte-to-unicode table of GPT-2 (Radford et al., 2019): printable Latin-1 bytes
    stand for themselves, the others follow from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the tokens that begin and end a text. ``eos`` may hold several."""

    bos: int | None
    eos: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back. Built by ``load_tokenizer``.

    ``encode`` never makes a special token: text that spells one stays text. Template code that
    means a special token uses ``special``.
    """

    plain: tokenizers.Tokenizer
    """The tokenizer without its added tokens."""
    special: Mapping[str, int]
    """Every added token (all that text must not be able to forge), by its string."""
    silent: frozenset[int]
    """Ids that are not part of the text they appear in."""
    ids: SpecialIds
    vocab_size: int
    """Token ids run from 0 to ``vocab_size`` - 1; the last ones may have no string."""
    _pieces: dict[int, bytes] = field(default_factory=dict, repr=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; no start token is added."""
        return list(self.plain.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to the text; empty for silent and unknown ids."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._lookup(token)
        return piece

    def _lookup(self, token: int) -> bytes:
        if token in self.silent:
            return b""
        name = self._names.get(token)
        if name is None:
            name = self.plain.id_to_token(token) if 0 <= token < 2**32 else None
        if name is None:
            return b""
        if all(c in _BYTES for c in name):
            return bytes(_BYTES[c] for c in name)
        return name.encode()

    @cached_property
    def _names(self) -> dict[int, str]:
        return {token: text for text, token in self.special.items()}

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text of ``ids`` at once; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(token) for token in ids).decode(errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens.

        The first call looks at every token; it also fills the table of ``token_bytes``.
        """
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))


def load_tokenizer(directory: Path, model: Path | None = None) -> Tokenizer:
    """Reads ``tokenizer.json`` and the special ids from a checkpoint directory.

    ``tokenizer_config.json`` names the start and end tokens; ``generation_config.json`` and
    ``config.json`` may add end tokens, and the latter gives the model's vocabulary size.

    Args:
        directory: of the tokenizer.
        model: of another ``config.json``, which gives the vocabulary size instead.

    Raises:
        ConfigError: a file is missing, unreadable, or not a byte-level tokenizer, or the model's
            vocabulary is smaller than the tokenizer's.
    """
    path = directory / "tokenizer.json"
    spec = read_json(path)
    if spec is None:
        raise ConfigError(f"{path} is missing; a checkpoint directory needs its tokenizer.json")
    added = spec.get("added_tokens") or []
    special = {entry["content"]: entry["id"] for entry in added}
    plain = _plain_tokenizer(path, spec)
    _check_no_forgery(path, plain, special)
    config = read_json(directory / "config.json") or {}
    known = max([plain.get_vocab_size(), *(token + 1 for token in special.values())])
    if model is not None and model != directory:
        size = (read_json(model / "config.json") or {}).get("vocab_size")
        if isinstance(size, int) and size < known:
            raise ConfigError(
                f"{model} has no tokenizer, and its vocab_size of {size} is less than the {known} "
                "tokens of the shipped one; give it a tokenizer.json, or a larger vocab_size"
            )
        config = {**config, "vocab_size": size}
    return Tokenizer(
        plain=plain,
        special=special,
        silent=frozenset(entry["id"] for entry in added if entry.get("special")),
        ids=_special_ids(directory, special, config),
        vocab_size=int(config.get("vocab_size") or known),
    )


def _plain_tokenizer(path: Path, spec: dict[str, Any]) -> tokenizers.Tokenizer:
    if "ByteLevel" not in json.dumps(spec.get("decoder")):
        raise ConfigError(f"{path} is not a byte-level BPE tokenizer; only those are served")
    bare = {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(bare))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error


def _check_no_forgery(path: Path, plain: tokenizers.Tokenizer, special: dict[str, int]) -> None:
    """Raises ConfigError if plain text can become one of the added tokens."""
    reserved = set(special.values())
    for text in special:
        if reserved & set(plain.encode(text, add_special_tokens=False).ids):
            raise ConfigError(f"{path}: plain text can spell the special token {text!r}")


def _special_ids(directory: Path, special: dict[str, int], config: dict[str, Any]) -> SpecialIds:
    names = read_json(directory / "tokenizer_config.json") or {}
    generation = read_json(directory / "generation_config.json") or {}

    def named(key: str) -> int | None:
        value = names.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        return special.get(text) if isinstance(text, str) else None

    eos = [token for token in (named("eos_token"),) if token is not None]
    for source in (generation, config):
        value = source.get("eos_token_id")
        eos += value if isinstance(value, list) else [value] if value is not None else []
    bos = named("bos_token")
    return SpecialIds(bos if bos is not None else config.get("bos_token_id"), _unique(eos))


def _unique(ids: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(token) for token in ids))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, or None where there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
