"""Tokens from logits: greedy, temperature and min_p in three launches; top_k and top_p by torch.

Definition: `pdmesh.kernels.sampling`, whose cut these use. The cumulative distribution is added up
in blocks and then across them, all in float64, where the definition adds token after token: a
number that lies within rounding of a token's edge may choose the next one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.kernels.sampling import draw_cut, is_cut
from pdmesh.kernels.triton.choose import key_of, value_of
from pdmesh.kernels.triton.launch import power_of_two, rows_of

BLOCK = 4096
"""Tokens that one program looks at."""
LEAST = tl.constexpr(-(2**63))


@triton.jit
def row_top(tops, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row (NaN if there is one) and its first token."""
    at = tl.arange(0, BLOCKS)
    packed = tl.max(tl.load(tops + row * blocks + at, mask=at < blocks, other=LEAST), axis=0)
    token = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    return value_of((packed >> 31).to(tl.int32)), token


@triton.jit
def likelihoods(logits, inside, top, heat, least):
    """exp((logit - top) / temperature) in float64, 0 below `least`."""
    x = (tl.load(logits, mask=inside, other=float("-inf")).to(tl.float64) - top) / heat
    likely = tl.exp(x)
    return tl.where(likely < least, 0.0, likely)


@triton.jit
def top_kernel(logits, tops, vocab, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    packed = (key_of(x).to(tl.int64) << 31) | (0x7FFFFFFF - token).to(tl.int64)
    best = tl.max(tl.where(inside, packed, LEAST), axis=0)
    tl.store(tops + row * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def mass_kernel(
    logits,
    temperatures,
    min_p,
    tops,
    masses,
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperatures + row)
    if heat > 0:
        blocks = tl.num_programs(1)
        top, _ = row_top(tops, row, blocks, BLOCKS)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * row_stride + token
        least = tl.load(min_p + row)
        likely = likelihoods(at, token < vocab, top.to(tl.float64), heat, least)
        tl.store(masses + row * blocks + tl.program_id(1), tl.sum(likely, axis=0))


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    min_p,
    numbers,
    tops,
    masses,
    ids,
    vocab,
    blocks,
    row_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperatures + row)
    top, chosen = row_top(tops, row, blocks, BLOCKS)
    if heat > 0:
        every = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + every, mask=every < blocks, other=0.0)
        cumulative = tl.cumsum(mass, axis=0)
        share = tl.load(numbers + row) * tl.sum(tl.where(every == BLOCKS - 1, cumulative, 0.0))
        # Neither a block nor a token without any mass is taken.
        passed = (cumulative > share) & (mass > 0)
        last = tl.max(tl.where(mass > 0, every, 0), axis=0)
        block = tl.min(tl.where(passed, every, last), axis=0)
        before = tl.sum(tl.where(every == block, cumulative - mass, 0.0), axis=0)
        token = block * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * row_stride + token
        least = tl.load(min_p + row)
        likely = likelihoods(at, token < vocab, top.to(tl.float64), heat, least)
        beyond = (before + tl.cumsum(likely, axis=0) > share) & (likely > 0)
        last = tl.max(tl.where(likely > 0, token, 0), axis=0)
        chosen = tl.min(tl.where(beyond, token, last), axis=0)
    sound = (top == top) & (tl.abs(top) < float("inf"))
    tl.store(ids + row, tl.where(sound, chosen, -1).to(tl.int64))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    numbers: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    *,
    out: Tensor | None = None,
    work: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Token ids [m] int64, or NO_TOKEN or UNDECIDED: `pdmesh.kernels.sampling.sample`.

    Args:
        logits: [m, vocab] float32; a row's elements are consecutive.
        temperatures, min_p, numbers: [m] float64 on the same device.
        top_k: [m] int64 on the same device; None: no row is cut so, which saves the sorting.
        top_p: [m] float64 on the same device; None: no row is cut so.
        out: where the ids go; made if it is None.
        work: see `workspace`; made if it is None.
    """
    rows, stride = rows_of(logits)
    vocab = logits.shape[1]
    if logits.dtype != torch.float32 or not 0 < vocab < 2**31:
        raise ValueError(f"logits {logits.shape} {logits.dtype}")
    for given in (temperatures, min_p, numbers):
        if given.shape != (rows,) or given.dtype != torch.float64 or not given.is_contiguous():
            raise ValueError(f"need [{rows}] float64, not {given.shape} {given.dtype}")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows == 0:
        return out
    tops, masses = workspace(rows, vocab, logits.device) if work is None else work
    block = min(BLOCK, power_of_two(vocab))
    blocks = -(-vocab // block)
    padded = power_of_two(blocks)
    top_kernel[(rows, blocks)](logits, tops, vocab, stride, BLOCK=block, num_warps=4)
    mass_kernel[(rows, blocks)](
        logits,
        temperatures,
        min_p,
        tops,
        masses,
        vocab,
        stride,
        BLOCK=block,
        BLOCKS=padded,
        num_warps=8,
    )
    draw_kernel[(rows,)](
        logits,
        temperatures,
        min_p,
        numbers,
        tops,
        masses,
        out,
        vocab,
        blocks,
        stride,
        BLOCK=block,
        BLOCKS=padded,
        num_warps=8,
    )
    if top_k is not None or top_p is not None:
        total = masses.sum(dim=-1)
        top = logits.amax(dim=-1)
        drawn = draw_cut(logits, top, temperatures, min_p, numbers, top_k, top_p, total)
        cut = is_cut(temperatures, top_k, top_p) & (temperatures > 0) & (out >= 0)
        out.copy_(torch.where(cut, drawn, out))
    return out


def workspace(rows: int, vocab: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """What `sample` keeps each block's largest logit and its sum in: [rows, blocks] twice."""
    blocks = -(-vocab // min(BLOCK, power_of_two(vocab)))
    tops = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    return tops, torch.empty((rows, blocks), dtype=torch.float64, device=device)
