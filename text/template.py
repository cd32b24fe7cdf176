"""Chat templates: a conversation as token ids, with special tokens that only the template makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdmesh.text.tokenizer import Tokenizer, read_json
from pdmesh.wire.errors import ConfigError, InvalidRequest

_MARK = "\ue000"
"""Put before a special string (or itself) in a message, so that it is read as plain text."""


class ChatTemplate:
    """Renders messages with a checkpoint's Jinja template and encodes the result.

    A message may spell a special token, such as the end-of-turn string: it is encoded as the
    plain text it is, so no message can open a turn of another role.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is broken: {error}") from error
        self._tokenizer = tokenizer
        self._constants = {"bos_token": bos, "eos_token": eos}
        names = sorted(tokenizer.special, key=len, reverse=True)
        special = "|".join(re.escape(name) for name in names) or "(?!)"
        self._to_mark = re.compile(f"{_MARK}|{special}")
        self._pieces = re.compile(f"{_MARK}({_MARK}|{special})|({special})")

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Args:
            messages: each with ``role`` and ``content``.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        marked = [
            {"role": message["role"], "content": self._mark(message["content"])}
            for message in messages
        ]
        try:
            text = self._template.render(
                messages=marked, add_generation_prompt=True, **self._constants
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        return self._encode_marked(text)

    def _mark(self, content: str) -> str:
        return self._to_mark.sub(lambda found: _MARK + found[0], content)

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        plain: list[str] = []
        position = 0
        for found in self._pieces.finditer(text):
            plain.append(text[position : found.start()])
            position = found.end()
            if found[1] is not None:
                plain.append(found[1])
                continue
            ids += self._tokenizer.encode("".join(plain))
            ids.append(self._tokenizer.special[found[2]])
            plain = []
        plain.append(text[position:])
        return ids + self._tokenizer.encode("".join(plain))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a checkpoint: ``chat_template.jinja`` or ``tokenizer_config.json``'s.

    Raises:
        ConfigError: there is none, or it is not valid Jinja.
    """
    names = read_json(directory / "tokenizer_config.json") or {}
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else names.get("chat_template")
    if isinstance(source, list):
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(f"{directory} has no chat template (chat_template.jinja)")

    def name(key: str) -> str:
        value = names.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else ""

    return ChatTemplate(source, tokenizer, name("bos_token"), name("eos_token"))
