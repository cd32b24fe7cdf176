"""The matrix products of the H200 path: every backend against float64, and timed in CUDA graphs.

    python -P bench/gpu_gemm.py [--rows 256,128,64,16,1] [--tune] [--only TEXT]

Needs a CUDA device. Weights are rotated so that the L2 cache does not hold them. The limit is the
larger of bytes at 4.3 TB/s and products at 1300 TFLOP/s. Files go to $OUT (or .).
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath"), str(ROOT / "bench")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from gemm_cases import (  # noqa: E402
    NOPE,
    RANK,
    ROPE,
    SHAPES,
    VALUE,
    absorb_limit,
    children,
    copies,
    dense_limit,
    ended,
    exact_rows,
    exact_weight,
    microseconds,
    poison,
    project_limit,
    relative_error,
    rows,
    weight,
)
from gemm_sorted import compile_sorted, measure_few, measure_sorted, sorted_tasks  # noqa: E402

from pdmesh.kernels import (  # noqa: E402
    cublaslt_backend,
    cuda_absorbed,
    cuda_gemm,
    deep_gemm_backend,
)
from pdmesh.kernels.quantised import BlockWeight, Rows, dequantise_rows  # noqa: E402
from pdmesh.kernels.triton import absorbed, grouped_gemm, splitk_gemm  # noqa: E402


class Table:
    """Prints a line a measurement and keeps them for a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["case", "rows", "backend", "us", "limit_us", "error"])

    def measure(
        self,
        case: str,
        m: int,
        backend: str,
        limit: float,
        product: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        exact: torch.Tensor,
        compared: Callable[[Any], torch.Tensor] = lambda result: result,
    ) -> None:
        """`product` of every set of operands; what `compared` takes of the first one's result."""
        try:
            poison(exact)
            wrong = relative_error(compared(product(*sets[0])), exact)
            took = microseconds([functools.partial(product, *given) for given in sets])
        except Exception as problem:  # noqa: BLE001 - one backend's failure is a line of the table
            print(f"{case:28}{m:5} {backend:12} {type(problem).__name__}: {str(problem)[:120]}")
            return
        self.writer.writerow([case, m, backend, f"{took:.2f}", f"{limit:.2f}", f"{wrong:.2e}"])
        self.file.flush()
        print(
            f"{case:28}{m:5} {backend:12}{took:8.2f} us  limit {limit:7.2f} ({limit / took:4.0%})"
            f"  error {wrong:.1e}",
            flush=True,
        )


def dense(table: Table, generator: torch.Generator, rows_tried: list[int]) -> None:
    backends: dict[str, Callable[..., torch.Tensor]] = {
        "deep_gemm": deep_gemm_backend.fp8_gemm,
        "cublaslt": cublaslt_backend.fp8_gemm,
        "split": splitk_gemm.fp8_gemm,
        "cluster": cuda_gemm.fp8_gemm,
        "cluster pdl": functools.partial(cuda_gemm.fp8_gemm, dependent=True),
    }
    for name, (n, k) in SHAPES.items():
        weights = [weight(generator, n, k) for _ in range(copies(n * k))]
        wide = exact_weight(weights[0]).t()
        for m in rows_tried:
            x = rows(generator, m, k)
            exact, case, limit = exact_rows(x) @ wide, f"{name} {n} x {k}", dense_limit(m, n, k)
            for backend, product in backends.items():
                sets = [(x, w) for w in weights]
                table.measure(case, m, backend, limit, product, sets, exact)


GROUPS = [
    (experts, m, n, k)
    for experts, m in ((2, 1024), (32, 64), (32, 128), (32, 16))
    for n, k in ((4096, 7168), (7168, 2048))
]


def compile_deep_gemm(number: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """In a child: it compiles a kernel when a shape first comes, and keeps it on disk."""
    if deep_gemm_backend.unavailable():
        return
    generator = torch.Generator("cuda").manual_seed(number)
    for experts, m, n, k in shapes:
        if experts:
            x, w = rows(generator, experts, m, k), weight(generator, experts, n, k)
            counts = torch.full((experts,), m, dtype=torch.int32, device="cuda")
            deep_gemm_backend.masked_grouped_gemm(x, w, counts, m)
        else:
            deep_gemm_backend.fp8_gemm(rows(generator, m, k), weight(generator, n, k))
    torch.cuda.synchronize()


def plain_bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), w.transpose(1, 2)).transpose(0, 1)


def heads(table: Table, generator: torch.Generator, rows_tried: list[int]) -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    modules: dict[str, Any] = {"triton": absorbed, "cuda": cuda_absorbed}
    modules["cuda pdl"] = argparse.Namespace(
        absorb_query=functools.partial(cuda_absorbed.absorb_query, next_may_begin=True),
        project_values_quantise=functools.partial(
            cuda_absorbed.project_values_quantise, dependent=True
        ),
    )
    for count, m in itertools.product((128, 16), rows_tried):
        places = range(copies(count * (RANK * NOPE + 4 * m * (NOPE + ROPE + RANK))))
        case, limit = f"absorb {count} heads", absorb_limit(m, count)
        whole = [normal(m, count, NOPE + ROPE) for _ in places]
        query = [q[..., :NOPE] for q in whole]
        weights = [weight(generator, count, RANK, NOPE) for _ in places]
        exact = torch.einsum("mhd,hrd->mhr", query[0].double(), exact_weight(weights[0]))
        sets = [(q, w, r[..., NOPE:], 1.0) for q, w, r in zip(query, weights, whole, strict=True)]
        for backend, module in modules.items():
            product = module.absorb_query
            table.measure(case, m, backend, limit, product, sets, exact, lambda y: y[..., :RANK])
        plain = [(q, exact_weight(w).bfloat16()) for q, w in zip(query, weights, strict=True)]
        table.measure(case, m, "torch bf16", limit, plain_bmm, plain, exact)

        case, limit = f"project {count} heads", project_limit(m, count)
        latent = [normal(m, count, RANK) for _ in places]
        weights = [weight(generator, count, VALUE, RANK) for _ in places]
        exact = torch.einsum("mhr,hvr->mhv", latent[0].double(), exact_weight(weights[0]))
        sets = list(zip(latent, weights, strict=True))
        flat = exact.flatten(1)
        for backend, module in modules.items():
            product = module.project_values_quantise
            table.measure(case, m, backend, limit, product, sets, flat, dequantise_rows)
        plain = [(x, exact_weight(w).bfloat16()) for x, w in zip(latent, weights, strict=True)]
        table.measure(case, m, "torch bf16", limit, plain_bmm, plain, exact)


def grouped(table: Table, generator: torch.Generator) -> None:
    backends: dict[str, Any] = {"deep_gemm": deep_gemm_backend, "triton": grouped_gemm}
    for experts, m, n, k in GROUPS:
        case, limit = f"{experts} experts {n} x {k}", experts * dense_limit(m, n, k)
        weights = [weight(generator, experts, n, k) for _ in range(copies(experts * n * k))]
        x = rows(generator, experts, m, k)
        counts = torch.full((experts,), m, dtype=torch.int32, device="cuda")
        ends = (0, experts - 1)
        exact = torch.stack(
            [
                exact_rows(Rows(x.values[e], x.scales[e]))
                @ exact_weight(BlockWeight(weights[0].values[e], weights[0].scales[e])).t()
                for e in ends
            ]
        )
        sets = [(x, w, counts, m) for w in weights]
        for backend, module in backends.items():
            product = module.masked_grouped_gemm
            table.measure(case, m, backend, limit, product, sets, exact, lambda y: y[[0, -1]])


def main() -> None:
    parser = command_line.parser(
        __doc__, "standard output, and to files in $OUT (without $OUT: here)"
    )
    parser.add_argument("--rows", default="256,128,64,16,1", help="rows of the dense products")
    parser.add_argument("--only", default="", help="cases whose operation begins so")
    parser.add_argument("--tune", action="store_true", help="try other tiles instead")
    parser.add_argument(
        "--check-seconds", type=float, default=60, help="of --tune, for correctness"
    )
    parser.add_argument("--time-seconds", type=float, default=40, help="of --tune, for times")
    given = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    rows_tried = [int(m) for m in given.rows.split(",")]
    wanted = [(0, m, n, k) for n, k in SHAPES.values() for m in rows_tried] + GROUPS
    compiling = [] if given.only else children(compile_deep_gemm, wanted)
    if "sorted".startswith(given.only):
        compiling += children(compile_sorted, sorted_tasks(given.tune))
    every: list[Any] = []
    right: dict[str, float] = {}
    if given.tune:
        from gemm_tune import (
            candidates,
            cluster_candidates,
            end_check,
            show_clusters,
            start_check,
            tune,
        )

        for tried in (cluster_candidates(rows_tried), candidates(rows_tried)):
            if mine := [c for c in tried if c.op.startswith(given.only)]:
                jobs = start_check(mine, out)
                right |= end_check(mine, jobs, out, given.check_seconds)
                every += mine
    failed = ended(compiling, given.check_seconds)
    print(f"DeepGEMM's kernels: {failed} children failed", flush=True)
    if every:
        show_clusters()
        tune(every, right, out, given.time_seconds)
    table = Table(out / "gemm.csv")
    generator = torch.Generator("cuda").manual_seed(0)
    splitk_gemm.shared_workspace(torch.device("cuda", torch.cuda.current_device()))
    for name, part in {
        "dense": lambda: dense(table, generator, rows_tried),
        "heads": lambda: heads(table, generator, [m for m in rows_tried if m >= 64]),
        "grouped": lambda: grouped(table, generator),
        "few": lambda: measure_few(table.measure, generator),
        "sorted": lambda: measure_sorted(table.measure, generator, given.tune),
    }.items():
        if name.startswith(given.only):
            part()


if __name__ == "__main__":
    main()
