"""MLA decode on a GPU: every backend against float64, then its time in CUDA graphs.

    python -m pdmesh.bench.gpu_mla [--out FOLDER] [--only NAME] [--without NAME]

128 heads at 5,000 tokens first. Every call of a graph reads another layer or other sequences, so
that nothing comes from the L2 cache. A time is the median over graph replays, divided by the calls
in the graph. Two errors stand behind it, norm of the difference over the norm: against float64 on
what the pages hold, and on the bfloat16 latents before they were quantised.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from torch import Tensor  # noqa: E402

from pdmesh.kernels import flash_mla_backend, flashinfer_backend, hopper_mla, mla_reference  # noqa: E402
from pdmesh.kernels.quantised import pack_latents  # noqa: E402
from pdmesh.kernels.triton import mla_decode  # noqa: E402

PAGE, KV, LAYERS, MOST, SCALE = 64, 5000, 3, 128, 192**-0.5
PER = -(-KV // PAGE)
CASES = [(128, q, h) for h in (128, 64, 32, 16) for q in (2, 1, 4, 3)]
CASES += [(b, 2, h) for h in (128, 16) for b in (64, 32, 8, 1)]
"""Sequences, query rows of each, heads."""
Call = Callable[[int], Tensor]


def graph_time(call: Call, calls: int, replays: int = 7) -> float:
    """Microseconds a call, the i-th of the graph being call(i)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[replays // 2] * 1e3 / calls


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


class World:
    """A pool of MOST sequences of KV tokens in every format, pages in random order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = (MOST * PER, LAYERS, PAGE, 576)
        self.pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.packed = torch.cat([pack_latents(part) for part in self.pool.split(1024)])
        self.table = torch.randperm(MOST * PER, device="cuda").int().view(MOST, PER)
        self.workspace = torch.empty(
            flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"
        )


class Case:
    """`batch` sequences of KV tokens, `rows` query rows each. Call i reads layer i % LAYERS."""

    def __init__(self, world: World, batch: int, rows: int, heads: int) -> None:
        self.world, self.batch, self.rows, self.heads = world, batch, rows, heads
        self.lengths = torch.full((batch,), KV, dtype=torch.int32, device="cuda")
        tables = [t.contiguous() for t in world.table.split(batch) if t.shape[0] == batch]
        self.tables = tables[:8]
        self.calls = LAYERS * len(self.tables)
        self.query = torch.randn(batch * rows, heads, 576, device="cuda", dtype=torch.bfloat16)
        self.out = self.query.new_empty((batch * rows, heads, 512))

    def table(self, i: int) -> Tensor:
        return self.tables[i // LAYERS % len(self.tables)]

    def arguments(self, i: int, pool: Tensor) -> tuple[Any, ...]:
        return self.query, pool[:, i % LAYERS], self.table(i), self.lengths, self.rows, SCALE

    def split(self, module: Any, pool: Tensor, **options: Any) -> Call:
        """A backend of ours: with partial results in a workspace."""
        splits = -(-KV // module.split_tokens(KV, self.batch, self.rows * self.heads))
        floats = splits * self.batch * self.rows * self.heads * 513
        space = torch.empty(floats, device="cuda")

        def call(i: int) -> Tensor:
            given = {"out": self.out, "max_length": KV, "workspace": space, **options}
            return module.mla_decode(*self.arguments(i, pool), **given)  # type: ignore[no-any-return]

        return call

    def flash_mla(self) -> Call:
        plan = flash_mla_backend.Plan(self.lengths, self.rows, self.heads)
        return lambda i: plan.decode(*self.arguments(i, self.world.pool))

    def flashinfer(self) -> Call:
        wrappers = []
        for table in self.tables:
            wrapper = flashinfer_backend.Decode(self.world.workspace, self.batch, PER, graph=True)
            sizes = self.lengths.cpu()
            wrapper.plan(table.cpu(), sizes, self.rows, self.heads, PAGE, SCALE)
            wrappers.append(wrapper)

        def call(i: int) -> Tensor:
            wrapper = wrappers[i // LAYERS % len(wrappers)]
            return wrapper.run(self.query, self.world.pool[:, i % LAYERS], out=self.out)

        return call

    def backends(self) -> dict[str, tuple[str | None, Tensor, Callable[[], Call]]]:
        """By name: why it is not there, the pool it reads, what makes its call."""
        pool, packed = self.world.pool, self.world.packed
        absent = hopper_mla.unavailable()
        return {
            "FlashMLA": (flash_mla_backend.unavailable(), pool, self.flash_mla),
            "FlashInfer": (flashinfer_backend.unavailable(), pool, self.flashinfer),
            "Triton": (None, pool, lambda: self.split(mla_decode, pool)),
            "Triton-656": (None, packed, lambda: self.split(mla_decode, packed)),
            "CUDA-656": (absent, packed, lambda: self.split(hopper_mla, packed)),
        }

    def errors(self, got: Tensor, pool: Tensor) -> list[float]:
        """Of the first sequences of call 1: against what it read and against bfloat16."""
        few = min(self.batch, 4)
        found = []
        for read in (pool, self.world.pool):
            wanted = mla_reference.mla_decode(
                self.query[: few * self.rows],
                read[:, 1],
                self.tables[0][:few],
                self.lengths[:few],
                self.rows,
                SCALE,
            )
            found.append(relative(got[: few * self.rows], wanted))
        return found


def measure(case: Case, only: str, without: str) -> list[dict[str, Any]]:
    """A row for every backend of a case."""
    found = []
    for name, (why, pool, make) in case.backends().items():
        if only not in name or (without and without in name):
            continue
        row = {"batch": case.batch, "q": case.rows, "heads": case.heads, "backend": name}
        try:
            if why:
                raise RuntimeError(why)
            case.out.fill_(float("nan"))
            call = make()
            exact, unquantised = case.errors(call(1).clone(), pool)
            us = graph_time(call, case.calls)
            flop = 2 * case.batch * case.rows * case.heads * KV * 1088
            size = case.batch * KV * pool.shape[-1] * pool.element_size()
            row |= {
                "us": f"{us:.1f}",
                "tflops": f"{flop / us / 1e6:.0f}",
                "tb_s": f"{size / us / 1e6:.2f}",
                "error": f"{exact:.1e}",
                "error_unquantised": f"{unquantised:.1e}",
            }
        except Exception as error:  # noqa: BLE001 - a library's own errors are of any type
            row["us"] = f"failed: {type(error).__name__}: {error!s:.100}"
        found.append(row)
    return found


def main() -> None:
    """Runs all cases."""
    parser = command_line.parser(__doc__, "standard output, and to files in --out")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", ".")),
        help="folder of the files; also $OUT",
    )
    parser.add_argument("--only", default="", help="backends whose name has this")
    parser.add_argument("--without", default="", help="no backends whose name has this")
    options = parser.parse_args()
    world = World()
    names = ["batch", "q", "heads", "backend", "us", "tflops", "tb_s", "error", "error_unquantised"]
    with open(options.out / f"gpu_mla{options.only}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for batch, q, heads in CASES:
            found = measure(Case(world, batch, q, heads), options.only, options.without)
            cells = [" ".join(str(v) for v in list(row.values())[3:]) for row in found]
            print(f"b{batch} q{q} h{heads}: " + " | ".join(cells), flush=True)
            writer.writerows(found)
            file.flush()


if __name__ == "__main__":
    main()
