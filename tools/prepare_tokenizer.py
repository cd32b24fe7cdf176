"""Held-out list and tokenizer: `python -m pdmesh.tools.prepare_tokenizer --help`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pdmesh.tools.tiny_corpus import (
    HELD_OUT_FILE,
    choose_held_out,
    read_corpus,
    split_held_out,
)
from pdmesh.tools.tiny_tokenizer import train_tokenizer, write_tokenizer

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def main() -> None:
    """Write the held-out list (when it is not there yet) and the tokenizer files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the .xz files")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write into")
    args = parser.parse_args()
    documents = read_corpus(args.corpus)
    if not HELD_OUT_FILE.exists():
        entries = [json.dumps(entry) for entry in choose_held_out(documents)]
        HELD_OUT_FILE.write_text("[\n" + ",\n".join(entries) + "\n]\n", encoding="utf-8")
    training, held_out = split_held_out(documents)
    print(f"{len(documents)} documents, {len(held_out)} held out", flush=True)
    tokenizer = train_tokenizer(document.raw for document in training)
    write_tokenizer(tokenizer, args.out, TEMPLATE_FILE.read_text(encoding="utf-8"))
    print(f"{tokenizer.get_vocab_size()} tokens written to {args.out}")


if __name__ == "__main__":
    main()
