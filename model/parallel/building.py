"""Makes ranks out of a whole model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.expert_source import Experts, ExpertSource, ModelExperts
from pdmesh.model.moe import Moe
from pdmesh.model.parallel.exchange import ExpertParallel, Transport
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.load import ExpertLoad
from pdmesh.model.parallel.local import LocalExperts
from pdmesh.model.parallel.messages import MessageExperts
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.rank import Rank
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.shards import LayerShard, expert_shard, keep_heads, layer_shard
from pdmesh.model.parallel.tensor import TensorParallel
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import Arithmetic


@dataclass(frozen=True)
class Held:
    """The weights of a rank's slots under a placement, one entry a MoE layer."""

    placement: Placement
    experts: Sequence[Experts]


class RankBuilder:
    """Cuts `model` for `groups`; routed experts are read from `source`, by default from the model.

    Raises:
        ConfigError: TP does not divide the heads, or the model has no routed experts to spread.
    """

    def __init__(
        self,
        model: DeepseekV3,
        groups: Groups,
        arithmetic: Arithmetic,
        wire: WireFormat,
        source: ExpertSource | None = None,
    ) -> None:
        self._model = model
        self._source = ModelExperts(model) if source is None else source
        self._groups = groups
        self._arithmetic = arithmetic
        self._wire = wire
        blocks = model.blocks()
        self._moes = [block.mlp for block in blocks if isinstance(block.mlp, Moe)]
        if not self._moes and groups.ep > 1:
            raise ConfigError("this model has no routed experts to spread over ranks")
        numbers = iter(range(len(self._moes)))
        self._moe_layers = [next(numbers) if isinstance(b.mlp, Moe) else None for b in blocks]
        self._groups.heads(0, model.config.num_attention_heads)  # they must divide
        self._shards: dict[int | None, list[LayerShard]] = {}
        self._tables: tuple[Placement | None, list[ReplicaTable]] = (None, [])

    def _layers(self, tp: int | None) -> list[LayerShard]:
        """Of the TP rank `tp`; None: with all heads."""
        if tp not in self._shards:
            config = self._model.config
            count = config.num_attention_heads
            heads = range(count) if tp is None else self._groups.heads(tp, count)
            blocks = self._model.blocks()
            self._shards[tp] = [layer_shard(b, config, heads, self._arithmetic) for b in blocks]
        return self._shards[tp]

    def keep_heads(self, rank: int) -> None:
        """Frees the attention heads of the model that `rank` does not share.

        It computes no rows by itself from then on, and nobody else can use the model.
        """
        tp = self._groups.coordinates(rank).tp
        for block, shard in zip(self._model.blocks(), self._layers(tp), strict=True):
            keep_heads(block, shard)
        self._shards[None] = self._layers(tp)  # alone it has no row

    def routed(self, layer: int) -> bool:
        """Whether a layer has routed experts."""
        return self._moe_layers[layer] is not None

    def placement(self, given: Placement | None) -> Placement:
        """`given` after checking that it fits, or each expert once, in order.

        Raises:
            ConfigError: it does not fit the model or the groups.
        """
        experts, ranks = self._model.config.n_routed_experts, self._groups.ep
        if given is None:
            return Placement.even(len(self._moes), experts, ranks)
        found = (len(given.layers), given.num_experts, given.num_ranks)
        if found != (len(self._moes), experts, ranks):
            raise ConfigError(
                f"the placement is for {found[0]} MoE layers of {found[1]} experts on {found[2]} "
                f"ranks, not for {len(self._moes)} of {experts} on {ranks}"
            )
        return given

    def build(
        self,
        members: Sequence[int],
        placement: Placement,
        transport: Transport,
        old: tuple[Rank, Placement] | None = None,
        ahead: Sequence[Held] = (),
        alone: bool = False,
    ) -> Rank:
        """The rank of `transport` among `members`; with all heads where it is `alone` in its group.

        `old` is what it was under the placement before: experts that it holds already are not read
        again, and it goes on counting. Nor are those that were read `ahead`.
        """
        rank = transport.rank
        at = self._groups.coordinates(rank)
        ends: ExpertParallel
        if self._groups.ep == 1 and placement == self.placement(None):
            ends = LocalExperts(self._wire)
        else:
            ends = MessageExperts(transport, members, self._replicas(placement), self._wire)
        group = self._groups.tp_group(at.dp)
        held = [*ahead, *([] if old is None else [Held(old[1], old[0].experts)])]
        together = len(group) > 1 and not alone
        return Rank(
            self._layers(at.tp if together else None),
            self._moe_layers,
            self.hold(rank, placement, held).experts,
            ends,
            TensorParallel(transport, group) if together else None,
            self._arithmetic == "fast",
            ExpertLoad(len(self._moes), self._model.config.n_routed_experts)
            if old is None
            else old[0].load,
        )

    def hold(self, rank: int, placement: Placement, held: Sequence[Held] = ()) -> Held:
        """The weights of a rank's slots under `placement`; what is `held` already is not read."""
        layers = range(len(self._moes))
        return Held(placement, [self._experts(n, rank, placement, held) for n in layers])

    def _experts(
        self, layer: int, rank: int, placement: Placement, held: Sequence[Held]
    ) -> Experts:
        wanted = placement.layers[layer][rank]
        have: dict[int, Experts] = {}
        for one in held:
            slots, (gate_up, down) = one.placement.layers[layer][rank], one.experts[layer]
            if slots == wanted:
                return gate_up, down
            have.update((e, (gate_up[s], down[s])) for s, e in enumerate(slots))
        return expert_shard(partial(self._source.read, layer), wanted, have)

    def _replicas(self, placement: Placement) -> list[ReplicaTable]:
        if self._tables[0] is not placement:
            layers = range(len(placement.layers))
            self._tables = (
                placement,
                [ReplicaTable.build(placement, n, self._model.device) for n in layers],
            )
        return self._tables[1]
