"""What a decode worker allows, and how many pages a reservation comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model.grammar import Grammars
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import ReserveRequest

GIB = 1 << 30


@dataclass(frozen=True)
class DecodeLimits:
    """What the worker checks a request against.

    Attributes:
        hidden_size: values of a hidden state.
        lease_idle_s: seconds after which a lease that nobody uses is forgotten.
        growth_tokens: tokens promised ahead of a sequence; 0 promises all it may generate, so that
            no sequence ever has to give pages up.
        max_waiting: reservations that may wait for room.
        park_bytes: host memory for the pages of sequences that gave theirs up.
        ageing_s: seconds of waiting that make up for one step of priority.
        max_migrations: answers that may be on their way to other workers at a time.
        grammars: compiles what structured output asks for; without it such requests are refused.
    """

    instance: str
    page_format: PageFormat
    vocab_size: int
    max_context: int
    hidden_size: int
    secret: bytes
    lease_idle_s: float
    growth_tokens: int = 0
    max_waiting: int = 1024
    park_bytes: int = GIB
    ageing_s: float = 10.0
    max_migrations: int = 2
    grammars: Grammars | None = None

    def ahead(self, room: int) -> int:
        """Tokens to promise for a sequence that may get ``room`` more."""
        return min(room, self.growth_tokens) if self.growth_tokens > 0 else room

    def pages(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return -(-tokens // self.page_format.page_size)


@dataclass(frozen=True)
class PageNeed:
    """Pages of a reservation.

    Attributes:
        prompt: of the prompt, the last one perhaps partial.
        shared: of the prompt, full: all answers read the same.
        first: promised to the first answer, the prompt included.
        further: promised to each answer after it, its copy of the partial prompt page included.
        most: that one answer alone can come to use.
    """

    prompt: int
    shared: int
    first: int
    further: int
    most: int

    def total(self, answers: int) -> int:
        """Promised to all answers."""
        return self.first + (answers - 1) * self.further


def page_need(limits: DecodeLimits, request: ReserveRequest) -> PageNeed:
    """Checks a reservation's numbers and counts its pages.

    Raises:
        InvalidRequest: the numbers make no sense, or exceed the context.
    """
    prompt = request.num_prompt_tokens
    if prompt < 1 or request.max_tokens < 1:
        raise InvalidRequest("a reservation needs at least one prompt and one output token")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; a reservation is for at least one answer")
    shared = prompt // limits.page_format.page_size
    if len(request.hashes) != shared:
        raise InvalidRequest(
            f"{len(request.hashes)} page hashes for a prompt of {shared} full pages"
        )
    if prompt + request.max_tokens > limits.max_context:
        raise InvalidRequest(
            f"{prompt} prompt tokens and max_tokens {request.max_tokens} "
            f"are more than the context of {limits.max_context} tokens"
        )
    first = limits.pages(prompt + limits.ahead(request.max_tokens))
    most = limits.pages(prompt + request.max_tokens)
    return PageNeed(limits.pages(prompt), shared, first, first - shared, most)
