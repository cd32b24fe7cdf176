"""A step on one of several ranks: its layers in five stages, with experts spread over the ranks.

The stages are those of `pdmesh.model.parallel.schedule`. Nothing here waits on the host or
allocates memory that outlives the step, so a CUDA graph may hold a whole step, its waits for other
ranks included. A rank without rows runs the same schedule: its experts are there for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdmesh.kernels.quantised import Rows
from pdmesh.model.device.graphs import Steps
from pdmesh.model.device.layers import Layers
from pdmesh.model.device.step import DeviceStep, padding_of_halves
from pdmesh.model.device.weights import LayerWeights, MlpWeights, MoeWeights
from pdmesh.model.parallel.exchange import Channel, CombineHandle, DispatchHandle
from pdmesh.model.parallel.nvshmem import NvshmemExperts, ReceivedContiguous, ReceivedMasked
from pdmesh.model.parallel.schedule import WHOLE, Item, Stage

LEAST_SORTED = 64
"""Rows of an expert that a prefill expects at least."""


@dataclass
class DeviceFlow:
    """A microbatch, or the whole batch, on its way through the layers.

    Attributes:
        number: of the microbatch.
        step: its rows; None without any.
        residual: [m, hidden], changed in place.
        output: [m, hidden], what the next norm adds to it.
        rows, normed: after the post norm, quantised and not.
        ids, weights: [m, k], what the router chose; an id of -1 is none.
        shared: what the shared experts gave, or None.
    """

    number: int
    step: DeviceStep | None
    residual: Tensor
    output: Tensor | None = None
    query: Tensor | None = None
    rows: Rows | None = None
    normed: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    shared: Tensor | None = None
    dispatched: DispatchHandle | None = None
    combined: CombineHandle | None = None


class DeviceWork:
    """One rank's part of one pass.

    Args:
        steps: the whole batch, or none without a row; then its halves, if both have rows.
        residual: [m, hidden], what goes into the first layer; changed.
        pool: the pages.
        on_layer: called with a layer's number once its latents are in the pages.
    """

    def __init__(
        self,
        steps: Steps,
        residual: Tensor,
        pool: Tensor | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.pool = pool
        self.on_layer = on_layer
        self.projected: dict[int, int] = {}
        whole = steps[0] if steps else None
        first, second = (*steps[1:], None)[:2] if len(steps) > 1 else (whole, None)
        cut = residual.shape[0] if first is None else first.tokens.shape[0]
        self._whole = DeviceFlow(WHOLE, whole, residual)
        self._ranges = (slice(None, cut), slice(cut, None))
        padding = (None, None) if whole is None else padding_of_halves(whole, cut)
        self._halves = [
            DeviceFlow(number, None if s is None else replace(s, num_rows=rows), residual[at])
            for number, (s, rows, at) in enumerate(
                zip((first, second), padding, self._ranges, strict=True)
            )
        ]
        self._split = False

    def flow(self, microbatch: int) -> DeviceFlow:
        """Its rows, after splitting or joining the batch where the schedule changes over."""
        whole, halves = self._whole, self._halves
        if microbatch == WHOLE and self._split:
            outputs = [half.output for half in halves if half.output is not None]
            whole.output = torch.cat(outputs) if outputs else None
            self._split = False
        elif microbatch != WHOLE and not self._split:
            for half, at in zip(halves, self._ranges, strict=True):
                half.output = None if whole.output is None else whole.output[at]
            self._split = True
        return whole if microbatch == WHOLE else halves[microbatch]

    def result(self) -> Tensor:
        """[m, hidden] after the last layer."""
        flow = self.flow(WHOLE)
        return flow.residual if flow.output is None else flow.residual.add_(flow.output)


@dataclass(frozen=True)
class Stages:
    """What a rank does with its rows, stage by stage.

    Attributes:
        layers: the arithmetic.
        weights: of each layer by number, the MTP layer's last; routed experts are this rank's.
        moe_layers: the number in the placement of each layer that has routed experts.
        exchange: with the other ranks.
        eps: of the norms.
        load: [MoE layers, experts] int64, how often rows of this rank chose each expert; rows that
            fill a captured step up before a sequence's first one count too.
    """

    layers: Layers
    weights: Sequence[LayerWeights]
    moe_layers: Mapping[int, int]
    exchange: NvshmemExperts
    eps: float
    load: Tensor

    def walk(self, schedule: Sequence[Item], work: DeviceWork) -> Tensor:
        """The whole schedule: [m, hidden]."""
        for item in schedule:
            self.run(item, work)
        return work.result()

    def run(self, item: Item, work: DeviceWork) -> None:
        """One item of it."""
        flow, weights = work.flow(item.microbatch), self.weights[item.layer]
        match item.stage:
            case Stage.DENSE:
                self._project(item, work, flow, weights)
                self._attend(item, work, flow, weights)
                if flow.rows is not None:
                    assert isinstance(weights.mlp, MlpWeights)
                    flow.output = self.layers.mlp(weights.mlp, flow.rows)
                    flow.rows = flow.normed = None
            case Stage.PROJECT:
                self._project(item, work, flow, weights)
            case Stage.ATTEND:
                self._attend(item, work, flow, weights)
                self._route(item, flow, _moe(weights))
            case Stage.SEND:
                self._dispatch(item, flow)
                self._share(flow, _moe(weights))
            case Stage.SHARED_FIRST:
                self._share(flow, _moe(weights))
                self._dispatch(item, flow)
            case Stage.EXPERTS:
                self._compute(flow, _moe(weights))
            case Stage.RECEIVE:
                self._receive(flow)

    def _project(self, item: Item, work: DeviceWork, flow: DeviceFlow, w: LayerWeights) -> None:
        ops = self.layers.ops
        if flow.step is not None:
            assert work.pool is not None
            if flow.output is None:
                rows, _ = ops.rms_norm_quantise(flow.residual, w.input_norm, self.eps)
            else:
                rows, _ = ops.add_rms_norm_quantise(
                    flow.output, flow.residual, w.input_norm, self.eps
                )
            flow.output = None
            flow.query = self.layers.project(w, rows, flow.step, work.pool, item.layer)
        done = work.projected.get(item.layer, 0) + 1
        work.projected[item.layer] = done
        if work.on_layer is not None and done == (1 if item.microbatch == WHOLE else 2):
            work.on_layer(item.layer)

    def _attend(self, item: Item, work: DeviceWork, flow: DeviceFlow, w: LayerWeights) -> None:
        if flow.step is None:
            return
        assert work.pool is not None
        assert flow.query is not None
        attended = self.layers.attend(w, flow.query, flow.step, work.pool, item.layer)
        flow.query = None
        flow.rows, flow.normed = self.layers.ops.add_rms_norm_quantise(
            attended, flow.residual, w.post_norm, self.eps
        )

    def _route(self, item: Item, flow: DeviceFlow, w: MoeWeights) -> None:
        if flow.step is None:
            top_k = self.exchange.size.top_k
            flow.normed = flow.residual
            flow.ids = torch.empty((0, top_k), dtype=torch.int32, device=flow.residual.device)
            flow.weights = torch.empty((0, top_k), device=flow.residual.device)
            return
        assert flow.normed is not None
        routed = self.layers.route(w, flow.normed, flow.step.num_rows)
        flow.ids, flow.weights = routed.ids, routed.weights
        self.load[self.moe_layers[item.layer]].add_(routed.counts)

    def _dispatch(self, item: Item, flow: DeviceFlow) -> None:
        assert flow.normed is not None
        assert flow.ids is not None
        channel = Channel("dispatch", 0, item.layer, item.microbatch)
        number = self.moe_layers[item.layer]
        flow.dispatched = self.exchange.dispatch_send(channel, number, flow.normed, flow.ids)

    def _share(self, flow: DeviceFlow, w: MoeWeights) -> None:
        if w.shared is not None and flow.rows is not None:
            flow.shared = self.layers.mlp(w.shared, flow.rows)

    def _compute(self, flow: DeviceFlow, w: MoeWeights) -> None:
        assert flow.dispatched is not None
        received = self.exchange.dispatch_recv(flow.dispatched)
        size = self.exchange.size
        expected = max(1, (flow.residual.shape[0] or size.tokens) * size.top_k // size.slots)
        if isinstance(received, ReceivedContiguous):
            # The others may have many more rows than this rank, which tiles for few would hold up.
            made = received.quantised_outputs(
                self.layers.ops, w.gate_up, w.down, max(expected, LEAST_SORTED)
            )
        else:
            assert isinstance(received, ReceivedMasked)
            rows, counts, _ = received.arrived
            made = self.layers.masked_experts(w, rows, counts, expected)
        flow.combined = self.exchange.combine_send(flow.dispatched, received, made)
        flow.dispatched = None

    def _receive(self, flow: DeviceFlow) -> None:
        assert flow.combined is not None
        assert flow.weights is not None
        flow.output = self.exchange.combine_recv(flow.combined, flow.weights, flow.shared)
        flow.rows = flow.normed = flow.ids = flow.weights = flow.shared = flow.combined = None


def _moe(weights: LayerWeights) -> MoeWeights:
    assert isinstance(weights.mlp, MoeWeights)
    return weights.mlp
