"""Bytes of dispatch and combine, counted, beside the formula and beside padded batches.

    .venv/bin/python -P bench/ep_bytes.py        (--help for the options)

Ranks in one process send rows of DeepSeek-V3's width (7,168) to 256 experts, 8 a row, in FP8 with a
scale for every 128 values, and get bf16 back. Nothing is computed: experts return zeros.

The first table is of equal batches. `formula` is the plain count, one copy a chosen expert, none
of them on the own rank: tokens x 8 x (7,168 + 4 x 56) out and tokens x 8 x 14,336 back. A row goes
to a rank once here, and what stays on its rank is no traffic, so the counted bytes are fewer;
indices, 8 bytes a choice, are counted.

The second is of unequal ones, 0 to so many tokens a rank at random. `padded` is what the same step
sends where every rank first learns the largest batch and fills its own up to that, as an all-to-all
of equal parts needs: its padding rows are routed like others. Bytes and rows computed by experts,
over those of batches as they are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above

from pdmesh.model.parallel.exchange import (  # noqa: E402 - the path is set above
    Channel,
    ReceivedRows,
)
from pdmesh.model.parallel.mailbox import Mailboxes  # noqa: E402
from pdmesh.model.parallel.messages import MessageExperts  # noqa: E402
from pdmesh.model.parallel.payload import WireFormat  # noqa: E402
from pdmesh.model.parallel.placement import Placement  # noqa: E402
from pdmesh.model.parallel.replicas import ReplicaTable  # noqa: E402

HIDDEN, EXPERTS, TOP = 7168, 256, 8
ROW_OUT = HIDDEN + 4 * HIDDEN // 128
ROW_BACK = 2 * HIDDEN
CHANNEL = Channel("dispatch", 0, 0, -1)


def exchanged(counts: Sequence[int]) -> tuple[int, int, int]:
    """Bytes out, bytes back, and rows computed, of ranks with so many tokens each."""
    ranks = len(counts)
    mail, tables = Mailboxes(), [ReplicaTable.build(Placement.even(1, EXPERTS, ranks), 0)]
    wire = WireFormat("fp8", "bf16")
    ends = [MessageExperts(mail.end(rank), range(ranks), tables, wire) for rank in range(ranks)]
    sent = []
    for rank, count in enumerate(counts):
        generator = torch.Generator().manual_seed(rank)
        ids = torch.rand(count, EXPERTS, generator=generator).topk(TOP, dim=1).indices
        sent.append(ends[rank].dispatch_send(CHANNEL, 0, torch.zeros(count, HIDDEN), ids))
    computed = 0
    for end, handle in zip(ends, sent, strict=True):
        received = end.dispatch_recv(handle)
        assert isinstance(received, ReceivedRows)
        computed += received.rows.shape[0]
        outputs = torch.zeros(1, dtype=torch.bfloat16).expand(*received.slots.shape, HIDDEN)
        end.combine_send(handle, received, outputs)
    out, back = (sum(end.sent.total(kind) for end in ends) for kind in ("dispatch", "combine"))
    return out, back, computed


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 128], help="EP sizes")
    parser.add_argument("--tokens", type=int, default=16, help="tokens a rank (16)")
    args = parser.parse_args()
    print(
        "| EP | dispatch, bytes a token | of the formula "
        "| combine, bytes a token | of the formula |"
    )
    print("|---|---|---|---|---|")
    for ranks in args.ranks:
        out, back, _ = exchanged([args.tokens] * ranks)
        total = args.tokens * ranks
        print(
            f"| {ranks} | {out / total:,.0f} | {out / (total * TOP * ROW_OUT):.2f} "
            f"| {back / total:,.0f} | {back / (total * TOP * ROW_BACK):.2f} |"
        )
    print(f"\n| EP, 0 to {2 * args.tokens} tokens | bytes, padded | rows computed, padded |")
    print("|---|---|---|")
    for ranks in args.ranks:
        rng = random.Random(ranks)
        counts = [rng.randint(0, 2 * args.tokens) for _ in range(ranks)]
        plain, padded = exchanged(counts), exchanged([max(counts)] * ranks)
        ratio = (sum(padded[:2]) / sum(plain[:2]), padded[2] / plain[2])
        print(f"| {ranks} | {ratio[0]:.2f} | {ratio[1]:.2f} |")


if __name__ == "__main__":
    main()
