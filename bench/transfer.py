"""How fast pages go from one process to another, by transport, beside what the machine can do.

    .venv/bin/python -P bench/transfer.py [--rounds 7] [--quick]

Pages are those of DeepSeek-V3: 61 layers x 64 tokens x 576 bf16 values, 4.5 MB each. A child
process receives; this one sends: opens a transfer, pushes whole pages, waits for the
acknowledgement. Beside each transport stands its bound, measured in the same rounds and in turn:
for shm a copy of the same pages within this process, for tcp a bare socket loop that computes the
same checksums on both sides, for nixl the library's own writes of the same pages by agents that
nothing else uses. Each measurement takes the next pages of pools larger than a processor's cache,
so that nobody finds its pages there. Ratios are of one round; beside those of the time stand those
of the processor time of both processes, which other work on the machine disturbs less. The last
table is that processor time for each (page, layer) when a unit has 16 bytes: what Python costs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402
import torch  # noqa: E402
from figures import as_json  # noqa: E402

from pdmesh.kvcache.store import LatentStore, copy_bytes  # noqa: E402
from pdmesh.kvtransfer.checks import checksum  # noqa: E402
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener, missing, new_agent, register  # noqa: E402
from pdmesh.kvtransfer.receiver import TransferReceiver  # noqa: E402
from pdmesh.kvtransfer.sender import Transfer, TransferSender  # noqa: E402
from pdmesh.kvtransfer.shm import ShmDialer, ShmListener  # noqa: E402
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener, set_options  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import Fin, Lease  # noqa: E402

DEEPSEEK_V3 = PageFormat("deepseek-v3", "bench", "bfloat16", 64, 61, 0, 576)
TINY = PageFormat("tiny", "bench", "bfloat16", 1, 61, 0, 8)
POOL_PAGES = 64
"""Pages of each pool at least; they are used round and round, and no cache holds them."""
CHUNK = 1 << 18


def store_of(fmt: PageFormat, pages: int, shared: bool) -> LatentStore:
    return LatentStore(
        pages, fmt.num_layers, fmt.page_size, fmt.latent_width, torch.bfloat16, shared=shared
    )


# ---- the receiving process ----------------------------------------------------------------------


def receive(pages: int, fmt: PageFormat, check_every: int) -> None:
    """Serves transfers and the bare loop; one command a line on the standard input."""
    torch.set_num_threads(1)
    store = store_of(fmt, pages, shared=True)
    store.tensor.fill_(0.0)
    listeners: list[Any] = [ShmListener(fmt, check_every), TcpListener(fmt)]
    if missing() is None:
        listeners.append(NixlListener(fmt, check_every=check_every))
    receiver = TransferReceiver(store, listeners)
    receiver.start()
    agent = raw_agent(store)
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=raw_serve, args=(raw, store), daemon=True).start()
    say(
        {
            "transports": receiver.addresses,
            "raw": raw.getsockname()[1],
            "agent": agent[1].hex(),
            "base": store.tensor.data_ptr(),
        }
    )
    for line in sys.stdin:
        words = json.loads(line)
        if "expect" in words:
            pages_here = [page % pages for page in words["pages"]]
            receiver.expect(words["expect"], 1, pages_here, 0, fmt.num_layers)
        elif "cancel" in words:
            receiver.collect(words["cancel"])
            assert receiver.cancel(words["cancel"])
        elif "cpu" in words:
            say({"cpu": time.process_time()})
            continue
        elif "sum" in words:
            page = words["sum"] % pages
            say({"sum": checksum(store.views([page], 0, fmt.num_layers)[0])})
            continue
        say({})
    receiver.close()
    os._exit(0)


def raw_agent(store: LatentStore) -> tuple[Any, bytes]:
    """An agent of the library that knows the store, and what a peer needs of it; None without."""
    if missing() is not None:
        return None, b""
    agent = new_agent("raw")
    register(agent, store)
    return agent, agent.get_agent_metadata()


def raw_serve(server: socket.socket, store: LatentStore) -> None:
    """Receives pages into the store in a loop, with a checksum for each unit."""
    sock, _ = server.accept()
    set_options(sock)
    unit, page_bytes = store.page_layer_bytes, store.page_bytes
    while header := sock.recv(8, socket.MSG_WAITALL):
        first, count = struct.unpack("<II", header)
        for page in range(first, first + count):
            view = store.views([page % store.num_pages], 0, store.num_layers)[0]
            done = summed = 0
            while done < page_bytes:
                done += sock.recv_into(view[done : done + (1 << 20)])
                while summed + unit <= done:
                    checksum(view[summed : summed + unit])
                    summed += unit
        sock.sendall(b"done")


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(as_json(what) + "\n")
    sys.stdout.flush()


# ---- the sending process ------------------------------------------------------------------------


class Bench:
    """This process's side: a source of pages, the child, and a transfer of each kind."""

    def __init__(self, fmt: PageFormat, pages: int, check_every: int) -> None:
        self.fmt = fmt
        self.source = store_of(fmt, POOL_PAGES, shared=False)
        raw = torch.randint(-100, 100, self.source.tensor.shape, dtype=torch.int16)
        self.source.tensor.copy_(raw)
        self.copies = store_of(fmt, POOL_PAGES, shared=False)
        self.copies.tensor.fill_(0.0)
        room = str(max(pages, POOL_PAGES))
        command = [sys.executable, "-P", __file__, "--receive", room, fmt.model]
        self.child = subprocess.Popen(
            [*command, str(check_every)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = self._heard()
        self.addresses: dict[str, str] = dict(hello["transports"])
        self.raw = socket.create_connection(("127.0.0.1", hello["raw"]))
        set_options(self.raw)
        dialers: list[Any] = [ShmDialer(), TcpDialer()]
        if "nixl" in self.addresses:
            dialers.append(NixlDialer(self.source))
        self.sender = TransferSender(fmt, dialers, self.source)
        self.count = 0
        self.at = 0
        """Page that comes next."""
        self.raw_nixl_side = self._raw_nixl(hello) if "nixl" in self.addresses else None

    def _raw_nixl(self, hello: dict[str, Any]) -> tuple[Any, str, int]:
        agent, _ = raw_agent(self.source)
        return agent, agent.add_remote_agent(bytes.fromhex(hello["agent"])), int(hello["base"])

    def next_pages(self, pages: int) -> None:
        """Whoever measures comes with other pages than the one before."""
        self.at += pages

    def page_ids(self, pages: int) -> list[int]:
        return [(self.at + page) % self.source.num_pages for page in range(pages)]

    def by(self, name: str, pages: int, push: Callable[[Transfer, int], None]) -> float:
        """Seconds of one transfer of ``pages`` pages over transport ``name``."""
        self.count += 1
        lease_id = f"t{self.count}"
        self._ask(expect=lease_id, pages=list(range(self.at, self.at + pages)))
        lease = Lease(
            lease_id=lease_id,
            generation=1,
            instance="bench",
            cached_pages=0,
            num_pages=pages,
            transports=((name, self.addresses[name]),),
            page_format=self.fmt,
        )
        began = time.perf_counter()
        transfer = self.sender.open(lease)
        push(transfer, pages)
        transfer.finish(
            Fin(
                lease_id=lease_id,
                generation=1,
                request_id="bench",
                num_writes=transfer.num_writes,
                first_tokens=(0,),
            )
        )
        seconds = time.perf_counter() - began
        self._ask(cancel=lease_id)
        return seconds

    def cpu(self) -> float:
        """Processor time of both processes so far, in seconds."""
        return float(self._ask(cpu=True)["cpu"]) + time.process_time()

    def whole(self, transfer: Transfer, pages: int) -> None:
        transfer.push_pages(0, pages, self.page_ids(pages))

    def layers(self, transfer: Transfer, pages: int) -> None:
        for layer in range(self.fmt.num_layers):
            transfer.push_layer(self.source, 0, layer, self.page_ids(pages))

    def single(self, transfer: Transfer, pages: int) -> None:
        ids = self.page_ids(pages)
        for layer in range(self.fmt.num_layers):
            for page in range(pages):
                transfer.push(page, layer, self.source.read(ids[page], layer))

    def memcpy(self, pages: int) -> float:
        began = time.perf_counter()
        for page in self.page_ids(pages):
            target = self.copies.views([page], 0, self.fmt.num_layers)[0]
            copy_bytes(target, self.source.views([page], 0, self.fmt.num_layers)[0])
        return time.perf_counter() - began

    def raw_socket(self, pages: int) -> float:
        """The bare loop: checksums, sends, one answer."""
        unit = self.fmt.page_layer_bytes
        step = max(1, CHUNK // unit) * unit
        began = time.perf_counter()
        self.raw.sendall(struct.pack("<II", self.at, pages))
        for page in self.page_ids(pages):
            view = self.source.views([page], 0, self.fmt.num_layers)[0]
            for start in range(0, len(view), step):
                part = view[start : start + step]
                for at in range(0, len(part), unit):
                    checksum(part[at : at + unit])
                self.raw.sendall(part)
        assert self.raw.recv(4, socket.MSG_WAITALL) == b"done"
        return time.perf_counter() - began

    def raw_nixl(self, pages: int) -> float:
        """The library alone: one write of all pages, polled to its end."""
        assert self.raw_nixl_side is not None
        agent, peer, base = self.raw_nixl_side
        size, mine = self.source.page_bytes, self.source.tensor.data_ptr()
        room = max(pages, POOL_PAGES)
        began = time.perf_counter()
        here = [(mine + page * size, size, 0) for page in self.page_ids(pages)]
        there = [(base + (self.at + page) % room * size, size, 0) for page in range(pages)]
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
        return time.perf_counter() - began

    def check(self, pages: int) -> None:
        """The last of the child's pages is this process's."""
        mine = self.source.views(self.page_ids(pages)[-1:], 0, self.fmt.num_layers)[0]
        theirs = self._ask(sum=self.at + pages - 1)["sum"]
        assert theirs == checksum(mine), "other bytes arrived"

    def close(self) -> None:
        self.sender.close()
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()

    def _ask(self, **words: Any) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(as_json(words) + "\n")
        self.child.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer


@dataclass(frozen=True)
class Taken:
    """Seconds of a transfer: by the clock, and processor time of both processes."""

    clock: float
    cpu: float


def measure(bench: Bench, sizes: list[int], rounds: int) -> dict[tuple[str, int], list[Taken]]:
    """What each round took, by (what, pages); within a round everything takes its turn."""
    ways: dict[str, Callable[[int], float]] = {
        "memcpy": bench.memcpy,
        "shm": lambda pages: bench.by("shm", pages, bench.whole),
        "raw socket": bench.raw_socket,
        "tcp": lambda pages: bench.by("tcp", pages, bench.whole),
        "tcp by layers": lambda pages: bench.by("tcp", pages, bench.layers),
        "shm by layers": lambda pages: bench.by("shm", pages, bench.layers),
    }
    if "nixl" in bench.addresses:
        ways["nixl"] = lambda pages: bench.by("nixl", pages, bench.whole)
        ways["raw nixl"] = bench.raw_nixl
    taken: dict[tuple[str, int], list[Taken]] = {}
    for number in range(-1, rounds):  # the first round warms up
        for pages in sizes:
            for name, way in ways.items():
                one = repeated(bench, way, pages)
                if name in ("shm", "tcp", "nixl"):
                    bench.check(pages)
                if number >= 0:
                    taken.setdefault((name, pages), []).append(one)
    return taken


def repeated(bench: Bench, way: Callable[[int], float], pages: int) -> Taken:
    """The median of several, for small transfers."""
    repeats = max(1, 16 // pages)
    clock: list[float] = []
    began = bench.cpu()
    for _ in range(repeats):
        bench.next_pages(pages)
        clock.append(way(pages))
    return Taken(statistics.median(clock), (bench.cpu() - began) / repeats)


def report(taken: dict[tuple[str, int], list[Taken]], page_bytes: int) -> None:
    bounds = {
        "shm": "memcpy",
        "shm by layers": "memcpy",
        "tcp": "raw socket",
        "tcp by layers": "raw socket",
        "nixl": "raw nixl",
    }
    print(f"{'':14}{'pages':>6}{'us':>10}{'GB/s':>7}{'cpu us':>10}   bound/it: clock; best; cpu")
    for (name, pages), rounds in sorted(taken.items(), key=lambda item: item[0][1]):
        middle = statistics.median(one.clock for one in rounds)
        cpu = statistics.median(one.cpu for one in rounds)
        line = f"{name:14}{pages:6}{middle * 1e6:10.0f}{pages * page_bytes / middle / 1e9:7.2f}"
        line += f"{cpu * 1e6:10.0f}"
        if bound := bounds.get(name):
            pairs = list(zip(taken[bound, pages], rounds, strict=True))
            clocks = sorted(b.clock / one.clock for b, one in pairs)
            best = min(b.clock for b, _ in pairs) / min(one.clock for one in rounds)
            cpus = statistics.median(b.cpu / one.cpu for b, one in pairs)
            line += f"   {statistics.median(clocks):.2f} ({clocks[0]:.2f}, {clocks[-1]:.2f})"
            line += f"; {best:.2f}; {cpus:.2f} of {bound}"
        print(line)


def python_cost(rounds: int) -> None:
    bench = Bench(TINY, 64, 64)
    ways = {"whole pages": bench.whole, "layers of 64 pages": bench.layers, "units": bench.single}
    print("\nPython, us of processor time a (page, layer), units of 16 bytes")
    names = [name for name in ("shm", "tcp", "nixl") if name in bench.addresses]
    for name in names:
        for way, push in ways.items():
            if way == "units" and name == "nixl":
                continue
            bench.by(name, 64, push)
            began = bench.cpu()
            for _ in range(rounds):
                bench.by(name, 64, push)
            spent = (bench.cpu() - began) / rounds
            print(f"{name:6}{way:20}{spent / 64 / 61 * 1e6:8.2f}")
    bench.close()


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="ways taking turns")
    parser.add_argument(
        "--pages", type=int, nargs="+", default=[1, 16, 256], help="pages of a transfer"
    )
    parser.add_argument("--check-every", type=int, default=64, help="shm and nixl: checksums")
    parser.add_argument("--quick", action="store_true", help="1 and 16 pages, 2 rounds")
    parser.add_argument("--receive", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        fmt = DEEPSEEK_V3 if args.receive[1] == DEEPSEEK_V3.model else TINY
        receive(int(args.receive[0]), fmt, int(args.receive[2]))
        return
    torch.set_num_threads(1)
    sizes, rounds = ([1, 16], 2) if args.quick else (args.pages, args.rounds)
    bench = Bench(DEEPSEEK_V3, max(sizes), args.check_every)
    if reason := missing():
        print(f"nixl is left out: {reason}")
    report(measure(bench, sizes, rounds), bench.source.page_bytes)
    bench.close()
    python_cost(1 if args.quick else rounds)


if __name__ == "__main__":
    main()
