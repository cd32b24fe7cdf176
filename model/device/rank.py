"""One rank of a model on devices: its own rows, and the experts it holds for the rows of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form
from pdmesh.model.device.graphs import Capture, StepGraphs, Steps, cuda_capture, half_of
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.padding import fits, graph_sizes, padded_size
from pdmesh.model.device.stages import DeviceWork, Stages
from pdmesh.model.device.step import plan_step
from pdmesh.model.device.weights import MlpWeights, MoeWeights
from pdmesh.model.parallel.microbatch import reads_ahead, split_batch
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable
from pdmesh.model.parallel.schedule import Item, Mode, plan_schedule
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)


class DeviceRank:
    """Computes steps that all ranks take part in, each with its own rows, none included.

    All ranks call the same methods in the same order with the same `mode`; what differs is the
    batch. `exchange.check` says afterwards whether everybody did.

    Args:
        model: its weights, of the routed experts those that this rank holds, in slots.
        exchange: with the other ranks.
        placement: of the experts.

    Attributes:
        routed: numbers of the layers that have routed experts, in order.
    """

    def __init__(self, model: DeviceModel, exchange: NvshmemExperts, placement: Placement) -> None:
        self.model = model
        self.exchange = exchange
        self.placement = placement
        weights = model.weights
        layers = [*weights.layers, *(() if weights.mtp is None else (weights.mtp.layer,))]
        routed = [n for n, layer in enumerate(layers) if isinstance(layer.mlp, MoeWeights)]
        self.routed = tuple(routed)
        experts = (len(routed), model.config.n_routed_experts)
        self._stages = Stages(
            model.layers,
            layers,
            {layer: number for number, layer in enumerate(routed)},
            exchange,
            model.config.rms_norm_eps,
            torch.zeros(experts, dtype=torch.int64, device=model.device),
        )
        self._pool: Tensor | None = None
        self._graphs: dict[tuple[Mode, int], list[StepGraphs]] = {}
        self._idle: dict[tuple[Mode, int], Callable[[], None]] = {}

    def take_load(self) -> Tensor:
        """How often rows of this rank chose each expert since the last call: [MoE layers, experts]
        int64 on the host."""
        load = self._stages.load.cpu().clone()
        self._stages.load.zero_()
        return load

    def moves(self, placement: Placement) -> list[tuple[int, int, int]]:
        """MoE layer, slot and expert of what this rank lacks for a placement."""
        rank = self.exchange.rank
        return [
            (layer, slot, expert)
            for layer, (before, after) in enumerate(
                zip(self.placement.layers, placement.layers, strict=True)
            )
            for slot, expert in enumerate(after[rank])
            if before[rank][slot : slot + 1] != (expert,)
        ]

    @torch.no_grad()
    def place(self, placement: Placement, expert: Callable[[int, int], MlpWeights]) -> None:
        """Other places of the experts, in the memory that captured graphs read. Between steps, by
        all ranks between the same ones.

        Args:
            placement: with no more slots or copies than there is room for.
            expert: the weights of an expert of a MoE layer, by its number there and in it.
        """
        for layer, slot, number in self.moves(placement):
            held, given = self._stages.weights[self.routed[layer]].mlp, expert(layer, number)
            assert isinstance(held, MoeWeights)
            for there, new in ((held.gate_up, given.gate_up), (held.down, given.down)):
                there.values[slot].copy_(new.values)
                there.scales[slot].copy_(new.scales)
        layers = range(len(placement.layers))
        self.exchange.place([ReplicaTable.build(placement, n, self.model.device) for n in layers])
        self.placement = placement

    @torch.no_grad()
    def forward(
        self,
        mode: Mode,
        batch: Batch | None = None,
        latents: Tensor | None = None,
        form: Form = "absorbed",
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeviceModel.forward`; without a batch [0, hidden]."""
        if batch is None or latents is None:
            return self._without_rows(mode, 0)
        self.model.check(batch, latents)
        if on_layer is None and (graphs := self._graphs_for(mode, batch, form, latents, 0)):
            return graphs.run(batch, self.model.num_latent_layers)
        steps = self._planned(mode, batch, form, latents, 0)
        entering = self.model.entering(steps[0])
        return self._walk(mode, 0, DeviceWork(steps, entering, latents, on_layer))

    @torch.no_grad()
    def mtp_forward(
        self,
        mode: Mode,
        batch: Batch | None = None,
        previous: Tensor | None = None,
        latents: Tensor | None = None,
        form: Form = "absorbed",
    ) -> Tensor:
        """As `DeviceModel.mtp_forward`; without a batch [0, hidden]."""
        if batch is None or previous is None or latents is None:
            return self._without_rows(mode, 1)
        self.model.check_mtp(batch, latents)
        if graphs := self._graphs_for(mode, batch, form, latents, 1):
            return graphs.run(batch, self.model.num_latent_layers, previous)
        steps = self._planned(mode, batch, form, latents, 1)
        entering = self.model.entering_mtp(steps[0], previous)
        return self._walk(mode, 1, DeviceWork(steps, entering, latents))

    @torch.no_grad()
    def capture(
        self,
        pool: Tensor,
        rows: Collection[int],
        most: int,
        mtp_rows: Collection[int] = (),
        modes: Sequence[Mode] = ("dispatch_overlap",),
        recorder: Capture | None = None,
    ) -> None:
        """From now on computes decode steps over `pool` by graphs. All ranks call it alike: what is
        captured is computed beforehand, and then ranks wait for each other.

        Args:
            pool, rows, most, mtp_rows: as in `DeviceModel.capture`.
            modes: of the steps to come; a step of another one is launched kernel by kernel.
            recorder: how; by default CUDA graphs with one memory.
        """
        recorder = recorder or cuda_capture(torch.cuda.graph_pool_handle())
        page_size = pool.shape[2]
        longest = -(-self.model.config.max_position_embeddings // page_size)
        self._pool = pool
        for mode in modes:
            for kind, counts in ((0, rows), (1, mtp_rows)):
                if not counts:
                    continue
                self._graphs[mode, kind] = [
                    self._captured(mode, kind, count, most, min(longest, pool.shape[0]), recorder)
                    for count in sorted(set(counts))
                ]
                began = time.monotonic()
                replay, _ = recorder(lambda mode=mode, kind=kind: self._nothing(mode, kind))  # type: ignore[misc]
                self._idle[mode, kind] = replay
                seconds = round(time.monotonic() - began, 2)
                event(log, "captured an idle rank's graph", mode=mode, seconds=seconds)

    def _captured(
        self, mode: Mode, kind: int, count: int, most: int, pages: int, recorder: Capture
    ) -> StepGraphs:
        model, pool = self.model, self._pool

        def compute(steps: Steps, previous: Tensor | None) -> Tensor:
            if kind:
                assert previous is not None
                entering = model.entering_mtp(steps[0], previous)
            else:
                entering = model.entering(steps[0])
            return self._walk(mode, kind, DeviceWork(steps, entering, pool))

        graphs = StepGraphs(
            compute,
            count,
            graph_sizes(most),
            pages,
            model.weights.embedding[:0] if kind else None,
            kind,
            model.device,
            model.layers.planned,
            recorder,
            mode == "microbatch",
        )
        graphs.warm_up(f"{'mtp' if kind else 'main'} {mode}")
        return graphs

    def _walk(self, mode: Mode, kind: int, work: DeviceWork) -> Tensor:
        return self._stages.walk(self._schedule(mode, kind), work)

    def _schedule(self, mode: Mode, kind: int) -> tuple[Item, ...]:
        count = self.model.config.num_hidden_layers
        numbers = range(count, count + 1) if kind else range(count)
        return plan_schedule([(number, number in self.routed) for number in numbers], mode)

    def _without_rows(self, mode: Mode, kind: int) -> Tensor:
        replay = self._idle.get((mode, kind))
        if replay is None:
            return self._nothing(mode, kind)
        replay()
        return self.model.weights.embedding[:0]

    def _nothing(self, mode: Mode, kind: int) -> Tensor:
        none = self.model.weights.embedding[:0].clone()
        return self._walk(mode, kind, DeviceWork((), none, None))

    def _planned(
        self, mode: Mode, batch: Batch, form: Form, latents: Tensor, first_key: int
    ) -> Steps:
        """The batch, and its halves where both have rows; the rows of all planned for attention."""
        halves = split_batch(batch) if mode == "microbatch" else None
        return tuple(
            self.model.layers.planned(plan_step(one, form, latents.shape[1], first_key))
            for one in (batch, *(halves or ()))
        )

    def _graphs_for(
        self, mode: Mode, batch: Batch, form: Form, latents: Tensor, kind: int
    ) -> StepGraphs | None:
        if self._pool is None or latents.data_ptr() != self._pool.data_ptr():
            return None
        found = self._graphs.get((mode, kind), [])
        graphs = next((g for g in found if fits(batch, form, g.rows, g.sizes, g.pages)), None)
        if graphs is not None and mode == "microbatch":
            size = padded_size(len(batch.slices), graphs.sizes)
            assert size is not None
            cut, page_size = half_of(size), batch.page_size
            if reads_ahead(batch.slices[:cut], batch.slices[cut:], page_size):
                return None
        return graphs
