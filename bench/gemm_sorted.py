"""Experts' products for bench/gpu_gemm.py with rows drawn at random: sorted, or few."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gemm_cases import BYTES_PER_S, FP8_PER_S, exact_rows, exact_weight, rows, weight
from torch import Tensor

from pdmesh.kernels import deep_gemm_backend
from pdmesh.kernels.quantised import BlockWeight, Rows
from pdmesh.kernels.routing import ALIGNMENT, contiguous_capacity
from pdmesh.kernels.triton import grouped_gemm
from pdmesh.kernels.triton.grouped_gemm import GroupedConfig

EXPERTS = {256: (16, 32, 64, 128, 256), 32: (64, 256, 1024)}
"""And rows that one has on average."""
FEW, ROWS = (256, 8), (1, 4, 16, 64, 256, 512)
"""Experts and choices of a row, and rows of a step."""
SHAPES = ((4096, 7168), (7168, 2048))
TILES = (
    GroupedConfig(16, 128, 4, 5, True, together=8),
    GroupedConfig(32, 128, 4, 5, True, together=4),
    GroupedConfig(32, 128, 4, 5, True, together=0),
    GroupedConfig(32, 128, 4, 4, True, together=4),
    GroupedConfig(64, 128, 4, 4, together=2),
    GroupedConfig(64, 128, 4, 4, True, together=2),
    GroupedConfig(64, 128, 8, 4, True, together=2),
    GroupedConfig(64, 128, 4, 5, together=2),
    GroupedConfig(64, 64, 4, 6, together=2),
    GroupedConfig(64, 128, 4, 4, together=8),
    GroupedConfig(128, 128, 8, 4, together=2),
    GroupedConfig(128, 128, 8, 3, together=2),
    GroupedConfig(128, 64, 4, 4, together=2),
    GroupedConfig(128, 128, 8, 4, together=8),
)
"""That `--tune` tries."""


def compile_sorted(number: int, tasks: Sequence[tuple[int, int, int, Any]]) -> None:
    """In a child: kernels are kept on disk. A task: experts, n, k, a tile (None: DeepGEMM's)."""
    if deep_gemm_backend.unavailable():
        return
    for experts, n, k, tile in tasks:
        values = torch.zeros(experts, n, k, dtype=torch.uint8, device="cuda")
        scales = torch.ones(experts, n // 128, k // 128, device="cuda")
        w = BlockWeight(values.view(torch.float8_e4m3fn), scales)
        generator = torch.Generator("cuda").manual_seed(number)
        expert = drawn(experts, 64, generator)
        x = rows(generator, len(expert), k)
        if tile is None:
            deep_gemm_backend.contiguous_grouped_gemm(x, w, expert)
        else:
            grouped_gemm.contiguous_grouped_gemm(x, w, expert, config=tile)
    torch.cuda.synchronize()


def sorted_tasks(tuned: bool) -> list[tuple[int, int, int, Any]]:
    """What `compile_sorted` compiles."""
    libraries = [(e, *shape, None) for e, shape in itertools.product(EXPERTS, SHAPES)]
    return libraries + [(32, *SHAPES[0], tile) for tile in (TILES if tuned else ())]


def drawn(experts: int, each: int, generator: torch.Generator) -> Tensor:
    """The expert of every row of the layout, -1 for padding: choices fall on any expert alike."""
    device = generator.device
    draw = torch.randint(experts, (experts * each,), generator=generator, device=device)
    counts = torch.bincount(draw, minlength=experts)
    spaces = -(-counts // ALIGNMENT) * ALIGNMENT
    ends = spaces.cumsum(0)
    row = torch.arange(contiguous_capacity(each, experts, experts), device=device)
    expert = torch.bucketize(row, ends, right=True).clamp_max(experts - 1)
    used = row < (ends - spaces + counts)[expert]
    return torch.where(used, expert, -1).int()


def ends_compared(x: Rows, w: BlockWeight, expert: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are compared, those of the first and the last expert that have any, and theirs."""
    first, last = int(expert[expert >= 0].min()), int(expert.max())
    made = expert.new_zeros((len(expert), w.values.shape[1]), dtype=torch.float64)
    for e in {first, last}:
        one = Rows(x.values[expert == e], x.scales[expert == e])
        made[expert == e] = exact_rows(one) @ exact_weight(BlockWeight(*(v[e] for v in w))).t()
    compared = (expert == first) | (expert == last)
    return compared, made[compared]


def measure_few(measure: Callable[..., None], generator: torch.Generator) -> None:
    """A step's few rows, each for eight of 256 experts, in the masked layout."""
    backends: dict[str, Callable[..., Tensor]] = {
        "deep_gemm": deep_gemm_backend.masked_grouped_gemm,
        "all looked at": lambda x, w, counts, expected, used: grouped_gemm.masked_grouped_gemm(
            x, w, counts, expected
        ),
        "used ones": grouped_gemm.masked_grouped_gemm,
    }
    experts, top = FEW
    for n, k in SHAPES:
        w = weight(generator, experts, n, k)
        for m in ROWS:
            space = -(-m // ALIGNMENT) * ALIGNMENT
            noise = torch.rand(m, experts, generator=generator, device=generator.device)
            counts = torch.bincount(noise.topk(top).indices.flatten(), minlength=experts).int()
            x = rows(generator, experts, space, k)
            there = torch.arange(space, device=counts.device) < counts[:, None]
            expert = torch.where(there, torch.arange(experts, device=counts.device)[:, None], -1)
            flat = Rows(x.values.flatten(0, 1), x.scales.flatten(0, 1))
            compared, exact = ends_compared(flat, w, expert.flatten())
            limit = int((counts > 0).sum()) * n * k / BYTES_PER_S * 1e6

            def look(made: Tensor, at: Tensor = compared) -> Tensor:
                return made.flatten(0, 1)[at]

            for name, product in backends.items():
                sets = [(x, w, counts, -(-m * top // experts), m * top)]
                case = f"{experts} masked {n} x {k}"
                measure(case, m, name, limit, product, sets, exact, look)


def measure_sorted(measure: Callable[..., None], generator: torch.Generator, tuned: bool) -> None:
    """`measure` is `gpu_gemm.Table.measure`; `tuned`: all of TILES, not those that are in use."""
    backends: dict[str, Callable[..., Tensor]] = {
        "deep_gemm": deep_gemm_backend.contiguous_grouped_gemm
    }
    chosen = dict.fromkeys(grouped_gemm.contiguous_config(m) for m in (16, 64, 1024))
    for tile in TILES if tuned else chosen:
        name = f"{tile.block_m}x{tile.block_n} {tile.warps}w {tile.stages}s {tile.together}"
        name += " swap" * tile.swap
        backends[name] = functools.partial(grouped_gemm.contiguous_grouped_gemm, config=tile)
    for experts, (n, k) in itertools.product(EXPERTS, SHAPES):
        w = weight(generator, experts, n, k)
        for each in EXPERTS[experts]:
            expert = drawn(experts, each, generator)
            x = rows(generator, len(expert), k)
            compared, exact = ends_compared(x, w, expert)
            size = experts * n * k
            limit = max(size / BYTES_PER_S, 2 * each * size / FP8_PER_S) * 1e6
            case = f"{experts} sorted {n} x {k}"

            def look(made: Tensor, at: Tensor = compared) -> Tensor:
                return made[at]

            for name, product in backends.items():
                sets: list[tuple[Any, ...]] = [(x, w, expert, each)]
                measure(case, each, name, limit, product, sets, exact, look)
