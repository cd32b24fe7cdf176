"""One process of an NVSHMEM job of ranks that exchange rows; run by test_gpu_ep.py.

Talks to it over a pipe, one command a line, JSON with a `number` that comes back before the answer.
Ranks meet on the host over gloo.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from symmetric_rig import (
    channel,
    experts_made,
    inputs,
    layout_differs,
    routing,
    same_bits,
    scattered,
)

from pdmesh.kernels.expert_exchange import ArrivedContiguous, ExchangeSize, arrive
from pdmesh.kernels.moe import weighted_sum
from pdmesh.kernels.quantised import dequantise_rows, quantise_rows
from pdmesh.kernels.symmetric import NvshmemHeap
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable

EXPERTS, TOP = 32, 8
TRACE = "EP_TRACE" in os.environ
"""Say on stderr what is done, and where a rank stands when it takes long or loses another."""


class Peer:
    """A rank; `path` says how rows go to others: "mapped" or "put"; `layout`, how they lie there:
    "masked" or "contiguous"."""

    def __init__(self, heap: NvshmemHeap) -> None:
        self.heap = heap
        self.ends: dict[str, tuple] = {}
        self.linked = False

    def do(self, command: dict) -> object:
        try:
            return getattr(self, command.pop("do"))(**command)
        except RankLost:
            for key, (end, _, _) in self.ends.items() if TRACE else ():
                lane = end.lanes[0]
                told = {
                    name: lane._view(getattr(lane, name)).view(torch.int64).tolist()
                    for name in ("_tags", "_arrivals", "_returned")
                }
                told |= {
                    name: getattr(lane, name).tolist()
                    for name in ("step", "_seen", "_seen_back", "_units", "_rows_to", "_pairs_to")
                }
                sys.stderr.write(f"rank {self.heap.rank} lost {end._lost.tolist()} {key}: {told}\n")
            raise

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def end(
        self,
        path: str,
        tokens: int,
        hidden: int,
        max_rows: int,
        seed: int,
        layout: str = "masked",
    ):
        if path == "put" and not self.linked:
            # Linking the library in takes seconds, and here no rank waits for another's rows.
            self.linked = True
            ranks = self.heap.size
            assert self.layout("put", "balanced", [1] * ranks, 128, 0) == "right"
        key = f"{path} {tokens} {hidden} {max_rows} {seed} {layout}"
        if key not in self.ends:
            ranks = self.heap.size
            placement = (
                Placement.even(1, EXPERTS, ranks) if seed == 0 else scattered(ranks, EXPERTS, seed)
            )
            most = max(map(len, placement.layers[0]))
            size = (
                ExchangeSize.contiguous(ranks, most, tokens, hidden, TOP)
                if layout == "contiguous"
                else ExchangeSize(ranks, most, tokens, hidden, TOP, max_rows)
            )
            tables = [ReplicaTable.build(placement, 0, self.heap.device)]
            mapped = None if path == "mapped" else [self.heap.rank]
            end = NvshmemExperts(
                self.heap, tables, size, mapped, lanes=1, timeout_s=5.0 if TRACE else 30.0
            )
            self.meet()
            self.ends[key] = (end, tables[0], size)
        return self.ends[key]

    def wanted(self, table, rows, ids, weights):
        """What the own rows have to come back as: by the definition, without any exchange."""
        real = ids >= 0
        ranks, slots = torch.zeros_like(ids), torch.zeros_like(ids)
        chosen = table.choose(ids[real][:, None], self.heap.rank)
        ranks[real], slots[real] = chosen[0][:, 0], chosen[1][:, 0]
        factor = 1 + slots + 0.5 * ranks
        back = (dequantise_rows(quantise_rows(rows))[:, None] * factor[..., None]).bfloat16()
        back[~real] = 0
        return weighted_sum(back, weights.masked_fill(~real, 0.0))

    def layout(
        self,
        path: str,
        kind: str,
        counts: list[int],
        hidden: int,
        seed: int,
        layout: str = "masked",
    ) -> str:
        """One exchange with a meeting between its parts; all that arrives is looked at."""
        end, table, size = self.end(path, max(counts), hidden, 8 * sum(counts), seed, layout)
        rank = self.heap.rank
        rows, ids, weights = inputs(size, counts, kind, EXPERTS, seed + 1, "cuda")
        lane = end.lanes[0]
        lane.arrived.rows.values.view(torch.uint8).fill_(0x7F)
        lane.arrived.rows.scales.fill_(float("nan"))
        lane.made.fill_(float("nan"))
        if isinstance(lane.arrived, ArrivedContiguous):
            lane.arrived.homes.fill_(-7)
            lane.arrived.row_expert.fill_(-7)
        self.meet()
        sent = end.dispatch_send(channel(1), 0, rows[rank], ids[rank])
        self.meet()
        received = end.dispatch_recv(sent)
        made = experts_made(received.arrived, rank)
        back = end.combine_send(sent, received, made)
        self.meet()
        found = end.combine_recv(back, weights[rank])
        self.meet()
        end.check()
        choices = []
        for home, own in enumerate(ids):
            real = own >= 0
            chosen = table.choose(own[real][:, None], home)
            to = torch.full_like(own, -1), torch.full_like(own, -1)
            to[0][real], to[1][real] = chosen[0][:, 0], chosen[1][:, 0]
            choices.append(to)
        want = arrive(rows, choices, rank, size)
        if wrong := layout_differs(lane.arrived, want):
            return wrong
        if not same_bits(found, self.wanted(table, rows[rank], ids[rank], weights[rank])):
            return "sums differ"
        return "right"

    def stream(
        self,
        path: str,
        kind: str,
        tokens: int,
        hidden: int,
        steps: int,
        seed: int,
        graph: bool,
        layout: str = "masked",
    ) -> str:
        """Exchanges without a meeting, other rows each time; checked on the device."""
        ranks, rank = self.heap.size, self.heap.rank
        end, table, size = self.end(
            path, tokens, hidden, min(8 * tokens, 4096) * ranks, seed, layout
        )
        generator = torch.Generator("cuda").manual_seed(100 * seed + rank)
        counts = torch.randint(
            0, tokens + 1, (steps,), generator=torch.Generator().manual_seed(rank)
        )
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        rows = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        ids = torch.full((tokens, TOP), -1, device="cuda")
        weights = torch.zeros(tokens, TOP, device="cuda")
        out = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")

        def once(count: int) -> None:
            lane = end.lanes[0]
            sent = end.dispatch_send(channel(1), 0, rows[:count], ids[:count])
            received = end.dispatch_recv(sent)
            made = experts_made(received.arrived, rank)
            back = end.combine_send(sent, received, made)
            end.combine_recv(back, weights[:count], out=out[:count])
            lane.arrived.rows.values.view(torch.uint8).fill_(0x7F)

        captured = None
        for step in range(steps):
            count = tokens if graph else int(counts[step])
            rows.normal_(generator=generator)
            weights.uniform_(generator=generator)
            ids.copy_(
                routing(kind, tokens, EXPERTS, TOP, 1000 * seed + step * ranks + rank, "cuda")
            )
            if graph and step == 1:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    once(tokens)
            if captured is None:
                once(count)
            else:
                captured.replay()
            want = self.wanted(table, rows[:count], ids[:count], weights[:count])
            wrong += (want.view(torch.int16) != out[:count].view(torch.int16)).sum()
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        end.check()
        self.meet()
        return "right" if int(wrong) == 0 else f"{int(wrong)} values differ"

    def lost(self, path: str) -> str:
        """The last rank sends nothing; then the others go on without it."""
        end, table, size = self.end(path, 16, 1024, 2048, 3)
        ranks, rank = self.heap.size, self.heap.rank
        old, end._lost[:] = end.lanes[0]._shared, 0
        # Ranks of one GPU take turns: the last of many may be late without being lost.
        end.lanes[0]._shared = replace(old, bound=200_000_000 * ranks)
        counts = [16] * ranks
        rows, ids, weights = inputs(size, counts, "balanced", EXPERTS, 5, "cuda")
        said = "nothing"
        self.meet()
        if rank < ranks - 1:
            sent = end.dispatch_send(channel(1), 0, rows[rank], ids[rank])
            end.dispatch_recv(sent)
            torch.cuda.synchronize()
            try:
                end.check()
            except RankLost as error:
                said = f"rank {error.rank}"
        self.meet()
        end.lanes[0]._shared = old
        return said

    def bytes(self, path: str) -> dict:
        """By peer, and what was to be expected, for one exchange."""
        end, table, size = self.end(path, 12, 1024, 12 * 8 * self.heap.size, 11)
        rank = self.heap.rank
        rows, ids, weights = inputs(size, [12] * size.ranks, "balanced", EXPERTS, 5, "cuda")
        self.meet()
        sent = end.dispatch_send(channel(1), 0, rows[rank], ids[rank])
        received = end.dispatch_recv(sent)
        end.combine_recv(end.combine_send(sent, received, received.made), weights[rank])
        self.meet()
        to = table.choose(ids[rank], rank)[0]
        want = {
            peer: size.dispatch_bytes(int((to == peer).any(1).sum()))
            for peer in range(size.ranks)
            if peer != rank
        }
        return {"found": end.sent.by_peer("dispatch") == want}


def main() -> None:
    rank, size, job_id, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not get between the answers
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    peer = Peer(NvshmemHeap.join(bytes.fromhex(job_id), rank, size, device))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        if TRACE:
            faulthandler.dump_traceback_later(8, repeat=True)
            sys.stderr.write(f"{time.monotonic():.1f} rank {rank}: {line}")
        command = json.loads(line)
        number = command.pop("number")
        print(json.dumps([number, peer.do(command)]), file=answers, flush=True)
    os._exit(0)  # leaving the job is collective, and a test may have killed a peer


if __name__ == "__main__":
    main()
