"""One rank's walk through a schedule.

`Rank.run` is a generator: it yields where it has sent what others need and goes on to wait for what
they send. A process of its own runs it through; several ranks in one process are advanced in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from pdmesh.kernels.linear import linear, pad_rows
from pdmesh.kernels.norm import rms_norm
from pdmesh.model.context import StepContext
from pdmesh.model.expert_source import Experts
from pdmesh.model.moe import Mlp, Moe
from pdmesh.model.parallel.exchange import Channel, CombineHandle, DispatchHandle, ExpertParallel
from pdmesh.model.parallel.load import ExpertLoad
from pdmesh.model.parallel.schedule import WHOLE, Item, Stage
from pdmesh.model.parallel.shards import LayerShard
from pdmesh.model.parallel.tensor import TensorParallel

_T = TypeVar("_T")


@dataclass
class Flow:
    """A microbatch, or the whole batch, on its way through the layers.

    Attributes:
        microbatch: its number in the schedule.
        x: [n, h], the residual stream of all rows.
        step: pages and plan of attention; None without a row.
        queries: from stage 1.
        own: [m, h], from stage 2: the residual stream of the rows that this rank is home to.
        normed: [m, h], the same after the post norm.
        ids, weights: [m, k], what the router chose for them.
        shared: [m, h], what the shared experts gave; None if there are none.
        dispatched, combined: what is on the wire.
    """

    microbatch: int
    x: Tensor
    step: StepContext | None
    queries: Sequence[Tensor] = ()
    own: Tensor | None = None
    normed: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    shared: Tensor | None = None
    dispatched: DispatchHandle | None = None
    combined: CombineHandle | None = None


@dataclass
class Work:
    """One rank's part of one forward pass.

    Attributes:
        number: of the pass.
        whole: all rows.
        halves: the two microbatches in the order of their rows; the second may have none.
        on_layer: called with a layer's number once its latents are in the pages.
    """

    number: int
    whole: Flow
    halves: tuple[Flow, Flow]
    on_layer: Callable[[int], None] | None = None
    split: bool = False
    projected: dict[int, int] = field(default_factory=dict)

    def flow(self, microbatch: int) -> Flow:
        """Its rows, after splitting or joining the batch where the schedule changes over."""
        if microbatch == WHOLE and self.split:
            self.whole.x = torch.cat([half.x for half in self.halves])
            self.split = False
        elif microbatch != WHOLE and not self.split:
            sizes = [half.x.shape[0] for half in self.halves]
            for half, rows in zip(self.halves, torch.split(self.whole.x, sizes), strict=True):
                half.x = rows
            self.split = True
        return self.whole if microbatch == WHOLE else self.halves[microbatch]

    def result(self) -> Tensor:
        """[n, h] after the last layer."""
        return self.flow(WHOLE).x


class Rank:
    """The weights and the ends of communication of one rank.

    Args:
        layers: the shard of each layer by number, the MTP layer's last.
        moe_layers: for each of them its number in the placement, or None.
        experts: of each MoE layer.
        expert_parallel, tensor_parallel: its ends; None without tensor parallelism.
        reduce: in tensor parallelism, add partial sums (fast) instead of gathering heads (exact).
        load: counts what rows of this rank ask for; None counts nothing.
    """

    def __init__(
        self,
        layers: Sequence[LayerShard],
        moe_layers: Sequence[int | None],
        experts: Sequence[Experts],
        expert_parallel: ExpertParallel,
        tensor_parallel: TensorParallel | None = None,
        reduce: bool = False,
        load: ExpertLoad | None = None,
    ) -> None:
        self.layers = layers
        self.experts = list(experts)
        self.expert_parallel = expert_parallel
        self.tensor_parallel = tensor_parallel
        self.load = load
        self._moe_layers = moe_layers
        self._reduce = reduce

    def run(self, item: Item, work: Work) -> Iterator[None]:
        """One item of a schedule; yields before it waits for others."""
        flow, layer = work.flow(item.microbatch), self.layers[item.layer]
        match item.stage:
            case Stage.DENSE:
                self._project(item, work, flow, layer)
                yield from self._attend(item, work, flow, layer)
                assert isinstance(layer.mlp, Mlp)
                yield from self._home(item, work, flow, layer.mlp(_some(flow.normed)))
            case Stage.PROJECT:
                self._project(item, work, flow, layer)
            case Stage.ATTEND:
                yield from self._attend(item, work, flow, layer)
                self._route(flow, layer)
            case Stage.SEND:
                self._dispatch(item, work, flow)
                self._share(flow, layer)
            case Stage.SHARED_FIRST:
                self._share(flow, layer)
                self._dispatch(item, work, flow)
            case Stage.EXPERTS:
                self._compute(item, flow)
            case Stage.RECEIVE:
                combined, weights = _some(flow.combined), _some(flow.weights)
                output = self.expert_parallel.combine_recv(combined, weights, flow.shared)
                yield from self._home(item, work, flow, output)

    def _project(self, item: Item, work: Work, flow: Flow, layer: LayerShard) -> None:
        """Stage 1."""
        if flow.step is not None:
            normed = rms_norm(pad_rows(flow.x), layer.input_norm, layer.eps)
            flow.queries = layer.attention.queries(normed, flow.step)
        done = work.projected.get(item.layer, 0) + 1
        work.projected[item.layer] = done
        if work.on_layer is not None and done == (1 if item.microbatch == WHOLE else 2):
            work.on_layer(item.layer)

    def _attend(self, item: Item, work: Work, flow: Flow, layer: LayerShard) -> Iterator[None]:
        """Stage 2 up to the post norm."""
        if flow.step is None:
            # All members of the group have no row, so none waits for another.
            flow.own = flow.normed = flow.x
            return
        rows = flow.x.shape[0]
        attended = layer.attention.attend(flow.queries, flow.step)[:rows]
        flow.queries = ()
        tp = self.tensor_parallel
        if tp is None:
            flow.own = flow.x + linear(attended, layer.o_weight, layer.o_bias)
        else:
            channel = self._channel("heads", item, work)
            own = tp.own(rows)
            if self._reduce:
                tp.scatter_send(channel, linear(attended, layer.o_weight).float())
                yield
                output = tp.sum_received(channel)
                output = output if layer.o_bias is None else output + layer.o_bias.float()
                output = output.to(flow.x.dtype)
            else:
                tp.scatter_send(channel, attended)
                yield
                gathered = torch.cat(tp.receive(channel), dim=1)
                output = linear(gathered, layer.o_weight, layer.o_bias)
            flow.own = flow.x[own.start : own.stop] + output
        flow.normed = rms_norm(flow.own, layer.post_norm, layer.eps)

    def _route(self, flow: Flow, layer: LayerShard) -> None:
        """The router, the end of stage 2."""
        assert isinstance(layer.mlp, Moe)
        flow.ids, flow.weights = layer.mlp.gate(_some(flow.normed))

    def _dispatch(self, item: Item, work: Work, flow: Flow) -> None:
        moe_layer = _some(self._moe_layers[item.layer])
        ids = _some(flow.ids)
        if self.load is not None:
            self.load.add(moe_layer, ids)
        channel = self._channel("dispatch", item, work)
        flow.dispatched = self.expert_parallel.dispatch_send(
            channel, moe_layer, _some(flow.normed), ids
        )

    def _share(self, flow: Flow, layer: LayerShard) -> None:
        assert isinstance(layer.mlp, Moe)
        shared = layer.mlp.shared_experts
        flow.shared = None if shared is None else shared(_some(flow.normed))

    def _compute(self, item: Item, flow: Flow) -> None:
        """Stage 4."""
        dispatched = _some(flow.dispatched)
        received = self.expert_parallel.dispatch_recv(dispatched)
        gate_up, down = self.experts[_some(self._moe_layers[item.layer])]
        outputs = received.outputs(gate_up, down)
        flow.combined = self.expert_parallel.combine_send(dispatched, received, outputs)
        flow.dispatched = None

    def _home(self, item: Item, work: Work, flow: Flow, output: Tensor) -> Iterator[None]:
        """Adds the feed-forward part to the own rows; gives every member of the group all rows."""
        own = _some(flow.own) + output
        tp = self.tensor_parallel
        if tp is not None and flow.step is not None:
            channel = self._channel("rows", item, work)
            tp.gather_send(channel, own)
            yield
            own = torch.cat(tp.receive(channel))
        flow.x = own
        flow.own = flow.normed = flow.ids = flow.weights = flow.shared = flow.combined = None

    def _channel(self, kind: str, item: Item, work: Work) -> Channel:
        return Channel(kind, work.number, item.layer, item.microbatch)


def _some(value: _T | None) -> _T:
    """The value, which an earlier stage must have left."""
    assert value is not None, "a stage ran before the one that it needs"
    return value
