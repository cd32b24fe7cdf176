"""Expert parallelism in one process: what one rank computes, bit for bit, wherever experts are."""

import pytest
import torch
from model_cases import tiny_model
from parallel_rig import (
    WIDE,
    a_batch,
    a_step,
    check,
    narrow_model,
    redundant,
    same,
    skewed_model,
    stale,
    wide_model,
)

from pdmesh.launch.topology import shipped_model
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.payload import WireFormat
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import ConfigError

UNEVEN = (3, 0, 1, 6, 2)
"""Tokens a DP group, in turn."""
MODELS = {"balanced": wide_model, "skewed": skewed_model, "narrow": narrow_model}
ALL = [(ep, tp) for ep in (1, 2, 4, 8, 16, 32, 64, 128) for tp in (1, 2, 4, 8) if ep % tp == 0]
SAMPLE = [(1, 1), (2, 2), (4, 1), (8, 2), (8, 8), (16, 4), (32, 1)]
REDUNDANT = [(288, ep) for ep in (1, 2, 4, 8, 16, 32, 72, 144)]
REDUNDANT += [(320, ep) for ep in (1, 2, 4, 8, 16, 32, 64)] + [(384, 128)]
REDUNDANT_SAMPLE = [(288, 4), (288, 72), (320, 8)]


def sampled(cases, sample):
    return [
        case if case in sample else pytest.param(*case, marks=pytest.mark.full) for case in cases
    ]


@pytest.mark.parametrize(("ep", "tp"), sampled(ALL, SAMPLE))
def test_every_grid_of_ranks_gives_what_one_rank_gives(ep, tp):
    model = wide_model()
    ranks = VirtualRanks(model, Groups(ep, tp))
    check(ranks, a_step(model, ranks.groups.dp, tp, UNEVEN))


@pytest.mark.parametrize("routing", MODELS)
def test_ep128_gives_what_one_rank_gives_for_any_routing_and_batches(routing):
    model = MODELS[routing]()
    ranks = VirtualRanks(model, Groups(128), settings=Settings(mode="microbatch"))
    check(ranks, a_step(model, 128, 1, (2, 0, 1)))


def test_ep128_where_one_rank_alone_has_rows_and_where_none_has():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(128))
    check(ranks, a_step(model, 128, 1, [0] * 77 + [40] + [0] * 50))
    check(ranks, a_step(model, 128, 1, [0]))


@pytest.mark.parametrize(("physical", "ep"), sampled(REDUNDANT, REDUNDANT_SAMPLE))
def test_copies_of_experts_change_no_bit(physical, ep):
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(ep), redundant(physical, ep))
    check(ranks, a_step(model, ep, 1, UNEVEN))


@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
@pytest.mark.parametrize("form", ["absorbed", "mha"])
def test_every_schedule_gives_the_same_bits_in_both_forms(mode, form):
    model = wide_model()
    ranks = VirtualRanks(model, Groups(4, 2), settings=Settings(mode=mode))
    check_hidden(ranks, a_step(model, 2, 2, (9, 70), form))


@pytest.mark.parametrize("wire", [WireFormat("fp8"), WireFormat("fp8", "bf16")])
@pytest.mark.parametrize(("ep", "tp"), [(8, 1), (8, 4)])
def test_rows_in_fp8_on_the_wire_equal_one_rank_that_rounds_in_the_same_places(wire, ep, tp):
    model = wide_model()
    one = VirtualRanks(model, Groups(), settings=Settings(wire=wire))
    many = VirtualRanks(model, Groups(ep, tp), redundant(288, ep), Settings(wire=wire))
    step = a_step(model, ep // tp, tp, UNEVEN)
    expected = [
        None if i is None else one.forward([RankBatch(i.batch, (stale(model),))])[0]
        for i in step.inputs
    ]
    same(many.forward(step.inputs), expected)
    assert not torch.equal(expected[0], step.hidden[0]), "nothing was rounded"


def test_one_rank_is_the_model_itself():
    model = wide_model()
    ranks = VirtualRanks(model, Groups())
    check(ranks, a_step(model, 1, 1, (33,)))
    assert ranks.sent(0)[0].total() == 0


def test_partial_sums_of_fast_arithmetic_agree_within_rounding_in_every_schedule():
    model = wide_model()
    found = []
    for mode in ("no_overlap", "dispatch_overlap", "microbatch"):
        settings = Settings(arithmetic="fast", mode=mode)
        step = a_step(model, 1, 4, (65,))
        found.append(VirtualRanks(model, Groups(4, 4), settings=settings).forward(step.inputs)[0])
        scale = step.hidden[0].abs().max()
        assert float((found[-1] - step.hidden[0]).abs().max() / scale) < 1e-5
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], step.hidden[0]), "nothing was added up in parts"


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_bit_weights_are_exact_over_tp_too(seed):
    """Sums of 1,536 numbers, which a narrower 16-bit product may round another way."""
    changes = {"q_lora_rank": 1536, "qk_nope_head_dim": 16, "n_routed_experts": 32, "n_group": 4}
    model = tiny_model(seed, **(WIDE | changes)).bfloat16()
    ranks = VirtualRanks(model, Groups(8, 8))
    check_hidden(ranks, a_step(model, 1, 8, (64,)))


@pytest.mark.parametrize(("ep", "tp"), [(32, 1), (8, 8)])
def test_the_shipped_model_runs_at_the_largest_ep_and_tp_that_it_allows(ep, tp):
    model = load_model(shipped_model())
    ranks = VirtualRanks(model, Groups(ep, tp), settings=Settings(mode="microbatch"))
    check(ranks, a_step(model, ep // tp, tp, (7, 0, 1)))


def test_a_batch_of_several_prompts_is_cut_between_them():
    model = wide_model()
    batch = a_batch([5, 4, 1, 8, 2], seed=3)
    expected = model(batch, stale(model, 10), "absorbed")
    ranks = VirtualRanks(model, Groups(2), settings=Settings(mode="microbatch"))
    found = ranks.forward([RankBatch(batch, (stale(model, 10),)), None])
    same(found, [expected, None])


def test_auto_takes_microbatches_from_the_threshold_on():
    model = wide_model()
    ranks = VirtualRanks(model, Groups(2), settings=Settings(mode="auto", threshold=8))
    assert ranks.mode_for(a_step(model, 2, 1, (7, 0)).inputs) == "dispatch_overlap"
    assert ranks.mode_for(a_step(model, 2, 1, (1, 8)).inputs) == "microbatch"


def test_layers_are_announced_once_all_of_their_latents_are_in_the_pages():
    model = wide_model()
    for mode in ("no_overlap", "microbatch"):
        ranks = VirtualRanks(model, Groups(2, 2), settings=Settings(mode=mode))
        batch, pools = a_batch([30], 1), (stale(model), stale(model))
        seen = []

        def on_layer(layer, pools=pools, seen=seen):
            assert not any(bool(pool[0, layer, :30].isnan().any()) for pool in pools)
            seen.append(layer)

        ranks.forward([RankBatch(batch, pools, on_layer=on_layer)])
        assert seen == [0, 1]


def test_rows_are_counted_by_peer_and_only_what_leaves_a_rank():
    """32 rows to all of 8 ranks at most, 32 floats each; indices take 8 bytes a choice."""
    model = wide_model()
    ranks = VirtualRanks(model, Groups(8))
    ranks.forward(a_step(model, 8, 1, (32,)).inputs)
    sent = ranks.sent(3)[0]
    assert 3 not in sent.by_peer()
    assert set(sent.by_peer("dispatch")) == {0, 1, 2, 4, 5, 6, 7}
    assert sent.total("dispatch") <= 32 * 7 * 32 * 4 + 32 * 8 * 8
    back = sum(ranks.sent(rank)[0].by_peer("combine").get(3, 0) for rank in range(8))
    choices = back // (32 * 4)
    assert sent.total("dispatch") == back_rows(sent.total("dispatch"), choices)


def back_rows(size, choices):
    """A whole number of rows besides 8 bytes for every choice that was computed elsewhere."""
    rows, rest = divmod(size - 8 * choices, 32 * 4)
    assert rest == 0
    assert 0 < rows <= choices
    return size


def test_load_counts_every_choice_of_every_rank_once():
    model = skewed_model()
    ranks = VirtualRanks(model, Groups(4, 2))
    ranks.forward(a_step(model, 2, 2, (30, 11)).inputs)
    load = ranks.take_load()
    assert load.sum(dim=1).tolist() == [41 * 8, 0]
    assert int(ranks.take_load().sum()) == 0


def test_what_does_not_fit_is_refused_with_a_sentence():
    model = wide_model()
    with pytest.raises(ConfigError, match="cannot be shared evenly by 96 ranks"):
        VirtualRanks(model, Groups(96))
    with pytest.raises(ConfigError, match="the placement is for 2 MoE layers"):
        VirtualRanks(model, Groups(8), redundant(288, 4))
    with pytest.raises(ValueError, match="1 inputs for 2 DP groups"):
        VirtualRanks(model, Groups(2)).forward([None])
    plain = VirtualRanks(tiny_model(0, num_nextn_predict_layers=0), Groups(2))
    with pytest.raises(ValueError, match="this model has no MTP layer"):
        plain.mtp_forward([None, None], [None, None])
    step = a_step(model, 1, 1, (3,))
    with pytest.raises(ValueError, match="1 pools for the 2 TP ranks of DP group 0"):
        VirtualRanks(model, Groups(2, 2)).forward(step.inputs)


def check_hidden(ranks, step):
    same(ranks.forward(step.inputs), step.hidden)
