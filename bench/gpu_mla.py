"""Latent attention on a GPU: correctness against float64, then times in CUDA graphs.

    python -m pdmesh.bench.gpu_mla decode|tune|prefill|chunks [--out FOLDER]

Every call reads another layer or other sequences, so that nothing comes from the L2 cache. A time
is the median over graph replays, divided by the calls in the graph.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels import flash_mla_backend, flashinfer_backend, hopper_mla, mla_reference
from pdmesh.kernels.quantised import pack_latents
from pdmesh.kernels.triton import mla_decode, mla_prefill

PAGE, KV, LAYERS, MOST, SCALE = 64, 5000, 3, 128, 192**-0.5
PER = -(-KV // PAGE)
Call = Callable[[int], Tensor]
ROWS: list[dict[str, Any]] = []


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
    """A pool of MOST sequences of KV tokens in both formats, pages in random order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = (MOST * PER, LAYERS, PAGE, 576)
        self.pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        packed = [pack_latents(part) for part in self.pool.split(1024)]
        self.packed = torch.cat(packed)
        self.plain = self.pool.to(torch.float8_e4m3fn)
        self.table = torch.randperm(MOST * PER, device="cuda").int().view(MOST, PER)
        self.workspace = torch.empty(
            flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"
        )

    def tables(self, batch: int) -> list[Tensor]:
        return [t.contiguous() for t in self.table.split(batch) if t.shape[0] == batch][:8]


def decoders(world: World, batch: int, rows: int, heads: int) -> dict[str, tuple[Call, Tensor]]:
    """Calls by backend, and the pool that each reads. Call i reads layer i % LAYERS."""
    lengths = torch.full((batch,), KV, dtype=torch.int32, device="cuda")
    tables = world.tables(batch)
    query = torch.randn(batch * rows, heads, 576, device="cuda", dtype=torch.bfloat16)
    world.query = query
    out = query.new_empty((batch * rows, heads, 512))
    found: dict[str, tuple[Call, Tensor]] = {}

    def pick(i: int) -> tuple[int, Tensor]:
        return i % LAYERS, tables[i // LAYERS % len(tables)]

    def generic(packed: bool) -> Call:
        pool = world.packed if packed else world.pool
        splits = -(-KV // mla_decode.split_tokens(KV, batch, rows * heads))
        space = torch.empty(
            mla_decode.workspace_floats(batch * rows, heads, 512, splits), device="cuda"
        )

        def call(i: int) -> Tensor:
            layer, table = pick(i)
            return mla_decode.mla_decode(
                query,
                pool[:, layer],
                table,
                lengths,
                rows,
                SCALE,
                out=out,
                max_length=KV,
                workspace=space,
            )

        return call

    found["triton bf16"] = generic(False), world.pool
    found["triton 656"] = generic(True), world.packed
    if not hopper_mla.unavailable():
        splits = -(-KV // hopper_mla.split_tokens(KV, batch, rows * heads))
        space = torch.empty(splits * batch * rows * heads * 513, device="cuda")

        def own(i: int) -> Tensor:
            layer, table = pick(i)
            return hopper_mla.mla_decode(
                query,
                world.packed[:, layer],
                table,
                lengths,
                rows,
                SCALE,
                out=out,
                max_length=KV,
                workspace=space,
            )

        found["own 656"] = own, world.packed
    if not flash_mla_backend.unavailable():
        plan = flash_mla_backend.Plan(lengths, rows, heads)

        def flash(i: int) -> Tensor:
            layer, table = pick(i)
            return plan.decode(query, world.pool[:, layer], table, lengths, rows, SCALE)

        found["FlashMLA bf16"] = flash, world.pool
        eighth = flash_mla_backend.Plan(lengths, rows, heads, fp8=True)
        narrow = query.to(torch.float8_e4m3fn)
        one = torch.ones(1, device="cuda")

        def flash8(i: int) -> Tensor:
            layer, table = pick(i)
            pages = world.plain[:, layer]
            return eighth.decode(narrow, pages, table, lengths, rows, SCALE, descale=(one, one))

        found["FlashMLA fp8"] = flash8, world.plain
    if not flashinfer_backend.unavailable():
        wrappers = []
        for table in tables:
            wrapper = flashinfer_backend.Decode(world.workspace, batch, PER, graph=True)
            wrapper.plan(table.cpu(), lengths.cpu(), rows, heads, PAGE, SCALE)
            wrappers.append(wrapper)

        def infer(i: int) -> Tensor:
            return wrappers[i // LAYERS % len(tables)].run(
                query, world.pool[:, i % LAYERS], out=out
            )

        found["FlashInfer bf16"] = infer, world.pool
    return found


def decode(world: World, cases: list[tuple[int, int, int]]) -> None:
    """One row a case (batch, q, heads): microseconds, TFLOP/s and error of every backend."""
    for batch, rows, heads in cases:
        line = []
        lengths = torch.full((batch,), KV, dtype=torch.int32, device="cuda")
        for name, (call, pool) in decoders(world, batch, rows, heads).items():
            try:
                few = min(batch, 4)
                got = call(1)[: few * rows].clone()
                table = world.tables(batch)[0]
                wrong = [
                    relative(
                        got,
                        mla_reference.mla_decode(
                            world.query[: few * rows],
                            read[:, 1].bfloat16() if read is world.plain else read[:, 1],
                            table[:few],
                            lengths[:few],
                            rows,
                            SCALE,
                        ),
                    )
                    for read in (pool, world.pool)
                ]
                count = LAYERS * len(world.tables(batch))
                us = graph_time(call, count)
            except Exception as error:
                line.append(f"{name} FAILED {error!s:.80}")
                traceback.print_exc(limit=3, file=sys.stderr)
                continue
            flop = 2 * batch * rows * heads * KV * 1088
            ROWS.append(
                {
                    "part": "decode",
                    "batch": batch,
                    "q": rows,
                    "heads": heads,
                    "backend": name,
                    "us": round(us, 1),
                    "tflops": round(flop / us / 1e6, 1),
                    "error": f"{wrong[0]:.2e}",
                    "error_unquantised": f"{wrong[1]:.2e}",
                }
            )
            line.append(f"{name} {us:.1f} ({flop / us / 1e6:.0f}T {wrong[0]:.1e} {wrong[1]:.1e})")
        print(f"b{batch} q{rows} h{heads}: " + " | ".join(line), flush=True)


def tune(world: World) -> None:
    """Program sizes of the Triton kernel, few and many heads, both formats."""
    sizes = [(64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1), (32, 32, 4, 2)]
    few = [(16, 32, 4, 2), (16, 64, 4, 2), (16, 32, 4, 3), (16, 64, 8, 2), (16, 32, 8, 2)]
    for batch, rows, heads, table in ((128, 2, 128, sizes), (32, 1, 16, few), (1, 1, 128, sizes)):
        lengths = torch.full((batch,), KV, dtype=torch.int32, device="cuda")
        query = torch.randn(batch * rows, heads, 576, device="cuda", dtype=torch.bfloat16)
        tables = world.tables(batch)
        for pool in (world.pool, world.packed):
            line = []
            for size in table:

                def call(i: int, pool: Tensor = pool, size: Any = size) -> Tensor:
                    return mla_decode.mla_decode(
                        query,
                        pool[:, i % LAYERS],
                        tables[i // LAYERS % len(tables)],
                        lengths,
                        rows,
                        SCALE,
                        max_length=KV,
                        tuning=mla_decode.Tuning(*size),
                    )

                try:
                    line.append(f"{size} {graph_time(call, 3 * len(tables), 3):.0f}")
                except Exception as error:
                    line.append(f"{size} {error!s:.50}")
            kind = "656" if pool is world.packed else "bf16"
            print(f"tune b{batch} q{rows} h{heads} {kind}: " + " | ".join(line), flush=True)


class Heads:
    """Up-projections of 128 heads. The key one takes the rotated values through an identity, so
    that one product writes keys [n, heads, 192] and nothing has to be copied."""

    def __init__(self, heads: int = 128) -> None:
        self.heads = heads
        self.key = torch.zeros(heads, 192, 576, device="cuda", dtype=torch.bfloat16)
        self.key[:, :128, :512] = torch.randn(heads, 128, 512, device="cuda") / 22.6
        self.key[:, 128:, 512:] = torch.eye(64, device="cuda")
        self.value = torch.randn(heads, 128, 512, device="cuda").div(22.6).bfloat16()

    def keys_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        n = latent.shape[0]
        key = (latent @ self.key.view(-1, 576).t()).view(n, self.heads, 192)
        value = (latent[:, :512] @ self.value.view(-1, 512).t()).view(n, self.heads, 128)
        return key, value


def event_time(call: Callable[[], Any], repeats: int = 3) -> float:
    """Milliseconds, the median; for what takes milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def starts(count: int) -> Tensor:
    return torch.tensor([0, count], dtype=torch.int32)


def prefill(space: Tensor) -> None:
    """MHA form, with its up-projection, against the absorbed form, with its two products."""
    weights = Heads()
    for n in (4096, 16384):
        latent = torch.randn(n, 576, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(n, 128, 192, device="cuda", dtype=torch.bfloat16)
        key, value = weights.keys_values(latent)
        wrapper = flashinfer_backend.Prefill(space)
        wrapper.plan(starts(n), starts(n), 128, (192, 128), SCALE)
        got = wrapper.run(query, key, value)
        some = slice(n - 64, n)
        wanted = mla_reference.mla_prefill(
            query[some, :4], key[:, :4], value[:, :4], starts(64), starts(n), SCALE
        )
        mha = event_time(lambda: wrapper.run(query, key, value))
        up = event_time(lambda: weights.keys_values(latent))
        q_starts = starts(n).cuda()
        generic = {}
        for size in ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)):
            options = dict(zip(("block_m", "block_n", "warps", "stages"), size, strict=True))

            def triton(options: Any = options) -> Tensor:
                return mla_prefill.mla_prefill(
                    query, key, value, q_starts, q_starts, SCALE, **options
                )

            try:
                generic[size] = round(event_time(triton, 1), 3)
                off = relative(triton()[some, :4], wanted)
            except Exception as error:
                generic[size] = f"{error!s:.40}"
        pool = latent.new_zeros((n // PAGE, 1, PAGE, 576))
        pool.view(n, 576).copy_(latent)
        table = torch.arange(n // PAGE, dtype=torch.int32, device="cuda").view(1, -1)
        wide = torch.randn(n, 128, 576, device="cuda", dtype=torch.bfloat16)
        absorbed = absorbed_times(space, wide, pool[:, 0], table)
        nope, seen = query[..., :128].transpose(0, 1), wide[..., :512].transpose(0, 1)
        both = event_time(
            lambda: (
                torch.bmm(nope, weights.key[:, :128, :512]),
                torch.bmm(seen, weights.value.transpose(1, 2)),
            )
        )
        best = min(absorbed.values())
        flop = 2 * 128 * 320 * n * n / 2
        print(
            f"prefill {n}: MHA FlashInfer {mha:.3f} ms ({flop / mha / 1e9:.0f}T, error "
            f"{relative(got[some, :4], wanted):.1e}) + up {up:.3f}; Triton {generic} error "
            f"{off:.1e}; absorbed {absorbed} + products {both:.3f}; attention "
            f"{best / mha:.2f}x, with projections {(best + both) / (mha + up):.2f}x",
            flush=True,
        )
        ROWS.append({"part": "prefill", "batch": n, "us": mha * 1e3, "up": up * 1e3, **absorbed})


def absorbed_times(space: Tensor, wide: Tensor, pages: Tensor, table: Tensor) -> dict[str, float]:
    """Milliseconds of the absorbed form's core: 64 rows at a time are one sequence of a batch."""
    count = wide.shape[0] // 64
    lengths = torch.arange(1, count + 1, dtype=torch.int32, device="cuda") * 64
    tables = table.repeat(count, 1)
    times = {}
    plan = flash_mla_backend.Plan(lengths, 64, 128)
    reader = flashinfer_backend.Decode(space, count, table.shape[1])
    calls: dict[str, Callable[[], Tensor]] = {
        "FlashMLA": lambda: plan.decode(wide, pages, tables, lengths, 64, SCALE),
        "FlashInfer": lambda: reader.run(wide, pages),
    }
    for name, call in calls.items():
        try:
            if name == "FlashInfer":
                reader.plan(tables.cpu(), lengths.cpu(), 64, 128, PAGE, SCALE)
            times[name] = event_time(call)
        except Exception as error:
            print(f"absorbed {name}: {error!s:.200}")
    return times


def chunks(space: Tensor, total: int = 32768) -> None:
    """Chunked prefill of one prompt in MHA form: keys are projected again for every chunk."""
    weights = Heads()
    latent = torch.randn(total, 576, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(total, 128, 192, device="cuda", dtype=torch.bfloat16)
    base = 0.0
    for chunk in (total, 8192, 4096, 2048, 1024, 512):
        wrappers = []
        for end in range(chunk, total + 1, chunk):
            wrapper = flashinfer_backend.Prefill(space)
            wrapper.plan(starts(chunk), starts(end), 128, (192, 128), SCALE)
            wrappers.append(wrapper)

        def attend(chunk: int = chunk, wrappers: Any = wrappers) -> None:
            for i, wrapper in enumerate(wrappers):
                key, value = weights.keys_values(latent[: (i + 1) * chunk])
                wrapper.run(query[i * chunk : (i + 1) * chunk], key, value)

        ms = event_time(attend, 1)
        base = base or ms
        print(f"chunk {chunk} of {total}: {ms:.1f} ms, x{ms / base:.2f}", flush=True)
        ROWS.append({"part": "chunks", "batch": chunk, "us": ms * 1e3})


def main() -> None:
    """Runs the parts named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    begin = time.monotonic()
    cases = [(128, q, h) for h in (128, 64, 32, 16) for q in (2, 1, 4, 3)]
    cases += [(b, 2, h) for h in (128, 16) for b in (64, 32, 8, 1)]
    space = torch.empty(flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for part in options.parts:
        if part in ("decode", "tune"):
            world = World()
            tune(world) if part == "tune" else decode(world, cases)
            del world
        elif part == "prefill":
            prefill(space)
        else:
            chunks(space)
        torch.cuda.empty_cache()
        print(f"-- {part}: {time.monotonic() - begin:.0f} s", flush=True)
    names = list(dict.fromkeys(name for row in ROWS for name in row))
    with open(options.out / "gpu_mla.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(ROWS)


if __name__ == "__main__":
    main()
