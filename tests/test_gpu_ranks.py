"""Ranks in FP8 of one process on one GPU, in turn, by its kernels: what the whole model gives."""

import pytest
import torch
from device_cases import random_model
from device_ranks import in_turn, ranks_of
from model_cases import tokens_of
from test_gpu_engine import FULL_HEADS

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.device.stages import DeviceWork

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def batches(number, form):
    """Of a rank: prompts, or what follows them."""
    lengths = [(90, 40, 64), (), (33,)][number]
    slices, tokens = [], []
    for index, length in enumerate(lengths):
        whole = tokens_of(length + 2, 10 * number + index)
        start, end = (0, length) if form == "mha" else (length, length + 2)
        table = (2 * index, 2 * index + 1)
        slices.append(SequenceSlice(table, start, end, start))
        tokens.append(whole[start:end])
    return Batch.build(slices, tokens, 64, DEVICE) if slices else None


@pytest.fixture(scope="module")
def alone():
    """A plain model, and what the device model of it alone gives each rank's rows."""
    model = random_model(3, std=0.03, **(FULL_HEADS | {"n_routed_experts": 24}))
    weights = build_weights(model.config, ModelSource(model, DEVICE), DEVICE)
    whole = DeviceModel(model.config, weights)
    pools = [whole.new_latents(6) for _ in range(3)]
    rows: dict = {}
    for form in ("mha", "absorbed"):
        for number, pool in enumerate(pools):
            batch = batches(number, form)
            rows[form, number] = None if batch is None else whole.forward(batch, pool, form)
    return model, rows


@pytest.mark.parametrize("contiguous", [False, True], ids=["masked", "contiguous"])
@pytest.mark.parametrize("mode", ["no_overlap", "dispatch_overlap", "microbatch"])
def test_three_ranks_one_of_which_idles_give_what_one_gives(alone, mode, contiguous):
    model, wanted = alone
    group = ranks_of(model, 3, tokens=256, device="cuda", host=False, contiguous=contiguous)
    pools = [rank.model.new_latents(6) for rank in group]
    for form in ("mha", "absorbed"):
        rows = [batches(number, form) for number in range(3)]
        works = []
        for rank, batch, pool in zip(group, rows, pools, strict=True):
            if batch is None:
                none = rank.model.weights.embedding[:0].clone()
                works.append(DeviceWork((), none, None))
                continue
            steps = rank._planned(mode, batch, form, pool, 0)
            works.append(DeviceWork(steps, rank.model.entering(steps[0]), pool))
        found = in_turn(group, works, group[0]._schedule(mode, 0))
        for number, given in enumerate(found):
            expected = wanted[form, number]
            if expected is None:
                assert given.shape[0] == 0
                continue
            # Products of other numbers of rows may be other kernels'; both round to bfloat16.
            assert float((given - expected).norm()) < 0.05 * float(expected.norm())
            assert not bool(given.isnan().any())
