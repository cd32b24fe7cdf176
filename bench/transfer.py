"""How fast pages go from one process to another, by transport, beside what the machine can do.

    .venv/bin/python -P bench/transfer.py [--rounds 7] [--quick]

Pages are those of DeepSeek-V3: 61 layers x 64 tokens x 576 bf16 values, 4.5 MB each. A child
process receives; this one sends: opens a transfer, pushes whole pages, waits for the
acknowledgement. Beside each transport stands its bound, measured in the same rounds and in turn:
for shm a copy of the same pages within this process, for tcp a bare socket loop that computes the
same checksums on both sides, for nixl the library's own writes of the same pages. The last table is
the processor time of both processes for each (page, layer) when a unit has 16 bytes: what Python
costs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".pythonpath"))

import torch  # noqa: E402

from pdmesh.kvcache.store import LatentStore, copy_bytes  # noqa: E402
from pdmesh.kvtransfer.checks import checksum  # noqa: E402
from pdmesh.kvtransfer.nixl import NixlDialer, NixlListener, missing  # noqa: E402
from pdmesh.kvtransfer.receiver import TransferReceiver  # noqa: E402
from pdmesh.kvtransfer.sender import Transfer, TransferSender  # noqa: E402
from pdmesh.kvtransfer.shm import ShmDialer, ShmListener  # noqa: E402
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener, set_options  # noqa: E402
from pdmesh.wire.hashes import PageFormat  # noqa: E402
from pdmesh.wire.messages import Fin, Lease  # noqa: E402

DEEPSEEK_V3 = PageFormat("deepseek-v3", "bench", "bfloat16", 64, 61, 0, 576)
TINY = PageFormat("tiny", "bench", "bfloat16", 1, 61, 0, 8)
SOURCE_PAGES = 64
"""Pages that are sent, round and round: more than any cache holds."""
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
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=raw_serve, args=(raw, store), daemon=True).start()
    say({"transports": receiver.addresses, "raw": raw.getsockname()[1]})
    for line in sys.stdin:
        words = json.loads(line)
        if "expect" in words:
            receiver.expect(words["expect"], 1, range(words["pages"]), 0, fmt.num_layers)
        elif "cancel" in words:
            receiver.collect(words["cancel"])
            assert receiver.cancel(words["cancel"])
        elif "cpu" in words:
            say({"cpu": time.process_time()})
            continue
        elif "sum" in words:
            say({"sum": checksum(store.views([words["sum"]], 0, fmt.num_layers)[0])})
            continue
        say({})
    receiver.close()
    os._exit(0)


def raw_serve(server: socket.socket, store: LatentStore) -> None:
    """Receives pages into the store in a loop, with a checksum for each unit."""
    sock, _ = server.accept()
    set_options(sock)
    unit, page_bytes = store.page_layer_bytes, store.page_bytes
    while header := sock.recv(4, socket.MSG_WAITALL):
        for page in range(int.from_bytes(header, "little")):
            view = store.views([page], 0, store.num_layers)[0]
            done = summed = 0
            while done < page_bytes:
                done += sock.recv_into(view[done : done + (1 << 20)])
                while summed + unit <= done:
                    checksum(view[summed : summed + unit])
                    summed += unit
        sock.sendall(b"done")


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


# ---- the sending process ------------------------------------------------------------------------


class Bench:
    """This process's side: a source of pages, the child, and a transfer of each kind."""

    def __init__(self, fmt: PageFormat, pages: int, check_every: int) -> None:
        self.fmt = fmt
        self.source = store_of(fmt, min(pages, SOURCE_PAGES), shared=False)
        raw = torch.randint(-100, 100, self.source.tensor.shape, dtype=torch.int16)
        self.source.tensor.copy_(raw)
        self.copies = store_of(fmt, min(pages, SOURCE_PAGES), shared=False)
        self.copies.tensor.fill_(0.0)
        command = [sys.executable, "-P", __file__, "--receive", str(pages), fmt.model]
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

    def page_ids(self, pages: int) -> list[int]:
        return [page % self.source.num_pages for page in range(pages)]

    def by(self, name: str, pages: int, push: Callable[[Transfer, int], None]) -> float:
        """Seconds of one transfer of ``pages`` pages over transport ``name``."""
        self.count += 1
        lease_id = f"t{self.count}"
        self._ask(expect=lease_id, pages=pages)
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
            transfer.push_layer(0, layer, self.source.views(self.page_ids(pages), layer, 1))

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
        self.raw.sendall(pages.to_bytes(4, "little"))
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
        """The library alone: one write of all pages, prepared before, polled to its end."""
        link = next(link for target, link in self.sender._links.items() if target[0] == "nixl")
        ids = self.page_ids(pages)
        layers = self.fmt.num_layers
        views = self.source.views(ids, 0, layers)
        size = self.source.page_bytes
        began = time.perf_counter()
        link.put_now(views, [page * size for page in range(pages)])  # type: ignore[attr-defined]
        return time.perf_counter() - began

    def check(self, page: int) -> None:
        """The child's page is this process's."""
        mine = self.source.views(self.page_ids(page + 1)[-1:], 0, self.fmt.num_layers)[0]
        assert self._ask(sum=page)["sum"] == checksum(mine), "other bytes arrived"

    def close(self) -> None:
        self.sender.close()
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()

    def _ask(self, **words: Any) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(words) + "\n")
        self.child.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer


def measure(bench: Bench, sizes: list[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each round, by (what, pages); within a round everything takes its turn."""
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
    taken: dict[tuple[str, int], list[float]] = {}
    for number in range(-1, rounds):  # the first round warms up
        for pages in sizes:
            repeats = max(1, 16 // pages)
            for name, way in ways.items():
                seconds = statistics.median(way(pages) for _ in range(repeats))
                if name in ("shm", "tcp", "nixl"):
                    bench.check(pages - 1)
                if number >= 0:
                    taken.setdefault((name, pages), []).append(seconds)
    return taken


def report(taken: dict[tuple[str, int], list[float]], page_bytes: int) -> None:
    bounds = {
        "shm": "memcpy",
        "shm by layers": "memcpy",
        "tcp": "raw socket",
        "tcp by layers": "raw socket",
        "nixl": "raw nixl",
    }
    print(f"{'':14}{'pages':>6}{'us':>10}{'GB/s':>7}   of its bound (lowest, highest)")
    for (name, pages), seconds in sorted(taken.items(), key=lambda item: item[0][1]):
        middle = statistics.median(seconds)
        line = f"{name:14}{pages:6}{middle * 1e6:10.0f}{pages * page_bytes / middle / 1e9:7.2f}"
        if bound := bounds.get(name):
            ratios = sorted(b / s for b, s in zip(taken[bound, pages], seconds, strict=True))
            best = min(taken[bound, pages]) / min(seconds)
            line += f"   {statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
            line += f", best to best {best:.2f} of {bound}"
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--check-every", type=int, default=64, help="shm and nixl: checksums")
    parser.add_argument("--quick", action="store_true", help="1 and 16 pages, 3 rounds")
    parser.add_argument("--receive", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        fmt = DEEPSEEK_V3 if args.receive[1] == DEEPSEEK_V3.model else TINY
        receive(int(args.receive[0]), fmt, int(args.receive[2]))
        return
    torch.set_num_threads(1)
    sizes, rounds = ([1, 16], 3) if args.quick else (args.pages, args.rounds)
    bench = Bench(DEEPSEEK_V3, max(sizes), args.check_every)
    if reason := missing():
        print(f"nixl is left out: {reason}")
    report(measure(bench, sizes, rounds), bench.source.page_bytes)
    bench.close()
    python_cost(rounds)


if __name__ == "__main__":
    main()
