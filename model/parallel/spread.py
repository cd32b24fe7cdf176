"""A worker's batches spread over many ranks of its own process: EP128 behind one pool of pages.

``SpreadModel`` stands for a whole ``DeepseekV3`` in the code of a worker. The sequences of a batch
are dealt out to the data-parallel groups of `VirtualRanks`, which all have the worker's one pool,
and the rows that come back are put in the batch's order again. What large expert parallelism does
to rows (empty ranks, one message a pair of ranks, two microbatches) is done to those of real
requests; nothing is faster for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdmesh.model.batch import Batch, Form, SequenceSlice
from pdmesh.model.computing import StandIn
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import VirtualRanks
from pdmesh.wire.messages import RankStatus


class SpreadModel(StandIn[DeepseekV3]):
    """See the module.

    Args:
        model: the whole one, which `ranks` are cut from.
        ranks: how many there are, and how they compute.
    """

    def __init__(self, model: DeepseekV3, ranks: VirtualRanks) -> None:
        super().__init__(model)
        self.steps = 0
        """Passes of all ranks."""
        self._ranks = ranks

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeepseekV3.forward`."""
        parts = _Parts(batch, self._ranks.groups.dp)
        tell = None if on_layer is None else _Told(len(parts.used), on_layer).layer
        self.steps += 1
        return parts.joined(self._ranks.forward(self._inputs(parts, latents, form, tell)))

    @torch.inference_mode()
    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`."""
        self._model.check_mtp(batch)
        parts = _Parts(batch, self._ranks.groups.dp)
        previous = parts.rows_of(previous_hidden)
        inputs = self._inputs(parts, latents, form, None)
        self.steps += 1
        return parts.joined(self._ranks.mtp_forward(inputs, previous))

    def status(self) -> RankStatus:
        """What there is to say of the ranks now. On any thread."""
        members = self._ranks.members
        return RankStatus(
            rank=0,
            size=self._ranks.groups.ep,
            members=members,
            steps=self.steps,
            repeated=0,
            sent_bytes=sum(self._ranks.sent(rank)[0].all for rank in members),
            virtual=True,
        )

    def _inputs(
        self, parts: _Parts, latents: Tensor, form: Form, tell: Callable[[int], None] | None
    ) -> list[RankBatch | None]:
        pools = (latents,) * self._ranks.groups.tp
        return [
            None if batch is None else RankBatch(batch, pools, form, tell)
            for batch in parts.batches
        ]


def spread(slices: Sequence[SequenceSlice], groups: int, page_size: int) -> list[list[int]]:
    """Which slices each of `groups` groups computes: their indices, ascending.

    Groups get about as many rows each; the same slices are always dealt out alike. A slice is never
    cut, and slices stay together where one writes to a page that the other has: groups do not wait
    for each other between writing latents and reading them.
    """
    bound = _bound_together(slices, page_size)
    sizes = [sum(slices[i].end - slices[i].start for i in indices) for indices in bound]
    dealt: list[list[int]] = [[] for _ in range(groups)]
    rows = [0] * groups
    for number in sorted(range(len(bound)), key=lambda n: (-sizes[n], n)):
        least = rows.index(min(rows))
        dealt[least] += bound[number]
        rows[least] += sizes[number]
    return [sorted(indices) for indices in dealt]


def _bound_together(slices: Sequence[SequenceSlice], page_size: int) -> list[list[int]]:
    """The slices in sets that share no page which one of them writes, in order of their first."""
    root = list(range(len(slices)))

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    writers: dict[int, int] = {}
    for index, item in enumerate(slices):
        begin = max(item.start, item.write_from)
        if begin < item.end:
            written = item.page_table[begin // page_size : _pages(item, page_size)]
            writers.update((page, index) for page in written if page not in writers)
    for index, item in enumerate(slices):
        for page in item.page_table[: _pages(item, page_size)]:
            if page in writers:
                first, second = sorted((find(writers[page]), find(index)))
                root[second] = first
    sets: dict[int, list[int]] = {}
    for index in range(len(slices)):
        sets.setdefault(find(index), []).append(index)
    return list(sets.values())


def _pages(item: SequenceSlice, page_size: int) -> int:
    """Pages of the table that hold positions below `end`."""
    return -(-item.end // page_size)


class _Parts:
    """A batch as one batch a group.

    Attributes:
        batches: of each group, None for one without a row.
        used: the groups that have rows.
    """

    def __init__(self, batch: Batch, groups: int) -> None:
        tokens = batch.host_tokens.tolist()
        bounds, at = [], 0
        for item in batch.slices:
            bounds.append(range(at, at + item.end - item.start))
            at += item.end - item.start
        self.batches: list[Batch | None] = []
        self._rows: list[Tensor | None] = []
        for indices in spread(batch.slices, groups, batch.page_size):
            if not indices:
                self.batches.append(None)
                self._rows.append(None)
                continue
            self.batches.append(
                Batch.build(
                    [batch.slices[i] for i in indices],
                    [tokens[bounds[i].start : bounds[i].stop] for i in indices],
                    batch.page_size,
                    batch.device,
                )
            )
            rows = [row for i in indices for row in bounds[i]]
            self._rows.append(torch.tensor(rows, device=batch.device))
        self.used = [group for group, rows in enumerate(self._rows) if rows is not None]

    def rows_of(self, whole: Tensor) -> list[Tensor | None]:
        """Of each group its rows of [T, h]."""
        return [None if rows is None else whole.index_select(0, rows) for rows in self._rows]

    def joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        """[T, h] in the order of the batch, from what each group has of it."""
        found = [(rows, part) for rows, part in zip(self._rows, parts, strict=True)]
        rows = torch.cat([r for r, _ in found if r is not None])
        values = torch.cat([part for _, part in found if part is not None])
        return torch.empty_like(values).index_copy_(0, rows, values)


class _Told:
    """Tells of a layer once all groups have told of it."""

    def __init__(self, groups: int, tell: Callable[[int], None]) -> None:
        self._groups = groups
        self._tell = tell
        self._done: Counter[int] = Counter()

    def layer(self, number: int) -> None:
        self._done[number] += 1
        if self._done[number] == self._groups:
            self._tell(number)
