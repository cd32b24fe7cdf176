"""What is asked of a mesh under test: prompts, parameters and the places to move at. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

MAX_MOVES = 5
_TAIL_TOKENS = 24
"""Generated after the last place to move at, so that the move is over before the answer."""


@dataclass(frozen=True)
class Case:
    """One answer (or ``n`` of them), asked for twice: left alone, and moved about."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    points: tuple[int, ...]
    """Output tokens after which it is moved, ascending."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of ``Sampling`` of chat.proto, besides max_tokens."""
    json_schema: str = ""
    stop_from_answer: bool = False
    """Ends at a text that the answer left alone holds at about two thirds of it."""

    @property
    def n(self) -> int:
        return int(self.sampling.get("n", 1))

    @property
    def plainly_greedy(self) -> bool:
        """Whether the likeliest token is always the one, with nothing that shifts likelihoods."""
        shifts = {"frequency_penalty", "presence_penalty", "repetition_penalty"}
        allowed = not self.json_schema and not shifts & self.sampling.keys()
        return allowed and self.sampling.get("temperature") == 0.0


@dataclass(frozen=True)
class Room:
    """What the mesh can take.

    Attributes:
        page_size: tokens a page.
        vocab_size: token ids below it are valid.
        max_context: of prompt and answer together, tokens.
    """

    page_size: int
    vocab_size: int
    max_context: int


_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
_FEATURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("seeded", {"temperature": 1.0, "top_p": 0.95, "top_k": 40}),
    ("logprobs", {"temperature": 0.7, "logprobs": 3}),
    ("penalties", {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3}),
    ("repetition", {"temperature": 0.0, "repetition_penalty": 1.2}),
    ("n=2", {"temperature": 1.0, "n": 2}),
    ("stop string", {"temperature": 0.0}),
    ("json", {"temperature": 0.7}),
)


def cases(room: Room, seed: int) -> Iterator[Case]:
    """Cases without end, the same for the same arguments.

    The lengths of the prompts lie around page boundaries; the places to move at are the first
    token, those around the next page boundary, and random ones, at most ``MAX_MOVES`` together.
    """
    rng = random.Random(seed)
    longest = max(2, min(3 * room.page_size, room.max_context // 2))
    for number in count():
        name, sampling = _FEATURES[number % len(_FEATURES)]
        length = _length(rng, room.page_size, longest)
        prompt = tuple(rng.randrange(3, room.vocab_size) for _ in range(length))
        points = _points(rng, length, room)
        sampling = {"seed": rng.getrandbits(32), "ignore_eos": name != "json", **sampling}
        yield Case(
            name=f"{number}: {name}, prompt {length}, moved at {', '.join(map(str, points))}",
            prompt=prompt,
            max_tokens=min(points[-1] + _TAIL_TOKENS, room.max_context - length),
            points=points,
            sampling=sampling,
            json_schema=_SCHEMA if name == "json" else "",
            stop_from_answer=name == "stop string",
        )


def _length(rng: random.Random, page_size: int, longest: int) -> int:
    pages = rng.randrange(0, 3)
    near = pages * page_size + rng.choice((-1, 0, 1, rng.randrange(page_size)))
    return min(max(2, near), longest)


def _points(rng: random.Random, length: int, room: Room) -> tuple[int, ...]:
    boundary = -length % room.page_size or room.page_size
    last = max(1, min(boundary + room.page_size // 2, room.max_context - length - 2))
    found = {1, boundary - 1, boundary, boundary + 1, *(rng.randint(1, last) for _ in range(3))}
    usable = sorted(point for point in found if 1 <= point <= last)
    chosen = rng.sample(usable, min(len(usable), rng.randint(1, MAX_MOVES)))
    return tuple(sorted(chosen))
