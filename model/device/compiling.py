"""Libraries that a worker's first steps would compile one after another, compiled side by side.

These are kernels in CUDA C++ and modules of FlashInfer, whose compilers are processes of their own.
DeepGEMM compiles in a launch alone, and Triton for what a launch is called with: theirs are
compiled by the steps themselves, meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pdmesh.kernels import cuda_absorbed, dense, flashinfer_backend, gate_choice, hopper_mla
from pdmesh.kernels.compiling import Compilation
from pdmesh.kernels.quantised import BlockWeight
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.weights import LayerWeights, MlpWeights, MoeWeights
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

REASON = 2000
"""Characters of what a compiler printed, the last ones, that a line of the log has."""


@contextlib.contextmanager
def compiling(work: Iterable[Compilation], jobs: int | None = None) -> Iterator[None]:
    """Compiles in threads what of `work` is not there yet, beside what is done in here.

    That meets a library that is being compiled by waiting for it, and one that does not compile as
    it would have without: by compiling it again, and its error. At the end what has not begun is
    left.

    Args:
        jobs: compilers at a time; by default as many as there are processors.
    """
    missing = [one for one in work if not one.done()]
    if not missing:
        yield
        return
    jobs = min(len(missing), jobs or len(os.sched_getaffinity(0)))
    began = time.monotonic()
    event(log, "compiling kernels", kernels=len(missing), jobs=jobs)
    with ThreadPoolExecutor(jobs, "compile") as pool:
        under_way = [pool.submit(_compile, one) for one in missing]
        try:
            yield
        finally:
            left = sum(one.cancel() for one in under_way)
    made = sum(not one.cancelled() and one.result() for one in under_way)
    event(
        log,
        "kernels compiled",
        kernels=made,
        failed=len(missing) - made - left,
        left=left,
        seconds=_since(began),
    )


def _compile(one: Compilation) -> bool:
    """Whether it compiles; the log says so."""
    began = time.monotonic()
    try:
        one.run()
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and the first use says
        _not_compiled(one.name, error, seconds=_since(began))
        return False
    event(log, "kernel compiled", kernel=one.name, seconds=_since(began))
    return True


def _not_compiled(kernel: str, error: Exception, **fields: object) -> None:
    reason = str(error)[-REASON:] or type(error).__name__
    event(log, "kernel not compiled", logging.WARNING, kernel=kernel, reason=reason, **fields)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def of_prompts(model: DeviceModel, rows: Iterable[int]) -> list[Compilation]:
    """What prompts in MHA form need in steps of these rows, those first that are computed first."""
    found: list[Compilation] = []
    if _backend(model, "mla_prefill") == "flashinfer":
        widths = (model.config.qk_head_dim, model.config.v_head_dim)
        found += _listed("flashinfer", lambda: [flashinfer_backend.prefill_compilation(widths)])
    return found + _of_products(model, rows) + _of_gates(model)


def of_steps(model: DeviceModel, rows: Iterable[int]) -> list[Compilation]:
    """What decode steps of these numbers of rows need, those first that are computed first."""
    found = _of_products(model, rows) + _of_gates(model)
    absorbed = {"absorb_query": "absorb_query", "project_values_quantise": "project_values"}
    for op, name in absorbed.items():
        if _backend(model, op) == "cuda":
            found.append(cuda_absorbed.compilation(name))
    if _backend(model, "mla_decode") == "hopper":
        found.append(hopper_mla.compilation())
    return found


def _backend(model: DeviceModel, op: str) -> str:
    return next(choice.backend for choice in model.ops.choices if choice.op == op)


def _listed(what: str, listing: Callable[[], list[Compilation]]) -> list[Compilation]:
    """The list; none where a library is of another version than this one asks."""
    try:
        return listing()
    except Exception as error:  # noqa: BLE001 - its first use is what has to work
        _not_compiled(what, error)
        return []


def _of_products(model: DeviceModel, rows: Iterable[int]) -> list[Compilation]:
    """Of a step's rows with every matrix that stands alone, but for the projections of keys: no
    product with one of those compiles anything here."""
    if _backend(model, "fp8_gemm") != "by shape":
        return []
    shapes = dict.fromkeys(m.values.shape for layer in _layers(model) for m in _matrices(layer))
    found = (dense.compilation(m, n, k) for m in dict.fromkeys(rows) for n, k in shapes)
    return list({one.name: one for one in found if one is not None}.values())


def _of_gates(model: DeviceModel) -> list[Compilation]:
    rule = model.config.gate
    if rule is None or _backend(model, "gate_topk") != "by rows":
        return []
    routers = (layer.mlp.router for layer in _layers(model) if isinstance(layer.mlp, MoeWeights))
    found = (gate_choice.compilation(router, rule) for router in routers)
    return list({one.name: one for one in found if one is not None}.values())


def _layers(model: DeviceModel) -> list[LayerWeights]:
    weights = model.weights
    return [*weights.layers, *(() if weights.mtp is None else (weights.mtp.layer,))]


def _matrices(layer: LayerWeights) -> Iterator[BlockWeight]:
    attention, mlp = layer.attention, layer.mlp
    yield attention.first.weight
    if attention.q_b is not None:
        yield attention.q_b
    yield attention.o.weight
    alone = mlp if isinstance(mlp, MlpWeights) else mlp.shared
    if alone is not None:
        yield alone.gate_up
        yield alone.down
