"""Tries tiles of the Triton products: child processes compile and check them, one times them."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import as_json
from gemm_cases import (
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

from pdmesh.kernels import cuda_gemm
from pdmesh.kernels.gemm_config import ClusterTile, SplitConfig, cluster_stages
from pdmesh.kernels.quantised import dequantise_rows
from pdmesh.kernels.triton import absorbed
from pdmesh.kernels.triton.absorbed import HeadConfig
from pdmesh.kernels.triton.splitk_gemm import fp8_gemm, shared_workspace

WORST = {"dense": 5e-3, "cuda": 5e-3, "absorb": 5e-2, "project": 7e-2}


class Candidate(NamedTuple):
    op: str
    name: str
    m: int
    shape: tuple[int, ...]
    config: tuple[Any, ...]

    @property
    def key(self) -> str:
        return json.dumps(self)

    @property
    def case(self) -> tuple[str, str, int]:
        return self.op, self.name, self.m


def dense_tiles(m: int) -> list[tuple[int, int, int, int, bool]]:
    """(block_m, block_n, warps, stages, swap)"""
    if m <= 32:
        block = 16 if m <= 16 else 32
        return [
            (block, 64, 4, 6, True),
            (block, 128, 4, 5, True),
            (block, 128, 8, 6, True),
            (block, 64, 4, 10, True),
        ]
    if m <= 64:
        return [
            (64, 64, 4, 4, False),
            (64, 64, 4, 6, True),
            (64, 128, 4, 4, False),
            (64, 128, 8, 4, True),
            (32, 128, 4, 4, True),
        ]
    if m <= 128:
        return [
            (128, 64, 4, 4, False),
            (128, 64, 8, 4, False),
            (64, 64, 4, 5, False),
            (64, 128, 4, 4, False),
            (128, 128, 8, 4, False),
            (128, 64, 4, 4, True),
            (128, 128, 8, 5, True),
        ]
    return [
        (128, 128, 8, 4, False),
        (128, 128, 8, 6, False),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, False),
        (256, 64, 8, 4, False),
        (64, 128, 4, 4, False),
        (128, 128, 8, 5, True),
        (64, 128, 8, 4, True),
    ]


def dense_candidates(m: int, n: int, k: int) -> Iterator[SplitConfig]:
    for number, (block_m, block_n, warps, stages, swap) in enumerate(dense_tiles(m)):
        tiles = -(-m // block_m) * -(-n // block_n)
        seen: set[int] = set()
        for programs in (132, 264, 400):
            split = max(1, min(programs // tiles, k // 384))
            if split in seen or (split - 1) * tiles * block_m * block_n > 8 << 20:
                continue
            seen.add(split)
            yield SplitConfig(block_m, block_n, split, warps, stages, swap)
            if number == 0:
                yield SplitConfig(block_m, block_n, split, warps, stages, swap, True, True)
                if programs == 132:
                    yield SplitConfig(block_m, block_n, split, warps, stages, swap, False)


ABSORB = [
    *[(128, 128, c, 8, s, True, False) for c, s in ((1, 2), (1, 3), (2, 2), (4, 1))],
    *[(128, 64, c, 4, s, True, False) for c, s in ((1, 3), (2, 3), (8, 1))],
    *[(64, 128, c, 4, s, True, False) for c, s in ((1, 2), (1, 3), (2, 2), (4, 1))],
    *[(64, 64, c, 4, s, True, False) for c, s in ((1, 3), (2, 2), (8, 1))],
    *[(64, 256, c, 8, s, True, False) for c, s in ((1, 2), (2, 1))],
    *[(b, n, c, w, 2, True, True) for b, n, c, w in ((64, 64, 4, 4), (64, 128, 2, 8))],
    *[(128, 128, c, 8, 2, True, True) for c in (1, 2)],
    *[(128, 128, c, 8, s, False, False) for c, s in ((1, 2), (1, 3), (4, 1))],
    *[(64, 128, c, 4, s, False, False) for c, s in ((1, 2), (2, 2), (4, 1))],
    (64, 128, 2, 4, 2, False, True),
]
PROJECT = [
    *[(128, 128, 1, 8, s, True, False) for s in (2, 3)],
    *[(64, 128, 1, 4, s, True, False) for s in (2, 3, 4)],
    *[(64, 128, 1, 8, s, True, False) for s in (3, 4)],
    *[(64, 128, 1, 8, s, True, True) for s in (2, 3)],
    *[(32, 128, 1, w, s, True, True) for w, s in ((4, 3), (8, 4))],
    (128, 128, 1, 8, 2, True, True),
    *[(64, 128, 1, 4, s, False, False) for s in (2, 3, 4)],
    *[(128, 128, 1, 8, s, False, False) for s in (2, 3)],
    (64, 128, 1, 8, 3, False, True),
]


def candidates(rows_tried: list[int]) -> list[Candidate]:
    """In turn over the cases, so that a cut-off list still has some of each."""
    lists: list[list[Candidate]] = []
    for heads in (128, 16):
        for m in (256, 128):
            lists.append([Candidate("absorb", f"{heads} heads", m, (heads,), c) for c in ABSORB])
            lists.append([Candidate("project", f"{heads} heads", m, (heads,), c) for c in PROJECT])
    for m in rows_tried:
        for name, (n, k) in SHAPES.items():
            lists.append(
                [Candidate("dense", name, m, (n, k), tuple(c)) for c in dense_candidates(m, n, k)]
            )
    longest = max(len(part) for part in lists)
    return [part[i] for i in range(longest) for part in lists if i < len(part)]


Cut = tuple[Any, ...]
"""block_n, split, pair, and "short" if it is."""
CLUSTERS: dict[str, tuple[list[Cut], list[Cut], list[Cut]]] = {
    "qkv_a": (
        [(64, 2, 1), (72, 2, 2), (136, 4, 2), (72, 2, 1)],
        [(72, 4, 1), (32, 2, 1), (40, 2, 1), (64, 2, 1), (88, 4, 1)],
        [(72, 4, 1, "short"), (32, 2, 1, "short"), (40, 2, 1, "short"), (88, 4, 1, "short")],
    ),
    "shared up": (
        [(128, 2, 1), (64, 1, 2), (72, 1, 2)],
        [(64, 2, 1), (72, 2, 1), (136, 4, 1), (32, 1, 1)],
        [(64, 2, 1, "short"), (72, 2, 1, "short"), (136, 4, 1, "short"), (32, 1, 1)],
    ),
    "shared down": (
        [(128, 1, 2), (112, 1, 2), (112, 1, 1)],
        [(56, 1, 1), (112, 2, 1), (64, 1, 1)],
        [(112, 2, 1, "short"), (56, 1, 1), (64, 1, 1)],
    ),
    "q_b": (
        [(128, 1, 2), (128, 1, 1)],
        [
            (96, 1, 1),
            (128, 1, 1),
        ],
        [(96, 1, 1), (128, 1, 1), (64, 1, 1)],
    ),
    "o_proj": (
        [
            (112, 1, 2),
            (128, 1, 2),
        ],
        [(112, 2, 1), (128, 2, 1), (56, 1, 1)],
        [(112, 2, 1, "short"), (128, 2, 1, "short"), (56, 1, 1)],
    ),
}
"""Tiles of the CUDA product: of more than 128 rows, of more than 64, and of fewer."""


def cluster_candidates(rows_tried: list[int]) -> list[Candidate]:
    """As dependents, which is how a model launches them."""
    every = []
    for m in rows_tried:
        for name, cuts in CLUSTERS.items():
            for block, split, pair, *form in cuts[(m <= 128) + (m <= 64)]:
                stages = cluster_stages(block, split, "short" in form)
                tile = ClusterTile(block, split, pair, stages, "short" in form)
                every.append(Candidate("cuda", name, m, SHAPES[name], (*tile, True)))
    return sorted(every, key=lambda c: c.config[:-1])


def operands(c: Candidate, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device
    if c.op in ("dense", "cuda"):
        n, k = c.shape
        return rows(generator, c.m, k), weight(generator, n, k)
    heads = c.shape[0]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    if c.op == "absorb":
        whole = normal(c.m, heads, NOPE + ROPE)
        return whole[..., :NOPE], weight(generator, heads, RANK, NOPE), whole[..., NOPE:]
    return normal(c.m, heads, RANK), weight(generator, heads, VALUE, RANK)


def exact(c: Candidate, given: tuple[Any, ...]) -> torch.Tensor:
    if c.op in ("dense", "cuda"):
        return exact_rows(given[0]) @ exact_weight(given[1]).t()
    wide = exact_weight(given[1])
    if c.op == "absorb":
        latent = torch.einsum("mhd,hrd->mhr", given[0].double(), wide)
        return torch.cat([latent, given[2].double()], dim=-1) * 0.1
    return torch.einsum("mhr,hvr->mhv", given[0].double(), wide).flatten(1)


def run(c: Candidate, given: tuple[Any, ...], out: Any = None) -> Any:
    if c.op == "dense":
        return fp8_gemm(*given, out=out, config=SplitConfig(*c.config))
    if c.op == "cuda":
        return cuda_gemm.fp8_gemm(
            *given, out=out, tile=ClusterTile(*c.config[:-1]), dependent=c.config[-1]
        )
    if c.op == "absorb":
        return absorbed.absorb_query(*given, 0.1, out=out, config=HeadConfig(*c.config))
    return absorbed.project_values_quantise(*given, out=out, config=HeadConfig(*c.config))


def limit(c: Candidate) -> float:
    if c.op in ("dense", "cuda"):
        return dense_limit(c.m, *c.shape)
    return (absorb_limit if c.op == "absorb" else project_limit)(c.m, *c.shape)


def _check(mine: Sequence[Candidate], path: Path) -> None:
    """In a child: compiles and runs each against float64, and writes its error."""
    generator = torch.Generator("cuda").manual_seed(os.getpid())
    known: dict[Any, tuple[Any, torch.Tensor]] = {}
    with path.open("w") as file:
        for c in mine:
            if c.case not in known:
                given = operands(c, generator)
                known[c.case] = given, exact(c, given)
            given, wanted = known[c.case]
            try:
                poison(wanted)
                got, again = (plain(run(c, given)) for _ in range(2))
                error = relative_error(got, wanted)
                text = None if torch.equal(got, again) else "differs from run to run"
            except Exception as problem:  # noqa: BLE001 - a tile that does not fit is a result
                error, text = None, f"{type(problem).__name__}: {problem}"[:300]
            file.write(as_json([c.key, error, text]) + "\n")
            file.flush()


def start_check(every: list[Candidate], out: Path) -> list[Any]:
    """Children that check; must be called before CUDA is used here."""
    op = every[0].op
    for path in out.glob(f"checked_{op}*.jsonl"):
        path.unlink()
    return children(lambda number, mine: _check(mine, out / f"checked_{op}{number}.jsonl"), every)


def end_check(every: list[Candidate], jobs: list[Any], out: Path, s: float) -> dict[str, float]:
    """Errors of those that ran and are right, after s seconds at most."""
    failed = ended(jobs, s)
    right: dict[str, float] = {}
    problems = [f"{failed} children failed or took too long"] if failed else []
    for path in sorted(out.glob(f"checked_{every[0].op}*.jsonl")):
        for line in path.read_text().splitlines():
            key, error, text = json.loads(line)
            if text is None and error is not None and error <= WORST[json.loads(key)[0]]:
                right[key] = error
            else:
                problems.append(f"{key}: {error} {text}")
    lines = [f"{len(right)} of {len(every)} right; {len(problems)} problems", *problems[:12]]
    print("\n   ".join(line[:220] for line in lines), flush=True)
    (out / f"problems_{every[0].op}.txt").write_text("\n".join(problems))
    return right


def timed_case(
    mine: list[Candidate], generator: torch.Generator, seconds: float
) -> Iterator[tuple[float, Candidate]]:
    """Times of one case's candidates, as many as there is time for."""
    until = time.monotonic() + seconds
    first = mine[0]
    given = operands(first, generator)
    size = float(sum(t.numel() * t.element_size() for t in tensors(given)))
    one_output = first.op in ("dense", "cuda")
    sets = [given]
    while len(sets) < copies(size if one_output else 2 * size):
        sets.append(operands(first, generator))
    outputs = [run(first, given) for given in (sets[:1] if one_output else sets)]
    for c in mine:
        if time.monotonic() > until:
            return
        calls = [
            functools.partial(run, c, given, outputs[i % len(outputs)])
            for i, given in enumerate(sets)
        ]
        try:
            yield microseconds(calls, 5), c
        except RuntimeError as problem:
            print(f"{c.case} {c.config}: {str(problem)[:150]}")


def show_clusters() -> None:
    """How many clusters of each kind a device runs at a time."""
    tiles = (ClusterTile(128, 2, 1, 4), ClusterTile(72, 2, 2, 5))
    for tile in tiles:
        print(f"{tile}: {cuda_gemm.clusters(tile)} at a time", flush=True)


def tune(every: list[Candidate], right: dict[str, float], out: Path, seconds: float) -> None:
    shared_workspace(torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator("cuda").manual_seed(1)
    deadline = time.monotonic() + seconds
    cases = sorted({c.case for c in every}, key=lambda case: (case[1], -case[2], case[0]))
    left = [[c for c in every if c.case == case and c.key in right] for case in cases]
    with (out / "tune.csv").open("w") as file:
        for place, mine in enumerate(left):
            share = (deadline - time.monotonic()) / (len(left) - place)
            timed = []
            for took, c in timed_case(mine, generator, share) if mine else ():
                timed.append((took, c))
                file.write(f"{c.op},{c.name},{c.m},{took:.2f},{right[c.key]:.2e},{c.config}\n")
            file.flush()
            show(timed, len(mine), right)


def plain(result: Any) -> torch.Tensor:
    return result if torch.is_tensor(result) else dequantise_rows(result)


def tensors(given: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for item in given:
        if torch.is_tensor(item):
            yield item
        else:
            yield from item


def show(timed: list[tuple[float, Candidate]], known: int, right: dict[str, float]) -> None:
    timed.sort(key=lambda pair: pair[0])
    for number, (took, c) in enumerate(timed[:3]):
        head = f"{c.op} {c.name} m={c.m} limit {limit(c):.1f} us, {len(timed)}/{known} tried"
        print(f"{head if number == 0 else '':58} {took:7.2f} us {right[c.key]:.1e} {c.config}")
    if timed:
        print(f"{'':58} worst {timed[-1][0]:.2f} {timed[-1][1].config}", flush=True)
