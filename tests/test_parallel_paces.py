"""Ranks that run at their own pace, each in a thread, over a transport that waits."""

import random
import threading
import time

import pytest
import torch
from parallel_rig import a_step, later_rows, redundant, same, skewed_model, wide_model

from pdmesh.model.parallel.building import RankBuilder
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.schedule import plan_schedule
from pdmesh.model.parallel.step import RankBatch, begin, first_rows, mtp_rows, walk

LAYERS = [(0, False), (1, True)]
LONGEST_WAIT_S = 100.0


class Post:
    """Messages between threads, each on its way for a random while; `lost` ranks send none."""

    def __init__(self, seed):
        self.changed = threading.Condition()
        self.waiting = {}
        self.lost = set()
        self.random = random.Random(seed)

    def end(self, rank):
        return End(self, rank)


class End:
    def __init__(self, post, rank):
        self._post, self.rank = post, rank

    def post(self, to, channel, message):
        time.sleep(self._post.random.random() * 2e-4)
        with self._post.changed:
            key = (self.rank, to, channel)
            assert key not in self._post.waiting
            self._post.waiting[key] = message
            self._post.changed.notify_all()

    def take(self, source, channel):
        key = (source, self.rank, channel)
        box = self._post
        with box.changed:
            there = lambda: key in box.waiting or source in box.lost  # noqa: E731
            if not box.changed.wait_for(there, LONGEST_WAIT_S) or key not in box.waiting:
                raise RankLost(source, str(channel))
            return box.waiting.pop(key)


class Threads:
    """All ranks of `groups`, each of which only knows its own part of a step."""

    def __init__(self, model, groups, mode, seed=0, placement=None):
        self.model, self.groups, self.mode, self.post = model, groups, mode, Post(seed)
        builder = RankBuilder(model, groups, "exact", WireFormat())
        placed = builder.placement(placement)
        members = range(groups.ep)
        self.ranks = [builder.build(members, placed, self.post.end(r)) for r in members]
        self.steps = 0

    def run(self, inputs, rows, layers, first_key=0, without=()):
        self.steps += 1
        schedule = plan_schedule(layers, self.mode)
        found = [None] * self.groups.ep
        self.post.lost |= set(without)

        def one(number):
            at = self.groups.coordinates(number)
            both = (inputs[at.dp], rows[at.dp])
            with torch.inference_mode():
                work = begin(self.model, self.steps, self.mode, *both, at.tp, first_key)
                try:
                    found[number] = walk(self.ranks[number], schedule, work)
                except RankLost as lost:
                    found[number] = lost
                    with self.post.changed:
                        self.post.lost.add(number)
                        self.post.changed.notify_all()

        threads = [
            threading.Thread(target=one, args=(n,), daemon=True)
            for n in range(self.groups.ep)
            if n not in without
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
@pytest.mark.parametrize(("ep", "tp"), [(6, 1), (8, 2)])
def test_ranks_at_their_own_pace_give_what_one_rank_gives(mode, ep, tp):
    model = skewed_model()
    threads = Threads(model, Groups(ep, tp), mode, seed=ep, placement=redundant(288, ep))
    for lengths in ((3, 0, 7, 20), (1, 9)):
        step = a_step(model, ep // tp, tp, lengths)
        rows = [None if i is None else first_rows(model, i) for i in step.inputs]
        found = threads.run(step.inputs, rows, LAYERS)
        for dp, expected in enumerate(step.hidden):
            for rank in threads.groups.tp_group(dp):
                same([found[rank] if expected is not None else None], [expected])
        later = [
            None if mtp is None else RankBatch(later_rows(item.batch), item.latents)
            for item, mtp in zip(step.inputs, step.mtp, strict=True)
        ]
        rows = [
            None if item is None else mtp_rows(model, item, hidden[:-1])
            for item, hidden in zip(later, step.hidden, strict=True)
        ]
        found = threads.run(later, rows, [(2, True)], first_key=1)
        firsts = [found[threads.groups.tp_group(dp)[0]] for dp in range(ep // tp)]
        same(
            [f if m is not None else None for f, m in zip(firsts, step.mtp, strict=True)], step.mtp
        )
    assert not threads.post.waiting


def test_a_rank_that_is_not_there_ends_the_step_of_all_others():
    model = wide_model()
    threads = Threads(model, Groups(4), "microbatch")
    step = a_step(model, 4, 1, (5,))
    rows = [first_rows(model, item) for item in step.inputs]
    found = threads.run(step.inputs, rows, LAYERS, without=(2,))
    assert found[2] is None
    for rank in (0, 1, 3):
        assert isinstance(found[rank], RankLost)
    assert 2 in {found[rank].rank for rank in (0, 1, 3)}
