"""From a client's message to a request that can be served, or one sentence why it cannot."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from msgspec import structs

from pdmesh.router.sampling import SamplingParser, answers_wanted, priority_of
from pdmesh.text.grammar import json_grammar, json_object_grammar, lark_grammar, regex_grammar
from pdmesh.text.grammar_trial import GrammarTrial
from pdmesh.text.template import ChatTemplate
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InvalidRequest, UnknownModel
from pdmesh.wire.ids import new_request_id
from pdmesh.wire.sampling import MAX_GRAMMAR_LENGTH, SamplingParams, check_token_ids

M = TypeVar("M", bound=Message)

ROLES = ("system", "user", "assistant")
MAX_LABEL = 128
"""Characters of a request id or a tenant."""
_LONG_TEXT = 16_384
"""Characters from which a text is tokenised beside the event loop."""
_ID = re.compile(r"[A-Za-z0-9._:/@-]+")


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request. ``received`` and ``deadline`` are times of the router's clock."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    received: float
    deadline: float
    n: int = 1
    """Answers wanted."""
    priority: int = 0


def parse_message(data: bytes, kind: type[M]) -> M:
    """The protobuf message in ``data``.

    Raises:
        InvalidRequest: the bytes are something else, or a string in them is not UTF-8.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            f"the request is not a {kind.DESCRIPTOR.name} message, or holds text that is not UTF-8"
        ) from error
    return message


def request_id_of(message: chat_pb2.ChatRequest) -> str:
    """The client's id for a request, or a new one.

    Raises:
        InvalidRequest: the id is too long or holds characters that do not belong in an id.
    """
    if not message.request_id:
        return new_request_id()
    if len(message.request_id) > MAX_LABEL or not _ID.fullmatch(message.request_id):
        raise InvalidRequest(
            f"request_id must be 1 to {MAX_LABEL} letters, digits or any of . _ : / @ -"
        )
    return str(message.request_id)


@dataclass(frozen=True)
class RequestParser:
    """Checks and tokenises requests for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    model_name: str
    sampling: SamplingParser
    grammars: GrammarTrial

    async def parse(
        self,
        request_id: str,
        message: chat_pb2.ChatRequest,
        context: int,
        received: float,
        deadline: float,
    ) -> GenerateRequest:
        """The request that a message asks for.

        Args:
            request_id: see ``request_id_of``.
            message: as the client sent it.
            context: most tokens of prompt and answer together.
            received: time of the router's clock.
            deadline: time of the router's clock.

        Raises:
            InvalidRequest: with one sentence naming what is wrong.
        """
        if message.model not in ("", self.model_name):
            raise UnknownModel(
                f"model {message.model[:MAX_LABEL]!r} is not served here; "
                f"the only one is {self.model_name!r}"
            )
        n, priority = answers_wanted(message.sampling), priority_of(message)
        if len(message.tenant) > MAX_LABEL:
            raise InvalidRequest(f"tenant is longer than {MAX_LABEL} characters")
        if message.messages and message.prompt_token_ids:
            raise InvalidRequest("give either messages or prompt_token_ids, not both")
        if message.prompt_token_ids:
            ids = message.prompt_token_ids
            _check_prompt_length(len(ids), context)
            check_token_ids(ids, self.tokenizer.vocab_size, "prompt_token_ids")
            tokens = tuple(ids)
        else:
            tokens = await self._tokenise(message.messages, context)
            _check_prompt_length(len(tokens), context)
        sampling = self.sampling.parse(message.sampling, len(tokens), context)
        return GenerateRequest(
            request_id=request_id,
            token_ids=tokens,
            sampling=structs.replace(sampling, grammar=await self._grammar(message)),
            tenant=message.tenant,
            received=received,
            deadline=deadline,
            n=n,
            priority=priority,
        )

    async def _grammar(self, message: chat_pb2.ChatRequest) -> str:
        if not message.HasField("response_format"):
            return ""
        grammar = _builder(message.response_format)()
        if len(grammar) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"response_format has {len(grammar)} characters with its escapes; "
                f"at most {MAX_GRAMMAR_LENGTH} are allowed"
            )
        await self.grammars.check(grammar)
        return grammar

    async def _tokenise(
        self, messages: Sequence[chat_pb2.Message], context: int
    ) -> tuple[int, ...]:
        if len(messages) >= context:
            raise InvalidRequest(
                f"the request has {len(messages)} messages; "
                f"the context of {context} tokens cannot hold them"
            )
        check_messages(messages)
        # A character is at least one byte, so this many tokens are certain before tokenising.
        # A template may drop parts of earlier answers; those do not count.
        certain = sum(len(m.content) for m in messages if m.role != "assistant")
        _check_prompt_length(-(-certain // self.tokenizer.longest_token), context, "at least ")
        size = sum(len(m.content) for m in messages)
        turns = [{"role": m.role, "content": m.content} for m in messages]
        if size < _LONG_TEXT and len(turns) < 1000:
            return tuple(self.template.encode(turns))
        return tuple(await asyncio.to_thread(self.template.encode, turns))


def _builder(given: chat_pb2.ResponseFormat) -> Callable[[], str]:
    kind = given.WhichOneof("kind")
    if kind == "json_schema":
        return partial(json_grammar, given.json_schema)
    if kind == "regex":
        return partial(regex_grammar, given.regex)
    if kind == "grammar":
        return partial(lark_grammar, given.grammar)
    if kind == "json_object" and given.json_object:
        return json_object_grammar
    raise InvalidRequest(
        "response_format is empty; give json_object true, a json_schema, a regex or a grammar"
    )


def check_messages(messages: Sequence[chat_pb2.Message]) -> None:
    """Raises InvalidRequest unless the messages are a conversation that waits for an answer."""
    if not messages:
        raise InvalidRequest("the request has neither messages nor prompt_token_ids")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{i}] has role {message.role[:MAX_LABEL]!r}; "
                f"the roles are {', '.join(ROLES)}"
            )
        if not message.content:
            raise InvalidRequest(f"messages[{i}] has no content")
    if messages[-1].role != "user":
        raise InvalidRequest(
            f"the last message is from {messages[-1].role!r}; it must be from 'user'"
        )


def _check_prompt_length(length: int, context: int, how: str = "") -> None:
    if length >= context:
        raise InvalidRequest(
            f"the prompt has {how}{length} tokens; "
            f"the context of {context} tokens has to hold it and the answer"
        )
