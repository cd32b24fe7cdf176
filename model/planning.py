"""How many pages a worker gets, counted before it allocates anything."""

from __future__ import annotations

from pathlib import Path

import torch

from pdmesh.model.device.memory import (
    MemoryPlan,
    plain_weight_bytes,
    plan_memory,
    step_bytes,
    weight_bytes,
)
from pdmesh.model.device.spread import spread_over
from pdmesh.model.machine import check_machine, this_machine
from pdmesh.model.random_weights import served_config
from pdmesh.model.served import Placing
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

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
    dtype: str = "float32",
    random: RandomWeights | None = None,
    ranks: int = 1,
    redundant: int = 0,
    threshold: int = 64,
) -> tuple[int, MemoryPlan | None]:
    """How many pages a worker gets, before it allocates anything.

    Args:
        path: of the checkpoint, or of the config of random weights.
        share: part of a device's memory that is this worker's.
        pages: as many as were asked for; 0: as there is room for.
        rows: of the largest step.
        sequences: of the largest batch.
        dtype: of weights and latents in plain precision.
        random: weights to make instead of reading them.
        ranks, redundant: workers that share the routed experts, and copies of these.
        threshold: rows of the largest batch from which on ranks compute in two microbatches.

    Returns:
        The number, and what it comes from: on a CUDA device, and for random weights anywhere.

    Raises:
        ConfigError: the device cannot compute the model, or has not enough memory.
    """
    precision = placing.chosen
    on_cuda = torch.device(placing.device).type == "cuda"
    if on_cuda:
        check_machine(this_machine(), placing.device, precision)
    if not on_cuda and random is None:
        return pages or CPU_PAGES, None
    config = served_config(path, random)
    value_bytes = 2 if precision == "fp8" else getattr(torch, dtype).itemsize
    latent = 656 if placing.packed else value_bytes * config.latent_width
    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    context = -(-config.max_position_embeddings // page_size)
    free, total = memory_of(placing.device)
    exchange = None
    if precision == "fp8":
        if ranks > 1:
            exchange = spread_over(config, mtp, 0, ranks, redundant, rows, threshold).exchange
        weights = weight_bytes(config, mtp, None if exchange is None else exchange.size.slots)
    else:
        weights = plain_weight_bytes(config, mtp, value_bytes, ranks, redundant)
    try:
        plan = plan_memory(
            total,
            free,
            share,
            weights,
            step_bytes(config, rows, sequences, exchange) * value_bytes // 2,
            layers * page_size * latent,
            pages if on_cuda else pages or CPU_PAGES,
            2 * sequences * context,
        )
    except ConfigError as error:
        if random is None:
            raise
        raise ConfigError(f"{error}; random weights may have fewer --layers") from error
    return plan.pages, plan


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
