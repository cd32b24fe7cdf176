"""How many pages a worker gets, counted before it allocates anything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from pdmesh.model.device.memory import (
    GB,
    MemoryPlan,
    plain_weight_bytes,
    plan_memory,
    weight_bytes,
)
from pdmesh.model.device.model import shapes_of
from pdmesh.model.device.spread import spread_over
from pdmesh.model.device.step_memory import library_bytes, step_bytes
from pdmesh.model.machine import check_backends, check_machine, this_machine
from pdmesh.model.random_weights import served_config
from pdmesh.model.served import Placing
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

WhoseWeights = Literal["own", "held", "to hold"]
CPU_PAGES = 256
"""Pages of a worker on a CPU that was told to choose."""


def plan_pages(
    path: Path,
    placing: Placing,
    *,
    mtp: bool,
    page_size: int,
    share: float,
    pages: int,
    rows: int,
    sequences: int,
    role: str = "prefill",
    dtype: str = "float32",
    random: RandomWeights | None = None,
    ranks: int = 1,
    redundant: int = 0,
    threshold: int = 64,
    weights: WhoseWeights = "own",
) -> tuple[int, MemoryPlan | None]:
    """How many pages a worker gets, before it allocates anything.

    Args:
        path: of the checkpoint, or of the config of random weights.
        share: part of a device's memory that is this worker's.
        pages: as many as were asked for; 0: as there is room for.
        rows: of the largest step.
        sequences: of the largest batch.
        role: "prefill": steps may have MHA form, and few of their rows want logits; or "decode":
            all rows want them, and on a device steps are captured as graphs.
        dtype: of weights and latents in plain precision.
        random: weights to make instead of reading them.
        ranks, redundant: workers that share the routed experts, and copies of these.
        threshold: rows of the largest batch from which on ranks compute in two microbatches.
        weights: whether they are the worker's own, or in memory of another process: "held" there
            already, or "to hold".

    Returns:
        The number, and what it comes from: on a CUDA device, and for random weights anywhere.

    Raises:
        ConfigError: the device cannot compute the model, not by the backends that
            $PDMESH_BACKENDS names, or has not enough memory.
    """
    precision = placing.chosen
    on_cuda = torch.device(placing.device).type == "cuda"
    if on_cuda:
        check_machine(this_machine(), placing.device, precision)
    if not on_cuda and random is None:
        return pages or CPU_PAGES, None
    config = served_config(path, random)
    if on_cuda and precision == "fp8":
        shapes = shapes_of(config, page_size, 1 if placing.packed else 2)
        check_backends(torch.device(placing.device), shapes)
    value_bytes = 2 if precision == "fp8" else getattr(torch, dtype).itemsize
    latent = 656 if placing.packed else value_bytes * config.latent_width
    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    context = -(-config.max_position_embeddings // page_size)
    free, total = memory_of(placing.device)
    exchange = None
    if precision == "fp8":
        if ranks > 1:
            exchange = spread_over(config, mtp, 0, ranks, redundant, rows, threshold).exchange
        needed = weight_bytes(config, mtp, None if exchange is None else exchange.size.slots)
    else:
        needed = plain_weight_bytes(config, mtp, value_bytes, ranks, redundant)
    decode = role == "decode"
    steps = step_bytes(
        config,
        rows,
        rows if decode else sequences,
        exchange,
        keys=0 if decode else config.max_position_embeddings,
        captured=decode and on_cuda and precision == "fp8",
    )
    steps = steps * value_bytes // 2
    if on_cuda:
        steps += library_bytes(0 if decode else sequences, exchange)
    own = weights == "own"
    if weights == "to hold":
        free = max(0, free - needed)
    try:
        plan = plan_memory(
            total,
            free,
            share,
            needed if own else 0,
            steps,
            layers * page_size * latent,
            pages if on_cuda else pages or CPU_PAGES,
            2 * sequences * context,
            0 if own else needed,
        )
    except ConfigError as error:
        if random is None:
            raise
        raise ConfigError(f"{error}; random weights may have fewer --layers") from error
    return plan.pages, plan


def check_room(
    path: Path, placing: Placing, mtp: bool, dtype: str, random: RandomWeights | None = None
) -> str:
    """Whether there is room for the weights of a model, before a process that is to hold them for
    others allocates any.

    Args:
        path, placing, mtp, dtype, random: as of `plan_pages`.

    Returns:
        What is needed, for the log.

    Raises:
        ConfigError: the device cannot compute the model, or has not enough memory.
    """
    on_cuda = torch.device(placing.device).type == "cuda"
    if on_cuda:
        check_machine(this_machine(), placing.device, placing.chosen)
    config = served_config(path, random)
    if placing.chosen == "fp8":
        needed = weight_bytes(config, mtp)
    else:
        needed = plain_weight_bytes(config, mtp, getattr(torch, dtype).itemsize)
    free, _ = memory_of(placing.device)
    most = needed if on_cuda else 2 * needed  # on a CPU they are copied into memory of its own
    words = f"weights {needed / GB:.3f} GB"
    if not on_cuda:
        words += ", twice that while they are loaded"
    if most > free:
        more = "; random weights may have fewer --layers" if random is not None else ""
        raise ConfigError(
            f"the weights do not fit: {words}, and {free / GB:.3f} GB are free; end what takes "
            f"the rest, or take a smaller model{more}"
        )
    return words


def memory_of(device: str) -> tuple[int, int]:
    """Bytes of a device that are free, and that it has; of the machine for "cpu".

    Raises:
        ConfigError: the machine does not say.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return table["MemAvailable"] << 10, table["MemTotal"] << 10
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"/proc/meminfo does not say how much memory there is: {error}") from None
