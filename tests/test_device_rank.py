"""A model on devices with its experts spread over ranks says what the whole one says.

Ranks are threads over memory of one process. What their exchange does on a GPU is done here by
Triton's interpreter, or by the plain definition.
"""

import pytest
import torch
from device_cases import CPU
from device_ranks import PAGE, in_turn, moe_layers, random_reference, ranks_of, together
from model_cases import tokens_of

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.building import build_expert
from pdmesh.model.device.graphs import plain_capture
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.device.stages import DeviceWork
from pdmesh.model.parallel.exchange import RankLost
from pdmesh.model.parallel.placement import Placement

TABLES = [(3, 9, 1, 12), (0, 2, 15, 5), (7, 4, 11, 6), (8, 10, 13, 14)]
MODES = ["no_overlap", "dispatch_overlap", "microbatch"]


class Talk:
    """One rank's sequences: prompts of some lengths, and what is generated after them."""

    def __init__(self, model, lengths, seed):
        self.model, self.lengths = model, lengths
        self.prompts = [tokens_of(n, seed + i) for i, n in enumerate(lengths)]
        self.pool = model.new_latents(16, PAGE).fill_(float("nan"))
        self.at = list(lengths)
        self.next = [prompt[-1] for prompt in self.prompts]
        self.hidden = None

    def prompt(self):
        if not self.lengths:
            return None
        slices = [SequenceSlice(TABLES[i], 0, n - 1, 0) for i, n in enumerate(self.lengths)]
        return Batch.build(slices, [p[:-1] for p in self.prompts], PAGE)

    def later(self):
        """The prompts' rows of the MTP layer, and which hidden states they take."""
        if not self.lengths:
            return None, []
        slices = [SequenceSlice(TABLES[i], 1, n - 1, 1) for i, n in enumerate(self.lengths)]
        ends = [sum(n - 1 for n in self.lengths[: i + 1]) for i in range(len(self.lengths))]
        rows = [
            r
            for end, n in zip(ends, self.lengths, strict=True)
            for r in range(end - n + 1, end - 1)
        ]
        return Batch.build(slices, [p[1:-1] for p in self.prompts], PAGE), rows

    def step(self):
        if not self.lengths:
            return None
        slices = [SequenceSlice(TABLES[i], n - 1, n, n - 1) for i, n in enumerate(self.at)]
        return Batch.build(slices, [[token] for token in self.next], PAGE)

    def heard(self, model, hidden):
        self.hidden = hidden
        self.next = model.logits(hidden).argmax(-1).tolist()
        self.at = [n + 1 for n in self.at]
        return list(self.next)


def answers(forward, mtp, talk, model, steps=4):
    """Greedy tokens, and drafts of the MTP layer: [steps] of (tokens, drafts)."""
    hidden = forward(talk.prompt(), talk.pool, "mha")
    later, rows = talk.later()
    mtp(later, hidden[rows], talk.pool, "mha")
    found = []
    for _ in range(steps):
        batch = talk.step()
        hidden = forward(batch, talk.pool, "absorbed")
        drafts = mtp(batch, hidden, talk.pool, "absorbed")
        if batch is not None:
            assert not bool(drafts.isnan().any())
            found.append((talk.heard(model, hidden), model.mtp_logits(drafts).argmax(-1).tolist()))
    return found


def alone(model, lengths, seed):
    return answers(model.forward, model.mtp_forward, Talk(model, lengths, seed), model)


def of_rank(rank, lengths, seed, mode, mtp_mode=None):
    def forward(batch, pool, form):
        return rank.forward(mode, batch, pool, form)

    def mtp(batch, hidden, pool, form):
        return rank.mtp_forward(mtp_mode or mode, batch, hidden, pool, form)

    talk = Talk(rank.model, lengths, seed)
    return answers(forward, mtp, talk, rank.model)


@pytest.fixture(scope="module")
def models():
    return random_reference(3)


LENGTHS = {2: [(20, 33, 5), (17,)], 4: [(9,), (), (20, 33, 5, 40), (31, 3)]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_and_drafts_of_ranks_are_those_of_the_whole_model(models, ranks, mode):
    model, whole = models
    group = ranks_of(model, ranks)
    lengths = LENGTHS[ranks]
    given = together(group, lambda n, rank: of_rank(rank, lengths[n], 100 * n, mode))
    expected = [alone(whole, own, 100 * n) if own else [] for n, own in enumerate(lengths)]
    assert given == expected
    for rank in group:
        assert rank.exchange.sent.total("dispatch") > 0


def test_ranks_of_one_step_may_have_captured_graphs_other_sizes_or_none(models):
    """Rank 0 has graphs for both kinds of step and an idle step; rank 1 launches its own."""
    model, whole = models
    group = ranks_of(model, 2)
    lengths = [(20, 33, 5), (17,)]
    talks = [
        Talk(rank.model, own, 100 * n)
        for n, (rank, own) in enumerate(zip(group, lengths, strict=True))
    ]

    def run(number, rank):
        modes = ("dispatch_overlap", "microbatch")
        rank.capture(talks[number].pool, (1,), 4, (1,), modes, plain_capture)
        if number == 1:
            rank._graphs.clear()

        def forward(batch, pool, form):
            return rank.forward(turn(), batch, pool, form)

        def mtp(batch, hidden, pool, form):
            return rank.mtp_forward("microbatch", batch, hidden, pool, form)

        step = iter(range(100))

        def turn():
            return modes[next(step) % 2]

        return answers(forward, mtp, talks[number], rank.model)

    given = together(group, run)
    assert given == [alone(whole, own, 100 * n) for n, own in enumerate(lengths)]


def test_an_idle_rank_replays_what_it_captured(models):
    model, whole = models
    group = ranks_of(model, 2)
    replays = []

    def recorder(compute):
        replay, output = plain_capture(compute)

        def counted():
            replays.append(output.shape[0])
            replay()

        return counted, output

    def run(number, rank):
        lengths = [(20, 33), ()][number]
        talk = Talk(rank.model, lengths, 7)
        rank.capture(
            talk.pool, (1,), 2, (1,), ("microbatch",), recorder if number else plain_capture
        )
        return answers(
            lambda batch, pool, form: rank.forward("microbatch", batch, pool, form),
            lambda batch, hidden, pool, form: rank.mtp_forward(
                "microbatch", batch, hidden, pool, form
            ),
            talk,
            rank.model,
        )

    given = together(group, run)
    assert given == [alone(whole, (20, 33), 7), []]
    assert replays == [0] * 10  # a prompt, four steps, and the MTP rows of each


@pytest.mark.parametrize("mode", ["dispatch_overlap", "microbatch"])
def test_the_kernels_of_the_exchange_give_the_same_bits_as_its_definition(models, mode):
    """One step of two ranks, item by item: threads would be at odds in the interpreter."""
    model, _ = models
    found = []
    for host in (True, False):
        group = ranks_of(model, 2, tokens=24, host=host)
        works = []
        for number, rank in enumerate(group):
            talk = Talk(rank.model, [(6, 9), (7,)][number], number)
            steps = rank._planned(mode, talk.prompt(), "mha", talk.pool, 0)
            works.append(DeviceWork(steps, rank.model.entering(steps[0]), talk.pool))
        found.append(in_turn(group, works, group[0]._schedule(mode, 0)))
    for kernels, definition in zip(*found, strict=True):
        assert torch.equal(kernels, definition)


def test_copies_of_experts_and_experts_that_moved_change_no_token(models):
    model, whole = models
    layers = moe_layers(model.config)
    copies = Placement(8, (((0, 1, 2, 3, 4), (5, 6, 7, 0, 4)),) * layers)
    group = ranks_of(model, 2, placement=copies)
    lengths = [(20, 33), (17,)]
    given = together(group, lambda n, rank: of_rank(rank, lengths[n], 100 * n, "microbatch"))
    assert given == [alone(whole, own, 100 * n) for n, own in enumerate(lengths)]


def test_experts_that_move_between_steps_are_read_into_the_memory_that_graphs_have(models):
    model, whole = models
    layers = moe_layers(model.config)
    before = Placement(8, (((0, 1, 2, 3, 4), (5, 6, 7, 0, 4)),) * layers)
    after = Placement(8, (((7, 1, 0, 5, 2), (5, 3, 6, 6, 4)),) * layers)
    group = ranks_of(model, 2, placement=before, most_copies=3)
    source = ModelSource(model)
    lengths = [(20, 33), (17,)]
    talks = [
        Talk(rank.model, own, 100 * n)
        for n, (rank, own) in enumerate(zip(group, lengths, strict=True))
    ]
    read = [[], []]

    def run(number, rank):
        def expert(layer, which):
            read[number].append(which)
            return build_expert(model.config, source, rank.routed[layer], which, CPU)

        rank.capture(talks[number].pool, (1,), 2, (1,), ("microbatch",), plain_capture)
        rank.place(after, expert)
        assert rank.moves(after) == []

        def forward(batch, pool, form):
            return rank.forward("microbatch", batch, pool, form)

        def mtp(batch, hidden, pool, form):
            return rank.mtp_forward("microbatch", batch, hidden, pool, form)

        return answers(forward, mtp, talks[number], rank.model)

    given = together(group, run)
    assert given == [alone(whole, own, 100 * n) for n, own in enumerate(lengths)]
    assert read == [[7, 0, 5, 2] * layers, [3, 6, 6] * layers]


def test_what_rows_ask_for_is_counted_until_it_is_taken(models):
    model, _ = models
    group = ranks_of(model, 2)
    lengths = [(20, 33), ()]
    together(group, lambda n, rank: of_rank(rank, lengths[n], 100 * n, "microbatch"))
    load = group[0].take_load()
    top, steps = model.config.gate.top_k, 4
    assert load[:-1].sum(1).tolist() == [(19 + 32 + 2 * steps) * top] * (load.shape[0] - 1)
    assert int(load[-1].sum()) == (18 + 31 + 2 * steps) * top
    assert not group[0].take_load().any()
    assert not group[1].take_load().any()


@pytest.mark.parametrize("mode", ["dispatch_overlap", "microbatch"])
def test_sequences_that_fill_up_a_captured_step_are_sent_to_nobody(models, mode):
    model, _ = models
    group = ranks_of(model, 2)

    def run(number, rank):
        talk = Talk(rank.model, [(20, 33, 5), ()][number], 7)
        rank.forward(mode, talk.prompt(), talk.pool, "mha")
        rank.capture(talk.pool, (1,), 4, (), (mode,), plain_capture)
        rank.take_load()
        before = rank.exchange.sent.total("combine")
        rank.forward(mode, talk.step(), talk.pool, "absorbed")
        return rank.take_load()[:-1].sum(1).tolist(), rank.exchange.sent.total("combine") - before

    (asked, _), (nothing, returned) = together(group, run)
    layers, row = len(asked), model.config.gate.top_k * 2 * model.config.hidden_size
    assert asked == [3 * model.config.gate.top_k] * layers
    assert nothing == [0] * layers
    assert returned <= 3 * row * layers


def test_a_rank_that_does_not_come_is_named_and_no_result_is_used(models):
    model, _ = models
    group = ranks_of(model, 2, timeout_s=0.2)
    talk = Talk(group[0].model, (9,), 1)
    with pytest.raises(RankLost, match="rank 1 is lost"):
        group[0].forward("dispatch_overlap", talk.prompt(), talk.pool, "mha")


def test_a_step_of_more_rows_than_the_exchange_has_room_for_is_refused(models):
    model, _ = models
    group = ranks_of(model, 2, tokens=4)
    talk = Talk(group[0].model, (9,), 1)
    with pytest.raises(ValueError, match=r"\[8, 128\] rows; at most 4"):
        group[0].forward("dispatch_overlap", talk.prompt(), talk.pool, "mha")
