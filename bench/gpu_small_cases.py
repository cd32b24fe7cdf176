"""What bench/gpu_small.py measures: data, the call, its bytes, its error against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdmesh.kernels import quantised, routing
from pdmesh.kernels import rope_append as rope_definition
from pdmesh.kernels import sampling as sampling_definition
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.quantised import Rows, dequantise_rows, unpack_latents
from pdmesh.kernels.rope import RopeTable, inverse_frequencies
from pdmesh.kernels.triton import gate, norm, permute, place, quantise, rope_append, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, EXPERTS, TOP = 7168, 256, 8
EPS = 1e-6
V3 = GateRule("noaux_tc", EXPERTS, TOP, 8, 4, True, 2.5)
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


def gate_case(m: int, wide: bool) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        weight = normal(seed + 1, EXPERTS, HIDDEN).float() / HIDDEN**0.5
        weight = weight + 1e-4 * normal(seed + 5, EXPERTS, HIDDEN).float()
        bias = normal(seed + 2, EXPERTS).float() / 10
        weight = weight if wide else weight.to(torch.bfloat16)
        out = gate.new_routing(m, V3, DEVICE)
        return normal(seed, m, HIDDEN), weight, bias, out, gate.workspace(m, EXPERTS, DEVICE)

    def run(data: Any, **more: Any) -> Any:
        x, weight, bias, out, work = data
        return gate.gate_topk(x, weight, bias, V3, out=out, work=work, **more)

    def error(data: Any) -> float:
        x, weight, bias, *_ = data
        got = run(data)
        logits = x.double() @ weight.double().t()
        summed = torch.zeros_like(data[4][0])
        for part in data[4]:
            summed += part
        want = torch.sigmoid(logits).gather(1, got.ids.long())
        want = want / want.sum(dim=1, keepdim=True) * V3.scale
        places = routing.place_choices(got.ids, EXPERTS)
        same = all(torch.equal(a, b) for a, b in zip(got[2:], places, strict=True))
        # The choice is the definition's for the logits that the kernel summed up.
        chosen, _ = routing.choose_experts(summed, bias, V3)
        agree = float((chosen == got.ids).all(dim=1).float().mean())
        errors = (distance(summed, logits), distance(got.weights, want))
        return max(errors) if same and agree > 0.999 else float("inf")

    return Case(
        f"gate {'f32' if wide else 'bf16'} {m}",
        m * HIDDEN * 2 + EXPERTS * HIDDEN * (4 if wide else 2) + m * TOP * 12,
        make,
        run,
        lambda data: routing.gate_topk(*data[:3], V3),
        error,
        1e-5,
    )


def permute_case(m: int, contiguous: bool) -> Case:
    room = routing.contiguous_capacity(m, TOP, EXPERTS) if contiguous else m

    def make(seed: int) -> tuple[Any, ...]:
        x = quantise.quantise_rows(normal(seed, m, HIDDEN))
        generator = torch.Generator(DEVICE).manual_seed(seed)
        order = torch.rand((m, EXPERTS), generator=generator, device=DEVICE).argsort(dim=1)
        ids = order[:, :TOP].int().contiguous()
        where = place.place_choices(ids, EXPERTS)
        shape = (room, HIDDEN) if contiguous else (EXPERTS, room, HIDDEN)
        expert = ids.new_empty((room,)) if contiguous else None
        out = routing.Permuted(poisoned(*shape), torch.empty_like(ids), expert)
        return x, ids, where, out

    def run(data: Any, **more: Any) -> Any:
        x, ids, where, out = data
        if contiguous:
            return permute.permute_contiguous(
                x, ids, where.places, where.counts, room, out=out, **more
            )
        return permute.permute_masked(x, ids, where.places, EXPERTS, room, out=out, **more)

    def eager(data: Any) -> Any:
        x, ids, where, _ = data
        if contiguous:
            return routing.permute_contiguous(x, ids, where.places, where.counts, room)
        return routing.permute_masked(x, ids, where.places, EXPERTS, room)

    def error(data: Any) -> float:
        x, ids, where, _ = data
        want, got = eager(data), run(data)
        at = want.targets.flatten().long()
        same = torch.equal(got.targets, want.targets)
        for mine, theirs in zip(got.rows, x, strict=True):
            mine, theirs = mine.flatten(0, -2), theirs.repeat_interleave(TOP, dim=0)
            if mine.dtype != torch.float32:
                mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
            same &= torch.equal(mine[at], theirs)
        if contiguous:
            same &= torch.equal(got.row_expert, want.row_expert)
        return 0.0 if same else float("inf")

    name = "permute_contiguous" if contiguous else "permute_masked"
    size = m * HIDDEN * (TOP + 1) * 33 // 32
    return Case(f"{name} {m}x{HIDDEN}", size, make, run, eager, error, 0.0)


def unpermute_case(m: int) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        order = torch.randperm(m * TOP, generator=generator, device=DEVICE)
        targets = order.int().view(m, TOP)
        weights = torch.rand((m, TOP), generator=generator, device=DEVICE)
        parts = normal(seed, m * TOP, HIDDEN)
        return parts, targets, weights, torch.empty_like(parts[:m])

    def error(data: Any) -> float:
        parts, targets, weights, out = data
        out.fill_(torch.nan)
        got = permute.unpermute(*data[:3], out=out)
        picked = parts[targets.long()].double()
        return distance(got, (picked * weights.double().unsqueeze(-1)).sum(dim=1))

    return Case(
        f"unpermute {m}x{HIDDEN}",
        m * HIDDEN * 2 * (TOP + 1),
        make,
        lambda data, **more: permute.unpermute(*data[:3], out=data[3], **more),
        lambda data: routing.unpermute(*data[:3]),
        error,
        0.005,
    )


def sample_case(m: int, greedy: bool, vocab: int = 129280) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        logits = 3 * torch.randn((m, vocab), generator=generator, device=DEVICE)
        heat = torch.full((m,), 0.0 if greedy else 0.8, dtype=torch.float64, device=DEVICE)
        numbers = torch.rand((m,), generator=generator, device=DEVICE, dtype=torch.float64)
        out = torch.empty(m, dtype=torch.int64, device=DEVICE)
        return logits, heat, 0 * heat + 0.01, numbers, out, sampling.workspace(m, vocab, DEVICE)

    def error(data: Any) -> float:
        same = sampling.sample(*data[:4]) == sampling_definition.sample(*data[:4])
        return float((~same).float().mean())

    return Case(
        f"sample {'greedy' if greedy else 'random'} {m}x{vocab}",
        m * vocab * 4,
        make,
        lambda data, **more: sampling.sample(*data[:4], out=data[4], work=data[5], **more),
        lambda data: sampling_definition.sample(*data[:4]),
        error,
        0.0,
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
    *(gate_case(m, wide) for m in (1, 16, 64, 128, 256, 512, 4096) for wide in (False, True)),
    *(permute_case(m, contiguous) for m in (128, 256) for contiguous in (False, True)),
    permute_case(4096, True),
    *(unpermute_case(m) for m in (128, 256, 4096)),
    *(sample_case(m, greedy) for m in (128, 256) for greedy in (True, False)),
)


def tunings(case: Case) -> list[dict[str, Any]]:
    """Launches to try beside the usual one."""
    name = case.name.split()[0]
    if name == "gate":
        tiles = [
            gate.Tile(*tile)
            for tile in (
                (128, 64, 64, 8, 4),
                (128, 64, 64, 4, 3),
                (128, 64, 64, 4, 6),
                (128, 64, 32, 4, 7),
                (64, 64, 64, 4, 4),
                (64, 64, 64, 4, 7),
                (64, 32, 64, 4, 4),
                (64, 16, 64, 4, 4),
                (128, 32, 64, 4, 5),
                (128, 128, 64, 8, 4),
                (256, 32, 64, 8, 4),
            )
        ]
        return [{}, {"chained": False}, *({"tile": tile} for tile in tiles)]
    if name == "masked_silu_mul":
        pairs = [(warps, programs) for warps in (2, 4, 8) for programs in (4, 8, 16, 32)]
        return [{}, *({"num_warps": w, "programs": p} for w, p in pairs)]
    if name in ("rope_append", "sample"):
        return [{}]
    return [{}, *({"num_warps": warps} for warps in (1, 2, 4, 8, 16))]
