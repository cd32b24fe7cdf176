"""From the sampling part of a client's message to parameters that workers take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.router.defaults import SamplingDefaults
from pdmesh.text.tokenizer import Tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.sampling import MAX_BAD_WORDS, SamplingParams

MAX_ANSWERS = 16
MAX_PRIORITY = 100
MAX_BAD_WORD_CHARACTERS = 256


@dataclass(frozen=True)
class SamplingParser:
    """Fills in what a client leaves out and refuses what cannot be.

    Args:
        default_max_tokens: where the context leaves that much.
        rng: draws the seeds of requests that bring none.
        defaults: of the checkpoint.
    """

    tokenizer: Tokenizer
    default_max_tokens: int
    rng: random.Random
    defaults: SamplingDefaults = SamplingDefaults()

    def parse(
        self, given: chat_pb2.Sampling, num_prompt_tokens: int, context: int
    ) -> SamplingParams:
        """The parameters of every answer, but for the grammar.

        Args:
            given: as the client sent it.
            num_prompt_tokens: less than ``context``.
            context: most tokens of prompt and answer together.

        Raises:
            InvalidRequest: with one sentence naming the field.
        """
        if given.HasField("prompt_logprobs"):
            raise InvalidRequest(
                "prompt_logprobs is not served: a prompt that is cached is not computed again"
            )
        rest = context - num_prompt_tokens
        defaults = self.defaults

        def of_checkpoint(name: str) -> float:
            value: float = getattr(given if given.HasField(name) else defaults, name)
            return value

        explicit = given.HasField("max_tokens")
        sampling = SamplingParams(
            max_tokens=given.max_tokens if explicit else min(self.default_max_tokens, rest),
            temperature=of_checkpoint("temperature"),
            top_p=of_checkpoint("top_p"),
            top_k=int(of_checkpoint("top_k")),
            seed=given.seed if given.HasField("seed") else self.rng.getrandbits(63),
            stop=tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
            ignore_eos=given.ignore_eos,
            logprobs=given.logprobs if given.HasField("logprobs") else None,
            min_p=of_checkpoint("min_p"),
            repetition_penalty=of_checkpoint("repetition_penalty"),
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            logit_bias=tuple(sorted(given.logit_bias.items())),
            min_tokens=given.min_tokens,
            bad_words=bad_words(self.tokenizer, given.bad_words),
        )
        sampling.validate(self.tokenizer.vocab_size)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}; "
                f"it must be between 0 and max_tokens, {sampling.max_tokens}"
            )
        if sampling.max_tokens > rest:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is "
                f"{sampling.max_tokens}; together they exceed the context of {context} tokens"
            )
        return sampling


def bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token id sequences to ban: each word as it is, and as it stands after a space.

    These are the spellings that the tokenizer itself makes; an answer could still spell a word in
    other pieces.

    Raises:
        InvalidRequest: too many words, or one that is empty or too long.
    """
    most = MAX_BAD_WORDS // 2
    if len(words) > most:
        raise InvalidRequest(f"bad_words has {len(words)} entries; at most {most} are allowed")
    banned: dict[tuple[int, ...], None] = {}
    for word in words:
        if not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS or not word.strip():
            raise InvalidRequest(
                f"one of bad_words has {len(word)} characters; 1 to {MAX_BAD_WORD_CHARACTERS}, "
                "not all of them spaces, are allowed"
            )
        for spelling in (word, " " + word.lstrip()):
            banned[tuple(tokenizer.encode(spelling))] = None
    return tuple(banned)


def answers_wanted(given: chat_pb2.Sampling) -> int:
    """``n``. Raises InvalidRequest."""
    n = given.n if given.HasField("n") else 1
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidRequest(f"n is {n}; it must be between 1 and {MAX_ANSWERS}")
    return int(n)


def priority_of(message: chat_pb2.ChatRequest) -> int:
    """``priority``. Raises InvalidRequest."""
    if abs(message.priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {message.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
        )
    return int(message.priority)
