"""Random steps of prompts, chunks, drafts and trees over random ranks, schedules and placements."""

import random

import pytest
import torch
from model_cases import one_slice, tiny_model, tokens_of
from parallel_rig import WIDE, same, stale

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.parallel.balancer import BalanceRule, place
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import Settings, VirtualRanks

MODES = ("no_overlap", "dispatch_overlap", "microbatch")
PAGES = 4
PAGE = 16


class Talk:
    """A sequence that grows by chunks, by a token and its drafts, or by a tree of drafts."""

    def __init__(self, rng, number, index):
        self.rng, self.tokens = rng, tokens_of(PAGES * PAGE, 100 * number + index)
        self.table = tuple(range(PAGES * index, PAGES * index + PAGES))
        self.done = 0

    def rows(self):
        """A slice and its tokens, or None when the talk is at its end."""
        kind = self.rng.choice(["chunk", "drafts", "tree", "nothing"])
        room = PAGES * PAGE - self.done
        if kind == "nothing" or room < 5:
            return None
        if kind == "tree" and self.done:
            start, parents = self.done, (-1, 0, 0, 1)
            self.done += 1
            tree = SequenceSlice(self.table, start, start + 4, start, parents=parents)
            return tree, tokens_of(4, start)
        count = min(room, self.rng.choice([1, 2, 7, 20]) if kind == "chunk" else 2)
        start, self.done = self.done, self.done + (count if kind == "chunk" else 1)
        form = self.rng.choice([None, "mha", "absorbed"])
        item = one_slice(self.table, start, start + count)
        item = SequenceSlice(item.page_table, start, start + count, start, form=form)
        return item, self.tokens[start : start + count]


@pytest.mark.parametrize(
    "seed", [n if n < 8 else pytest.param(n, marks=pytest.mark.full) for n in range(150)]
)
def test_random_steps_give_what_one_rank_gives(seed):
    rng = random.Random(seed)
    experts, groups = rng.choice([(16, 4), (64, 8), (256, 8)])
    changes = {"n_routed_experts": experts, "n_group": groups, "topk_group": groups // 2}
    changes |= {"num_experts_per_tok": rng.choice([1, 3, 8]), "num_hidden_layers": 3}
    changes |= rng.choice([{}, {"n_shared_experts": 0}, {"q_lora_rank": None}])
    changes |= rng.choice([{}, {"attention_bias": True}, {"moe_layer_freq": 2}])
    model = tiny_model(seed, **(WIDE | changes))
    ep = rng.choice([2, 4, 8, 16])
    tp = rng.choice([t for t in (1, 2, 4, 8) if ep % t == 0])
    moe_layers = len(model.gates())
    load = torch.rand(moe_layers, experts, generator=torch.Generator().manual_seed(seed)) ** 4
    physical = experts + ep * rng.randint(0, 3)
    placement = place(load.numpy(), ep, BalanceRule(physical))
    settings = Settings(mode=rng.choice(MODES))
    ranks = VirtualRanks(model, Groups(ep, tp), placement, settings)
    talks = [[Talk(rng, dp, i) for i in range(rng.choice([1, 2, 5]))] for dp in range(ep // tp)]
    pools = [[pool(model, len(group)) for _ in range(tp + 1)] for group in talks]
    for _ in range(4):
        inputs, expected = [], []
        for group, latents in zip(talks, pools, strict=True):
            found = [rows for talk in group if (rows := talk.rows()) is not None]
            if not found:
                inputs.append(None)
                expected.append(None)
                continue
            batch = Batch.build([item for item, _ in found], [t for _, t in found], PAGE)
            inputs.append(RankBatch(batch, tuple(latents[:tp])))
            expected.append(model(batch, latents[tp], "absorbed"))
        same(ranks.forward(inputs), expected)
        for latents in pools:
            for one in latents[:tp]:
                assert torch.equal(one.isnan(), latents[tp].isnan())
                assert torch.equal(one.nan_to_num(), latents[tp].nan_to_num())


def pool(model, talks):
    return stale(model, 1)[:0].new_full(
        (PAGES * talks, model.num_latent_layers, PAGE, model.config.latent_width), float("nan")
    )
