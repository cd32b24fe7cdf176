"""A layer of `gpu_block.py` in graphs of several, in every mode that its launches may have.

A mode is checked before it is timed: a launch that begins before what it reads is written gives
other bits than one that waits.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_block import Block
from gpu_timing import Clocks, capture, error, kernel_gaps, replay_times, rested, sustained
from torch import Tensor

from pdmesh.kernels import deep_gemm_backend

MODES = ("in_line", "side", "side_66", "dependent")
UNLIKE = 1e-3
"""Largest relative error of a mode's result beside that of launches that wait for each other."""


def chain(
    blocks: Sequence[Block], residual: Tensor, side: torch.cuda.Stream | None
) -> Callable[[], Any]:
    """Layers one after another, as a model runs them; `residual` is changed in place."""
    state = blocks[0].state

    def run() -> Any:
        x = state.x
        for block in blocks:
            x = block(x, residual, side)
        return x

    return run


def one_by_one(blocks: Sequence[Block]) -> Tensor:
    """What `chain` gives if every launch waits for the one before."""

    def waiting(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            torch.cuda.synchronize()
            return run(*arguments)

        return call

    before = [block.ops for block in blocks]
    for block in blocks:
        block.ops = {name: waiting(run) for name, run in block.ops.items()}
    try:
        result: Tensor = chain(blocks, blocks[0].state.residual.clone(), None)()
    finally:
        for block, ops in zip(blocks, before, strict=True):
            block.ops = ops
    return result


def replayed(graph: torch.cuda.CUDAGraph, residual: Tensor, begin: Tensor) -> Tensor:
    """What a graph of `chain` gives from a residual of `begin` on."""
    residual.copy_(begin)
    graph.replay()
    return graph.kept.clone()  # type: ignore[attr-defined, no-any-return]


def whole_layer(blocks: Sequence[Block], clocks: Clocks) -> dict[str, Any]:
    """The layer in graphs: in line, with the shared expert beside, with dependent launches.

    A mode that cannot be captured, or whose result is not that of launches that wait for each
    other, has None for a time. The fastest is also run with pauses, and for seconds without one.

    Raises:
        RuntimeError: that is so of the layers in line.
    """
    found: dict[str, Any] = {"unlike": {}}
    graphs = {}
    begin, expected = blocks[0].state.residual, one_by_one(blocks)
    for name, side, sms in (
        ("in_line", None, None),
        ("side", torch.cuda.Stream(), None),
        ("side_66", torch.cuda.Stream(), 66),
        ("dependent", None, None),
    ):
        found[name], residual = None, begin.clone()
        for block in blocks:
            block.shared_processors = sms
        try:
            with library_settings(name == "dependent"):
                graph = capture(chain(blocks, residual, side))
            result = replayed(graph, residual, begin)
        except Exception as failure:  # noqa: BLE001 - a library's own errors are of any type
            if name == "in_line":
                raise
            torch.cuda.synchronize()
            print(f"  {name}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
            continue
        found["unlike"][name] = error(result, expected)
        if found["unlike"][name] > UNLIKE:
            print(f"  {name}: wrong by {found['unlike'][name]:.2g}", flush=True)
            if name == "in_line":
                raise RuntimeError("layers in line are unlike launches that wait for each other")
            continue
        graphs[name] = graph
        found[name] = statistics.median(replay_times(graph, 20)) / len(blocks)
    gaps = kernel_gaps(graphs["in_line"])
    if gaps is not None:
        found |= {key: value / len(blocks) for key, value in gaps.items()}
        found["gap_share"] = 1 - gaps["busy"] / gaps["span"]
    found["best"] = min(graphs, key=lambda name: found[name])
    found["rested"] = rested(graphs[found["best"]]) / len(blocks)
    taken, at = sustained(graphs[found["best"]], clocks)
    found["sustained"], found["sustained_clocks"] = taken / len(blocks), at
    return found


@contextlib.contextmanager
def library_settings(dependent: bool) -> Iterator[None]:
    """With programmatic dependent launch: DeepGEMM's, and of what norms and rotation let begin."""
    with contextlib.ExitStack() as stack:
        if dependent:
            with contextlib.suppress(ImportError):
                from pdmesh.kernels.triton.launch import next_may_begin

                stack.enter_context(next_may_begin())
        if dependent and not deep_gemm_backend.unavailable():
            import deep_gemm

            deep_gemm.set_pdl(True)
            stack.callback(deep_gemm.set_pdl, False)
        yield
