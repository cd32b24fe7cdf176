"""Cases of bench/gpu_small.py: the gate, the layouts of experts, sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpu_small_cases import DEVICE, HIDDEN, Case, distance, normal, poisoned
from torch import Tensor

from pdmesh.kernels import cuda_gate, routing
from pdmesh.kernels import sampling as sampling_definition
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.triton import gate, permute, place, project, quantise, sampling

EXPERTS, TOP = 256, 8
V3 = GateRule("noaux_tc", EXPERTS, TOP, 8, 4, True, 2.5)


def gate_error(got: routing.Routing, summed: Tensor, data: Any) -> float:
    """Of logits and weights; infinite if other experts are chosen than for the logits summed up."""
    x, weight, bias, *_ = data
    logits = x.double() @ weight.double().t()
    want = torch.sigmoid(logits).gather(1, got.ids.long())
    want = want / want.sum(dim=1, keepdim=True) * V3.scale
    places = routing.place_choices(got.ids, EXPERTS)
    same = all(torch.equal(a, b) for a, b in zip(got[2:], places, strict=True))
    chosen, _ = routing.choose_experts(summed, bias, V3)
    agree = float((chosen == got.ids).all(dim=1).float().mean())
    errors = (distance(summed, logits), distance(got.weights, want))
    return max(errors) if same and agree > 0.999 else float("inf")


def cluster_gate_case(m: int) -> Case:
    """The gate in CUDA C++, `dependent` or not."""
    plain = gate_case(m, False)

    def make(seed: int) -> tuple[Any, ...]:
        return (*plain.make(seed)[:4], cuda_gate.workspace(m, DEVICE))

    def run(data: Any, **more: Any) -> Any:
        return cuda_gate.gate_topk(*data[:3], V3, out=data[3], work=data[4], **more)

    def error(data: Any) -> float:
        found = []
        for dependent in (False, True, True):
            for tensor in (data[4], data[3].weights):
                tensor.fill_(torch.nan)
            for tensor in data[3][2:]:
                tensor.fill_(-7)
            got = run(data, dependent=dependent)
            found.append(gate_error(got, data[4], data))
        return max(found)

    return replace(plain, name=f"gate_cuda bf16 {m}", make=make, run=run, error=error)


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
        got = run(data)
        summed = torch.zeros_like(data[4][0])
        for part in data[4]:
            summed += part
        return gate_error(got, summed, data)

    return Case(
        f"gate {'f32' if wide else 'bf16'} {m}",
        m * HIDDEN * 2 + EXPERTS * HIDDEN * (4 if wide else 2) + m * TOP * 12,
        make,
        run,
        lambda data: routing.gate_topk(*data[:3], V3),
        error,
        1e-5,
    )


def stage_case(m: int, stage: str) -> Case:
    """One of the gate's three launches alone, with a weight in bfloat16."""
    whole = gate_case(m, False)

    def make(seed: int) -> Any:
        data = whole.make(seed)
        gate.gate_topk(*data[:3], V3, out=data[3], work=data[4])
        return data

    def run(data: Any, **more: Any) -> Any:
        x, weight, bias, out, work = data
        if stage == "project":
            tile = more.get("tile", project.tile_for(m, False))
            return project.project(x, weight, work, tile, False)
        if stage == "choose":
            return gate.choose(work, bias, V3, None, out, False, **more)
        return place.place(out.ids, place.Places(*out[2:]), **more)

    sizes = {"project": m * HIDDEN * 2 + EXPERTS * HIDDEN * 2, "choose": m * EXPERTS * 4}
    size = sizes.get(stage, m * TOP * 4)
    return Case(f"gate_{stage} bf16 {m}", size, make, run, None, lambda data: 0.0)


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
        plus = normal(seed + 1, m, HIDDEN)
        return parts, targets, weights, plus, torch.empty_like(plus)

    def error(data: Any) -> float:
        parts, targets, weights, plus, out = data
        out.fill_(torch.nan)
        got = permute.unpermute(*data[:4], out=out)
        picked = parts[targets.long()].double()
        return distance(got, (picked * weights.double().unsqueeze(-1)).sum(dim=1) + plus.double())

    return Case(
        f"unpermute {m}x{HIDDEN}",
        m * HIDDEN * 2 * (TOP + 2),
        make,
        lambda data, **more: permute.unpermute(*data[:4], out=data[4], **more),
        lambda data: routing.unpermute(*data[:4]),
        error,
        0.005,
    )


def sample_case(m: int, kind: str, vocab: int = 129280) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        logits = 3 * torch.randn((m, vocab), generator=generator, device=DEVICE)
        heat = torch.full(
            (m,), 0.0 if kind == "greedy" else 0.8, dtype=torch.float64, device=DEVICE
        )
        numbers = torch.rand((m,), generator=generator, device=DEVICE, dtype=torch.float64)
        out = torch.empty(m, dtype=torch.int64, device=DEVICE)
        work = sampling.workspace(m, vocab, DEVICE)
        top_p = 0 * heat + 0.9 if kind == "top_p" else None
        return logits, heat, 0 * heat + 0.01, numbers, None, top_p, out, work

    def error(data: Any) -> float:
        same = sampling.sample(*data[:6]) == sampling_definition.sample(*data[:6])
        return float((~same).float().mean())

    return Case(
        f"sample {kind} {m}x{vocab}",
        m * vocab * 4,
        make,
        lambda data, **more: sampling.sample(*data[:6], out=data[6], work=data[7], **more),
        lambda data: sampling_definition.sample(*data[:6]),
        error,
        0.0,
    )


CASES = (
    *(gate_case(m, wide) for m in (1, 16, 64, 128, 256, 512, 4096) for wide in (False, True)),
    *(cluster_gate_case(m) for m in (1, 16, 64, 128, 256, 512)),
    *(stage_case(256, stage) for stage in ("project", "choose", "place")),
    *(permute_case(m, contiguous) for m in (128, 256) for contiguous in (False, True)),
    permute_case(4096, True),
    *(unpermute_case(m) for m in (128, 256, 4096)),
    *(sample_case(m, kind) for m in (128, 256) for kind in ("greedy", "random", "top_p")),
)


TILES = (
    *((64, rows, 64, 4, stages) for rows, stages in ((32, 5), (64, 4), (64, 7))),
    *((128, 64, 64, warps, 4) for warps in (4, 8)),
)
"""Of the gate's projection; all cut the hidden size into the same chunks."""


def tunings(case: Case) -> list[dict[str, Any]]:
    """Launches to try beside the usual one."""
    name = case.name.split()[0]
    if name == "gate":
        return [{}, {"chained": False}, *({"tile": project.Tile(*tile)} for tile in TILES)]
    if name == "gate_cuda":
        rows = int(case.name.split()[2])
        forms = [form for form in cuda_gate.FORMS if not cuda_gate.unsupported(V3, rows, form)]
        return [{}, *({"dependent": True, "form": form} for form in forms)]
    if name == "gate_project":
        return [{}]
    if name == "gate_choose":
        return [{}, {"rows_a_program": 2}, {"rows_a_program": 4}]
    if name == "masked_silu_mul":
        pairs = [(warps, programs) for warps in (2, 4, 8) for programs in (4, 8, 16)]
        return [{}, *({"num_warps": w, "programs": p} for w, p in pairs)]
    if name.endswith(("norm", "bf16")):
        pairs = [(warps, programs) for warps in (4, 8) for programs in (2, 4, 8, 16, None)]
        return [{}, *({"num_warps": w, "programs": p} for w, p in pairs)]
    if name in ("rope_append", "sample"):
        return [{}]
    return [{}, *({"num_warps": warps} for warps in (1, 2, 4, 8, 16, 32))]
