"""Cases of bench/gpu_small.py: norms, SwiGLU, rotation; what a case is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels import quantised
from pdmesh.kernels import rope_append as rope_definition
from pdmesh.kernels.quantised import Rows, dequantise_rows, unpack_latents
from pdmesh.kernels.rope import RopeTable, inverse_frequencies
from pdmesh.kernels.triton import norm, quantise, rope_append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 7168
EPS = 1e-6
FP8_ERROR = 0.035
"""Relative error of values rounded to three mantissa bits, 2^-4 / sqrt(3) at most."""


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        name: shown.
        bytes: what has to be read and written at least.
        make: a seed to a set of random data.
        run: the fast operation; takes what `tunings` gives.
        eager: the definition, None where there is none to compare with.
        error: relative error of `run` against float64, of a fresh set.
        limit: what it may be.
    """

    name: str
    bytes: int
    make: Callable[[int], Any]
    run: Callable[..., Any]
    eager: Callable[[Any], Any] | None
    error: Callable[[Any], float]
    limit: float = FP8_ERROR


def normal(seed: int, *shape: int) -> Tensor:
    """Random bfloat16 on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)


def distance(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; NaN counts as far away."""
    error = float((got.double() - want).norm() / want.norm())
    return error if error == error else float("inf")


def poisoned(*shape: int) -> Rows:
    """`Rows` full of NaN, so that what is not written shows."""
    rows = quantise.new_rows(*shape, device=DEVICE)
    rows.values.view(torch.uint8).fill_(0x7F)
    rows.scales.fill_(torch.nan)
    return rows


def rms64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def norm_case(m: int, k: int, add: bool, keep: bool) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        both = normal(seed, m, k) if k == HIDDEN else normal(seed, m, 2112)[:, :k]
        return both, normal(seed + 1, m, k), normal(seed + 2, k), poisoned(m, k), normal(3, m, k)

    def run(data: Any, **more: Any) -> Any:
        x, residual, weight, out, normed = data
        more |= {"with_normed": keep, "out": out, "normed_out": normed if keep else None}
        if add:
            return norm.add_rms_norm_quantise(x, residual, weight, EPS, **more)
        return norm.rms_norm_quantise(x, weight, EPS, **more)

    def eager(data: Any) -> Any:
        x, residual, weight, *_ = data
        if add:
            return quantised.add_rms_norm_quantise(x, residual, weight, EPS)
        return quantised.rms_norm_quantise(x, weight, EPS)

    def error(data: Any) -> float:
        x, residual, weight, *_ = data
        want = rms64((x + residual) if add else x, weight)
        got, normed = run(data)
        errors = [distance(dequantise_rows(got), want)]
        if keep:
            errors.append(distance(normed, want) * 10)
        if add:
            residual.copy_(normal(1, m, k))
        return max(errors)

    width = (2 + 1) + (4 if add else 0) + (2 if keep else 0)
    name = f"{'add_' if add else ''}rms_norm{'+bf16' if keep else ''} {m}x{k}"
    return Case(name, m * k * width + m * k // 32, make, run, eager, error)


def rows_case(m: int, k: int) -> Case:
    def error(data: Any) -> float:
        return distance(dequantise_rows(quantise.quantise_rows(data[0], out=data[1])), data[0])

    return Case(
        f"quantise_rows {m}x{k}",
        m * k * 3 + m * k // 32,
        lambda seed: (normal(seed, m, k), poisoned(m, k)),
        lambda data, **more: quantise.quantise_rows(data[0], out=data[1], **more),
        lambda data: quantised.quantise_rows(data[0]),
        error,
    )


def silu64(gate_up: Tensor) -> Tensor:
    first, second = gate_up.double().chunk(2, dim=-1)
    return first * torch.sigmoid(first) * second


def silu_case(m: int, k: int) -> Case:
    def error(data: Any) -> float:
        got = quantise.silu_mul_quantise(data[0], out=data[1])
        return distance(dequantise_rows(got), silu64(data[0]))

    return Case(
        f"silu_mul {m}x{k}",
        m * k * 5 + m * k // 32,
        lambda seed: (normal(seed, m, 2 * k), poisoned(m, k)),
        lambda data, **more: quantise.silu_mul_quantise(data[0], out=data[1], **more),
        lambda data: quantised.silu_mul_quantise(data[0]),
        error,
    )


def masked_silu_case(experts: int, rows: int, mean: int) -> Case:
    k = 2048

    def make(seed: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        spread = torch.rand(experts, generator=generator) + 0.5
        counts = (spread / spread.mean() * mean).int().clamp_max(rows)
        counts[0] += mean * experts - int(counts.sum())
        return normal(seed, experts, rows, 2 * k), counts.to(DEVICE), poisoned(experts, rows, k)

    def error(data: Any) -> float:
        gate_up, counts, _ = data
        got = quantise.masked_silu_mul_quantise(gate_up, counts, out=data[2])
        used = torch.arange(rows, device=DEVICE) < counts[:, None]
        values, scales = got.values.view(torch.uint8)[used], got.scales[used]
        untouched = bool(got.scales[~used].isnan().all())
        wide = dequantise_rows(Rows(values.view(torch.float8_e4m3fn), scales))
        return distance(wide, silu64(gate_up[used])) if untouched else float("inf")

    return Case(
        f"masked_silu_mul {experts}x{mean} of {rows}",
        experts * mean * k * 5 + experts * mean * k // 32,
        make,
        lambda data, **more: quantise.masked_silu_mul_quantise(*data[:2], out=data[2], **more),
        lambda data: quantised.masked_silu_mul_quantise(*data[:2]),
        error,
    )


def rope_case(m: int, packed: bool, heads: int = 128) -> Case:
    pages, layers, size = 64 if m < 4096 else 256, 2, 64

    def make(seed: int) -> tuple[Any, ...]:
        table = RopeTable.build(inverse_frequencies(64, 10000.0, None), 8192, 1.0).to(DEVICE)
        width, dtype = (656, torch.uint8) if packed else (576, torch.bfloat16)
        pool = torch.zeros((pages, layers, size, width), dtype=dtype, device=DEVICE)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(pages * size, generator=generator)[:m].to(DEVICE)
        slots = order // size * (layers * size) + order % size
        positions = torch.randint(0, 8192, (m,), generator=generator).to(DEVICE)
        query, latent = normal(seed, m, heads, 192)[..., 128:], normal(seed + 1, m, 2112)[:, 1536:]
        arguments = (query, latent, normal(2, 512), table.cos, table.sin, positions, slots)
        return (*arguments, pool, torch.empty((m, heads, 64), dtype=torch.bfloat16, device=DEVICE))

    def turned(x: Tensor, data: Any) -> Tensor:
        cos, sin = (t[data[5]].double().unsqueeze(1) for t in data[3:5])
        x = x.double()
        return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin

    def error(data: Any) -> float:
        query, latent, weight, *_, slots, pool, _ = data
        got = rope_append.rope_append(*data[:8], 1)
        held = pool.view(-1, pool.shape[-1])[slots + size]
        if packed:
            held = unpack_latents(held)
        fp8 = FP8_ERROR if packed else 0.005
        parts = [
            distance(got, turned(query, data)) / 0.005,
            distance(held[:, :512], rms64(latent[:, :512], weight)) / fp8,
            distance(held[:, 512:], turned(latent[:, None, 512:], data)[:, 0]) / 0.005,
        ]
        return max(parts)

    return Case(
        f"rope_append {'fp8' if packed else 'bf16'} {m}x{heads}",
        m * (heads * 64 * 4 + 576 * 2 + (656 if packed else 1152) + 512),
        make,
        lambda data, **more: rope_append.rope_append(*data[:8], 1, out=data[8], **more),
        lambda data: rope_definition.rope_append(*data[:8], 1),
        error,
        1.0,
    )


CASES = (
    *(norm_case(m, HIDDEN, False, False) for m in (256, 16384)),
    *(norm_case(m, HIDDEN, True, keep) for m in (128, 256, 4096, 16384) for keep in (False, True)),
    *(norm_case(m, 1536, False, False) for m in (256, 16384)),
    *(rows_case(m, 16384) for m in (256, 4096)),
    *(silu_case(m, 2048) for m in (256, 16384)),
    *(silu_case(m, 18432) for m in (256, 4096)),
    masked_silu_case(32, 256, 64),
    masked_silu_case(2, 2048, 1024),
    *(rope_case(m, packed) for m in (128, 256, 4096) for packed in (False, True)),
)
