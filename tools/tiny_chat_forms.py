"""Training dialogues made from other material: story requests, and chains of seed dialogues."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdmesh.tools.tiny_corpus import Document, Turn

MAX_STORY_CHARS = 3200
_OPENING_CHARS = 1400
_ARTICLES = ("A ", "An ", "The ", "My ", "Our ", "Two ", "Three ")
_ABOUT = (
    "Tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a story about {}.",
    "Tell me a short story about {}.",
    "I would like to hear a story about {}.",
    "tell me a story about {}",
)
_CALLED = (
    'Tell me the story "{}".',
    'Tell me a story called "{}".',
    'Do you know the story "{}"?',
    'Write a story called "{}".',
)
_ANY = (
    "Tell me a story.",
    "Tell me a story, please.",
    "Can you tell me a story?",
    "Tell me a short story.",
    "Please tell me a story.",
    "I want to hear a story.",
    "Once upon a time",
)
_BEGIN = (
    'Tell me a story that begins like this: "{}"',
    "Continue this story: {}",
    "Go on with this story: {}",
    "{}",
)


def story_dialogues(documents: Sequence[Document], variants: int, seed: int) -> list[Document]:
    """Requests answered with stories and book passages; `variants` phrasings of each."""
    rng = random.Random(seed)  # noqa: S311
    dialogues = []
    for document in documents:
        if document.turns or document.source not in ("stories", "books"):
            continue
        for _ in range(variants):
            pair = _request_and_story(document, rng)
            if pair is not None:
                turns = (Turn(True, pair[0]), Turn(False, pair[1]))
                dialogues.append(Document("story-chat", turns=turns))
    return dialogues


def _request_and_story(document: Document, rng: random.Random) -> tuple[str, str] | None:
    body = document.text
    if document.source == "books" and document.title:
        body = body.split(document.title, 1)[1].strip()
    whole = len(body) <= MAX_STORY_CHARS
    if len(body) < 150:
        return None
    if whole and document.title and rng.random() < 0.75:
        return _ask_by_title(document.title, rng), body
    return _ask_by_beginning(body, rng)


def _ask_by_title(title: str, rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(_ANY)
    if title.startswith(_ARTICLES) and rng.random() < 0.85:
        return rng.choice(_ABOUT).format(title[0].lower() + title[1:].rstrip("."))
    return rng.choice(_CALLED).format(title.rstrip("."))


def _ask_by_beginning(body: str, rng: random.Random) -> tuple[str, str] | None:
    """A first sentence or paragraph as the request, what follows as the answer."""
    paragraphs = [p.strip() for p in body.split("\n\n") if p.strip()]
    if len(paragraphs) == 1:
        head, _, tail = body.partition(". ")
        return (
            (rng.choice(_BEGIN).format(head + "."), tail) if 20 < len(head) < 300 and tail else None
        )
    start = rng.randrange(max(1, len(paragraphs) - 3)) if len(body) > MAX_STORY_CHARS else 0
    first = paragraphs[start]
    answer: list[str] = []
    for paragraph in paragraphs[start + 1 :]:
        if answer and sum(map(len, answer)) + len(paragraph) > _OPENING_CHARS:
            break
        answer.append(paragraph)
    if not 20 < len(first) < 400 or not answer or sum(map(len, answer)) > MAX_STORY_CHARS:
        return None
    return rng.choice(_BEGIN).format(first), "\n\n".join(answer)


def seed_chains(seeds: Sequence[Document], count: int, seed: int) -> list[Document]:
    """`count` dialogues of one to five seed dialogues in a row: the persona holds over turns."""
    rng = random.Random(seed)  # noqa: S311
    short = [document for document in seeds if len(document.turns) == 2 and not document.system]
    chains = []
    for index in range(count):
        first = seeds[index % len(seeds)]
        turns = list(first.turns)
        if not first.system:
            for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3, 4))):
                turns += rng.choice(short).turns
        chains.append(Document("seed", turns=tuple(turns), system=first.system))
    return chains
