"""Score a finished model on the held-out list: `python -m pdmesh.tools.tiny_score --help`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from pdmesh.tools.tiny_corpus import HELD_OUT_FILE
from pdmesh.tools.tiny_eval import score
from pdmesh.tools.tiny_model import load_quantised, network_of
from pdmesh.tools.tiny_pack import load_packed


def main() -> None:
    """Print bits per byte, MTP acceptance and expert balance: of all documents and by source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="packed corpus")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = network_of(load_quantised(args.model_dir, device))
    _, held_out = load_packed(args.data)
    sources = [e["source"] for e in json.loads(HELD_OUT_FILE.read_text(encoding="utf-8"))]
    print("all", vars(score(network.rows, held_out, args.context, range(len(sources)))))
    for source in sorted(set(sources)):
        chosen = [n for n, one in enumerate(sources) if one == source]
        part = score(network.rows, held_out, args.context, chosen)
        print(source, len(chosen), "documents", vars(part), flush=True)


if __name__ == "__main__":
    main()
