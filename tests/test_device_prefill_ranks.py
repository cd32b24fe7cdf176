"""Prompts in chunks on ranks in FP8 that take the contiguous layout: what the whole model says."""

import pytest
import torch
from device_ranks import PAGE, in_turn, moe_layers, random_reference, ranks_of, together
from model_cases import tokens_of

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.layers import MASKED_ROWS
from pdmesh.model.device.spread import spread_over
from pdmesh.model.device.stages import DeviceWork
from pdmesh.model.device.step_memory import step_bytes
from pdmesh.model.parallel.nvshmem import ReceivedContiguous
from pdmesh.model.parallel.placement import Placement
from pdmesh.prefill.config import AUTO_CHUNK, chunk_choices, step_rows
from pdmesh.prefill.warming import warm_up_rank
from pdmesh.wire.ids import PAGE_SIZE

MODES = ["no_overlap", "dispatch_overlap", "microbatch"]
STEPS = 4
FOUR = [(9,), (), (20, 64, 5, 40), (31, 3)]
LENGTHS = {2: [(60, 33, 5), (47,)], 4: FOUR, 8: [*FOUR, (), (64,), (2,), ()]}
"""Of the prompts of each rank; one rank may have none, or none any more."""


class Prompts:
    """One rank's prompts, each computed in chunks of a page beside the others."""

    def __init__(self, model, lengths, seed):
        self.lengths = lengths
        self.tokens = [tokens_of(n, seed + i) for i, n in enumerate(lengths)]
        self.tables = [tuple(range(4 * i, 4 * i + 4)) for i in range(len(lengths))]
        self.pool = model.new_latents(4 * len(lengths) + 1, PAGE).fill_(float("nan"))
        self.pushed = []

    def chunk(self, step, first):
        """Rows of the step from position `first` of the model, and the prompts that have any."""
        slices, tokens = [], []
        for i, n in enumerate(self.lengths):
            start, end = max(first, step * PAGE), min(n, (step + 1) * PAGE)
            if start < end:
                slices.append(SequenceSlice(self.tables[i], start, end, start))
                tokens.append(self.tokens[i][start:end])
        return Batch.build(slices, tokens, PAGE) if slices else None

    def answers(self, forward, mtp, model):
        """The greedy token behind each chunk, and the MTP layer's latents of all."""
        before = [None] * len(self.lengths)
        found = []
        for step in range(STEPS):
            batch = self.chunk(step, 0)
            layers = []
            hidden = forward(batch, self.pool, layers.append)
            if batch is not None:
                self.pushed.append(layers)
            previous, at = [], 0
            for i, n in enumerate(self.lengths):
                count = min(n, (step + 1) * PAGE) - step * PAGE
                if count <= 0:
                    continue
                own = hidden[at : at + count]
                at += count
                previous.append(own[:-1] if before[i] is None else torch.cat([before[i], own[:-1]]))
                before[i] = own[-1:]
                found.append(int(model.logits(own[-1:]).argmax()))
            mtp(self.chunk(step, 1), torch.cat(previous) if previous else None, self.pool)
        return found


def alone(model, lengths, seed):
    prompts = Prompts(model, lengths, seed)

    def forward(batch, pool, on_layer):
        return None if batch is None else model.forward(batch, pool, "mha", on_layer)

    def mtp(batch, previous, pool):
        if batch is not None:
            model.mtp_forward(batch, previous, pool, "mha")

    return prompts.answers(forward, mtp, model), prompts


def of_rank(rank, lengths, seed, mode):
    prompts = Prompts(rank.model, lengths, seed)
    found = prompts.answers(
        lambda batch, pool, on_layer: rank.forward(mode, batch, pool, "mha", on_layer),
        lambda batch, previous, pool: rank.mtp_forward(mode, batch, previous, pool, "mha"),
        rank.model,
    )
    return found, prompts


@pytest.fixture(scope="module")
def models():
    return random_reference(3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_long_prompts_in_chunks_end_in_the_tokens_of_the_whole_model(models, ranks, mode):
    model, whole = models
    group = ranks_of(model, ranks, contiguous=True)
    given = together(group, lambda n, rank: of_rank(rank, LENGTHS[ranks][n], 100 * n, mode))
    every = list(range(model.config.num_hidden_layers))
    for n, (found, prompts) in enumerate(given):
        if not LENGTHS[ranks][n]:
            assert found == []
            continue
        expected, reference = alone(whole, LENGTHS[ranks][n], 100 * n)
        assert found == expected
        assert prompts.pushed == reference.pushed
        assert all(layers == every for layers in prompts.pushed)
        written = ~reference.pool.isnan()
        assert torch.equal(written, ~prompts.pool.isnan())
        difference = (prompts.pool[written] - reference.pool[written]).float().norm()
        assert difference < 0.02 * reference.pool[written].float().norm()


def test_the_experts_of_a_prefill_take_the_contiguous_layout(models, monkeypatch):
    model, _ = models
    seen = []
    made = ReceivedContiguous.quantised_outputs

    def counted(received, *arguments):
        seen.append(received.arrived.used.item())
        return made(received, *arguments)

    monkeypatch.setattr(ReceivedContiguous, "quantised_outputs", counted)
    group = ranks_of(model, 2, contiguous=True)
    together(group, lambda n, rank: of_rank(rank, [(20,), ()][n], 7, "dispatch_overlap"))
    assert len(seen) == 2 * STEPS * moe_layers(model.config)
    assert max(seen) > 0
    assert min(seen) == 0  # nobody has rows of a fourth chunk


@pytest.mark.parametrize("mode", ["dispatch_overlap", "microbatch"])
def test_the_kernels_of_the_exchange_give_the_same_bits_as_its_definition(models, mode):
    """One step of two ranks, item by item: threads would be at odds in the interpreter."""
    model, _ = models
    found = []
    for host in (True, False):
        group = ranks_of(model, 2, tokens=24, host=host, contiguous=True)
        works = []
        for number, rank in enumerate(group):
            prompts = Prompts(rank.model, [(6, 9), (7,)][number], number)
            steps = rank._planned(mode, prompts.chunk(0, 0), "mha", prompts.pool, 0)
            works.append(DeviceWork(steps, rank.model.entering(steps[0]), prompts.pool))
        found.append(in_turn(group, works, group[0]._schedule(mode, 0)))
    for kernels, definition in zip(*found, strict=True):
        assert torch.equal(kernels, definition)


def test_copies_of_experts_change_no_token(models):
    model, whole = models
    copies = Placement(8, (((0, 1, 2, 3, 4), (5, 6, 7, 0, 4)),) * moe_layers(model.config))
    group = ranks_of(model, 2, placement=copies, contiguous=True)
    given = together(group, lambda n, rank: of_rank(rank, LENGTHS[2][n], 100 * n, "microbatch"))
    for n, (found, _) in enumerate(given):
        assert found == alone(whole, LENGTHS[2][n], 100 * n)[0]


def test_ranks_with_pools_of_different_sizes_warm_up_together_and_write_no_page(models):
    model, _ = models
    group = ranks_of(model, 2, contiguous=True)
    pools = [rank.model.new_latents(pages, PAGE) for rank, pages in zip(group, (2, 9), strict=True)]
    together(group, lambda n, rank: warm_up_rank(rank, pools[n], 100, ("microbatch",)))
    assert not any(pool.any() for pool in pools)
    assert all(rank.exchange.sent.total("dispatch") > 0 for rank in group)


def test_steps_beyond_the_masked_layout_take_the_contiguous_one_and_less_memory():
    model, _ = random_reference(1, num_hidden_layers=2)
    sizes = [spread_over(model.config, True, 0, 2, 0, MASKED_ROWS + n, 64) for n in (0, 1)]
    few, many = (spread.exchange for spread in sizes)
    assert step_rows(chunk_choices(AUTO_CHUNK, "cuda", 64)[-1], PAGE_SIZE) > MASKED_ROWS
    assert few.size == ExchangeSize(2, 4, MASKED_ROWS, 128, 3, 2 * MASKED_ROWS)
    assert many.size == ExchangeSize.contiguous(2, 4, MASKED_ROWS + 1, 128, 3)
    assert many.nbytes < few.nbytes
    beside = step_bytes(model.config, MASKED_ROWS + 1, 1, many) - many.nbytes
    assert beside > many.lanes * many.size.capacity * 5 * 128
