"""How a model on devices is spread over ranks: what each holds, what exchanges take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.weights import round_up
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.plans import first_placement
from pdmesh.model.parallel.schedule import Mode
from pdmesh.wire.errors import ConfigError


@dataclass(frozen=True)
class Exchange:
    """How ranks exchange rows, the same on all of them.

    Attributes:
        size: of the exchange.
        threshold: rows of the largest batch from which on all compute in two microbatches.
    """

    size: ExchangeSize
    threshold: int

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Schedules that steps of such sizes have."""
        if self.threshold > self.size.tokens:
            return ("dispatch_overlap",)
        return ("dispatch_overlap", "microbatch") if self.threshold > 1 else ("microbatch",)

    @property
    def lanes(self) -> int:
        """Exchanges in flight."""
        return 2 if "microbatch" in self.modes else 1

    @property
    def symmetric(self) -> int:
        """Bytes of symmetric memory."""
        return self.lanes * self.size.symmetric_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that stays."""
        return self.symmetric + self.lanes * self.size.arrived_bytes()


@dataclass(frozen=True)
class Spread:
    """One rank's part.

    Attributes:
        rank: its number.
        placement: of the experts.
        exchange: with the others.
    """

    rank: int
    placement: Placement
    exchange: Exchange

    @property
    def held(self) -> Sequence[Sequence[int]]:
        """The experts in the rank's slots, for each layer that has any."""
        return [layer[self.rank] for layer in self.placement.layers]


def spread_over(
    config: ModelConfig, mtp: bool, rank: int, ranks: int, redundant: int, rows: int, threshold: int
) -> Spread:
    """Where experts are, and room for whatever rows choose them.

    As on one rank alone, steps of up to `MASKED_ROWS` rows take the masked layout, with room for
    all rows of all ranks at every expert; larger ones, those of a prefill, the contiguous one.

    Args:
        config: of the model.
        mtp: whether the MTP layer is there too.
        rank, ranks: this rank, and how many there are.
        redundant: copies of experts besides the first of each, in every layer.
        rows: the most that one rank has in a step.
        threshold: of `Exchange`.

    Raises:
        ConfigError: the model has no routed experts, or rows that cannot travel.
    """
    count = config.num_hidden_layers + (1 if mtp and config.num_nextn_predict_layers else 0)
    layers = sum(config.is_moe_layer(layer) for layer in range(count))
    if not layers or config.gate is None:
        raise ConfigError("this model has no routed experts to spread over ranks")
    placement = first_placement(layers, config.n_routed_experts, ranks, redundant)
    slots = max(len(own) for layer in placement.layers for own in layer)
    shape = (ranks, slots, rows, config.hidden_size, config.gate.top_k)
    try:
        if rows > MASKED_ROWS:
            size = ExchangeSize.contiguous(*shape)
        else:
            size = ExchangeSize(*shape, round_up(ranks * rows))
    except ValueError as error:
        raise ConfigError(f"rows of this model cannot be sent to ranks in FP8: {error}") from error
    return Spread(rank, placement, Exchange(size, threshold))
