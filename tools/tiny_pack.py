"""Token ids of the whole corpus in one file: `python -m pdmesh.tools.tiny_pack --help`."""

from __future__ import annotations

import argparse
import io
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pdmesh.tools.tiny_chat_forms import seed_chains, story_dialogues
from pdmesh.tools.tiny_corpus import Document, read_corpus, read_seed, split_held_out
from pdmesh.tools.tiny_tokenizer import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID

# The groups a document belongs to, and the roles a token plays as a target.
TEXT, DIALOGUE, STORY_CHAT, SEED = range(4)
ROLE_FORM, ROLE_USER, ROLE_ANSWER = range(3)
STORY_VARIANTS = 3
SEED_CHAINS = 8000


@dataclass(frozen=True)
class Packed:
    """Documents back to back: ids and roles [N], starts [D + 1], group and bytes [D]."""

    ids: npt.NDArray[np.uint16]
    roles: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    group: npt.NDArray[np.uint8]
    raw_bytes: npt.NDArray[np.int64]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> Packed:
    """Encode as the chat template renders: dialogues by turns, plain texts between BOS and EOS."""
    parts = [[d.system, *(t.text for t in d.turns)] if d.turns else [d.text] for d in documents]
    flat = [text for texts in parts for text in texts]
    encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    ids: list[npt.NDArray[np.uint16]] = []
    roles: list[npt.NDArray[np.uint8]] = []
    for document, texts in zip(documents, parts, strict=True):
        pieces = [next(encoded).ids for _ in texts]
        one_ids, one_roles = _frame(document, pieces)
        ids.append(np.asarray(one_ids, np.uint16))
        roles.append(np.asarray(one_roles, np.uint8))
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])]).astype(np.int64)
    group = np.asarray([_group(document) for document in documents], np.uint8)
    raw_bytes = np.asarray([len(document.raw.encode()) for document in documents], np.int64)
    return Packed(np.concatenate(ids), np.concatenate(roles), starts, group, raw_bytes)


def _frame(document: Document, pieces: list[list[int]]) -> tuple[list[int], list[int]]:
    if not document.turns:
        body = [BOS_ID, *pieces[0], EOS_ID]
        return body, [ROLE_FORM] + [ROLE_ANSWER] * (len(body) - 1)
    ids, roles = [BOS_ID, *pieces[0]], [ROLE_FORM] * (1 + len(pieces[0]))
    for turn, piece in zip(document.turns, pieces[1:], strict=True):
        ids += [USER_ID if turn.user else ASSISTANT_ID, *piece]
        roles += [ROLE_FORM] + [ROLE_USER if turn.user else ROLE_ANSWER] * len(piece)
        if not turn.user:
            ids.append(EOS_ID)
            roles.append(ROLE_ANSWER)
    return ids, roles


def _group(document: Document) -> int:
    if not document.turns:
        return TEXT
    return {"seed": SEED, "story-chat": STORY_CHAT}.get(document.source, DIALOGUE)


def save_packed(path: Path, training: Packed, held_out: Packed) -> None:
    """One xz file with both sets."""
    buffer = io.BytesIO()
    fields = {f"train_{name}": value for name, value in vars(training).items()}
    fields |= {f"held_{name}": value for name, value in vars(held_out).items()}
    np.savez(buffer, **fields)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=2))


def load_packed(path: Path) -> tuple[Packed, Packed]:
    """(training, held-out) as `save_packed` wrote them."""
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    names = Packed.__dataclass_fields__
    training = Packed(**{name: arrays[f"train_{name}"] for name in names})
    return training, Packed(**{name: arrays[f"held_{name}"] for name in names})


def build_packed(corpus: Path, tokenizer: Tokenizer) -> tuple[Packed, Packed]:
    """Encode the corpus, the story requests and the seed chains."""
    training, held_out = split_held_out(read_corpus(corpus))
    made = story_dialogues(training, STORY_VARIANTS, seed=1)
    chains = seed_chains(read_seed(), SEED_CHAINS, seed=2)
    return (
        encode_documents(tokenizer, [*training, *made, *chains]),
        encode_documents(tokenizer, held_out),
    )


def main() -> None:
    """Encode and write; print the size of each group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the .xz files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="packed file to write")
    args = parser.parse_args()
    training, held_out = build_packed(args.corpus, Tokenizer.from_file(str(args.tokenizer)))
    save_packed(args.out, training, held_out)
    lengths = np.diff(training.starts)
    for group, name in enumerate(("text", "dialogue", "story-chat", "seed")):
        chosen = training.group == group
        print(f"{name}: {chosen.sum()} documents, {lengths[chosen].sum() / 1e6:.2f} M tokens")
    print(f"held out: {len(held_out.ids)} tokens, {held_out.raw_bytes.sum()} bytes")


if __name__ == "__main__":
    main()
