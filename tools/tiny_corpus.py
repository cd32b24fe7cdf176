"""The corpus of the small chat model: documents, the held-out list, the seed dialogues."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_COUNT = 200
HELD_OUT_FILE = Path(__file__).with_name("tiny_heldout.json")
SEED_FILE = Path(__file__).with_name("chat_seed.jsonl")
_SALT = "pdmesh-tiny-held-out:"
_MIN_CHARS = 20
_PLACEHOLDER = re.compile(r"\[(?:User|user|USER|Name|Your|My|name|your)[^\]]{0,24}\]")
_NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Iris", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul"),
)
_ROMAN = re.compile(r"^(?:chapter\s+)?[ivxlc]+\.?$", re.IGNORECASE)


@dataclass(frozen=True)
class Turn:
    """One turn of a dialogue; `user` is False for the assistant."""

    user: bool
    text: str


@dataclass(frozen=True)
class Document:
    """A plain text (`turns` empty) or a dialogue (`text` empty)."""

    source: str
    title: str = ""
    text: str = ""
    turns: tuple[Turn, ...] = ()
    system: str = ""

    @property
    def raw(self) -> str:
        """The text without template and special tokens: what bits per byte divides by."""
        return self.text if not self.turns else "\n".join(turn.text for turn in self.turns)

    @property
    def key(self) -> str:
        """The name of this document in the held-out list (64 bits of SHA-256)."""
        return hashlib.sha256((_SALT + self.raw).encode()).hexdigest()[:16]


def read_corpus(folder: Path) -> list[Document]:
    """Every document of the xz files in the corpus folder, without duplicates."""
    files = sorted(folder.glob("*.xz"))
    if not files:
        raise SystemExit(f"{folder}: no .xz files of the corpus are there")
    seen: set[str] = set()
    documents = []
    for file in files:
        reader = _read_books if file.name.endswith(".txt.xz") else _read_jsonl
        for document in reader(file):
            if len(document.raw) >= _MIN_CHARS and document.key not in seen:
                seen.add(document.key)
                documents.append(document)
    return documents


def _read_books(file: Path) -> Iterator[Document]:
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        for chapter in stream.read().split("<|endoftext|>"):
            text = chapter.strip()
            yield Document("books", _chapter_title(text), text)


def _chapter_title(text: str) -> str:
    """The first heading of a chapter that is not a numeral; empty when there is none."""
    for line in text.split("\n\n")[:3]:
        if len(line) > 60 or line.rstrip().endswith((".", '"', ",")):
            return ""
        if not _ROMAN.match(line.strip()):
            return line.strip()
    return ""


def _read_jsonl(file: Path) -> Iterator[Document]:
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        for line in stream:
            record = json.loads(line)
            if "text" in record:
                yield Document("stories", record["title"].strip(), record["text"].strip())
            else:
                yield Document(record["src"].split("-test")[0], turns=_turns(record["messages"]))


def _turns(messages: Sequence[dict[str, str]]) -> tuple[Turn, ...]:
    """Turns of a dialogue; "[User 1's name]" and the like become names, the same within it."""
    first = messages[0]["content"]
    rng = random.Random(hashlib.sha256(first.encode()).hexdigest())  # noqa: S311
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match.group(0).lower(), rng.choice(_NAMES))

    return tuple(
        Turn(message["role"] == "user", _PLACEHOLDER.sub(name, message["content"]).strip())
        for message in messages
    )


def choose_held_out(documents: Sequence[Document]) -> list[dict[str, object]]:
    """The documents with the smallest keys: a uniform draw that the text alone decides."""
    chosen = sorted(documents, key=lambda document: document.key)[:HELD_OUT_COUNT]
    return [
        {"key": d.key, "source": d.source, "bytes": len(d.raw.encode()), "begins": d.raw[:40]}
        for d in chosen
    ]


def split_held_out(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents in the committed order)."""
    keys = [entry["key"] for entry in json.loads(HELD_OUT_FILE.read_text(encoding="utf-8"))]
    by_key = {document.key: document for document in documents}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise SystemExit(f"the corpus lacks {len(missing)} held-out documents, first {missing[0]}")
    held_out = [by_key[key] for key in keys]
    chosen = set(keys)
    return [document for document in documents if document.key not in chosen], held_out


def read_seed() -> list[Document]:
    """The hand-written dialogues that give the model its manners."""
    documents = []
    for line in SEED_FILE.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        messages = [m for m in record["messages"] if m["role"] != "system"]
        system = "".join(m["content"] for m in record["messages"] if m["role"] == "system")
        turns = tuple(Turn(m["role"] == "user", m["content"]) for m in messages)
        documents.append(Document("seed", turns=turns, system=system))
    return documents
