"""Public reports about experts without rows, shards that cut a block, and rows that only pad."""

from __future__ import annotations

import pytest
import torch
from model_cases import equal, one_slice, stale_pool, tiny_model, tokens_of
from parallel_rig import WIDE, a_step, check, later_rows, narrow_model, same, wide_model
from test_parallel_member import check as check_members
from test_parallel_member import group

from pdmesh.kernels.activation import silu_mul
from pdmesh.kernels.fp8 import dequantise_blocks, quantise_blocks
from pdmesh.kernels.moe import routed_experts
from pdmesh.kernels.quantised import (
    BlockWeight,
    Rows,
    contiguous_grouped_gemm,
    dequantise_rows,
    masked_grouped_gemm,
    quantise_rows,
)
from pdmesh.model.batch import Batch
from pdmesh.model.bindings import bindings
from pdmesh.model.checkpoint import save_checkpoint
from pdmesh.model.parallel.groups import Groups
from pdmesh.model.parallel.step import RankBatch
from pdmesh.model.parallel.virtual import Settings, VirtualRanks
from pdmesh.model.weights import load_model

NAN = float("nan")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- sgl-project/sglang#25137: a rank or an expert without a row ------------------------------


GROUPS = {
    "all to one": (0, 300, 0, 0),
    "one row each": (1, 1, 1, 1),
    "around a block": (1, 127, 128, 129),
    "one has none": (128, 0, 1, 127),
    "nobody has any": (0, 0, 0, 0),
}


@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS)
def test_experts_with_and_without_rows_give_what_a_loop_over_rows_gives(counts):
    """sgl-project/sglang#25137: in any order of the rows, each for itself."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[:, None]
    x, weights = drawn(ids.shape[0], 16), drawn(*ids.shape, seed=1).abs()
    gate_up, down = drawn(4, 24, 16, seed=2), drawn(4, 16, 12, seed=3)
    got = routed_experts(x, ids, weights, gate_up, down)
    expected = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for choice, expert in enumerate(ids[row].tolist()):
            hidden = silu_mul(x[row : row + 1] @ gate_up[expert].t())
            expected[row] += weights[row, choice] * (hidden @ down[expert].t())[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(4))
    shuffled = routed_experts(x[order], ids[order], weights[order], gate_up, down)
    assert torch.equal(shuffled, got[order])


@pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS)
def test_padding_between_groups_of_quantised_rows_reaches_no_result(counts):
    """sgl-project/sglang#25137: neither layout reads what fills it up, NaN included."""
    n, k = 24, 192
    weights = [quantise_blocks(drawn(n, k, seed=e)) for e in range(4)]
    stacked = BlockWeight(*(torch.stack(parts) for parts in zip(*weights, strict=True)))
    dense = [dequantise_blocks(*weight) for weight in weights]
    x = drawn(sum(counts), k, seed=9)
    groups = x.split(counts)
    wanted = [dequantise_rows(quantise_rows(g)) @ w.t() for g, w in zip(groups, dense, strict=True)]

    room = max(*counts, 1) + 3
    masked = torch.full((4, room, k), NAN)
    for expert, rows in enumerate(groups):
        masked[expert, : counts[expert]] = rows
    found = masked_grouped_gemm(quantised(masked), stacked, torch.tensor(counts).int(), 1)
    for expert, count in enumerate(counts):
        close(found[expert, :count], wanted[expert])

    begins, at = [], 0
    for count in counts:
        begins.append(at)
        at += -(-count // 128) * 128
    rows, owner = torch.full((at, k), NAN), torch.full((at,), -1).int()
    for expert, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        rows[begin : begin + count] = groups[expert]
        owner[begin : begin + count] = expert
    found = contiguous_grouped_gemm(quantised(rows), stacked, owner)
    for expert, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        close(found[begin : begin + count], wanted[expert])


def quantised(x):
    """Rows; those of NaN have values and scales of NaN."""
    rows = quantise_rows(x)
    rows.scales[x.isnan().any(dim=-1)] = NAN
    return Rows(rows.values, rows.scales)


def close(found, wanted):
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


IDLE = {"one is idle": (0, 1, 1, 1), "one has all": (0, 0, 129, 0), "uneven": (1, 127, 128, 1)}


@pytest.mark.parametrize("lengths", IDLE.values(), ids=IDLE)
def test_ranks_without_a_row_and_without_an_asked_expert_serve_all_others(lengths):
    """sgl-project/sglang#25137: all rows go to eight experts; three of four ranks have none."""
    model = narrow_model()
    lengths = tuple(min(n, 128) for n in lengths)
    for tp in (1, 2):
        ranks = VirtualRanks(model, Groups(4 * tp, tp), settings=Settings(mode="microbatch"))
        check(ranks, a_step(model, 4, tp, lengths))
        assert ranks.forward([None] * 4) == [None] * 4


def test_ranks_as_processes_have_them_wait_for_no_rank_without_a_row():
    """sgl-project/sglang#25137: idle ranks join the exchange, steps without rows hang nobody."""
    model = narrow_model()
    with group(model, 4) as members:
        for lengths in ((0, 1, 1, 1), (0, 0, 64, 0), (1, 0, 0, 0), (3, 2, 1, 0)):
            check_members(members, a_step(model, 4, 1, lengths))
        assert [member.repeated for member in members] == [0] * 4


# ---- vllm-project/vllm#33327: shards that the block grid does not divide ----------------------


FEW = {**WIDE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
UNEVEN = {
    "shards narrower than a block": FEW,
    "heads inside of blocks": {
        **FEW,
        "hidden_size": 192,
        "q_lora_rank": 132,
        "qk_nope_head_dim": 28,
        "qk_rope_head_dim": 16,
        "v_head_dim": 36,
        "kv_lora_rank": 132,
        "moe_intermediate_size": 192,
    },
}


@pytest.mark.parametrize("changes", UNEVEN.values(), ids=UNEVEN)
def test_ranks_of_an_fp8_checkpoint_that_no_block_grid_divides_compute_what_one_does(
    changes, tmp_path
):
    """vllm-project/vllm#33327: heads and experts are cut where they end, not where blocks do."""
    stored = tiny_model(5, **changes)
    save_checkpoint(stored, tmp_path, fp8=True)
    model = load_model(tmp_path)
    for binding, read in zip(_matrices(stored), _matrices(model), strict=True):
        quantised_again = dequantise_blocks(*quantise_blocks(binding.float()))
        assert torch.equal(read, quantised_again)
    for ep, tp in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4)):
        for mode in ("no_overlap", "microbatch"):
            ranks = VirtualRanks(model, Groups(ep, tp), settings=Settings(mode=mode))
            check(ranks, a_step(model, ep // tp, tp, (5, 9, 1, 0)))


def _matrices(model):
    """What is stored in FP8."""
    return [binding.read() for binding in bindings(model) if binding.matrix]


# ---- vllm-project/vllm#43810: rows that fill up a batch write nowhere --------------------------


PAGES = 16


def sequences(count):
    """Contexts of different lengths; the first has the pool's last page, the last its first."""
    lengths = [70, 3, 64, 65, 128, 1, 90][:count]
    pages = [(PAGES - 1 - 2 * i, PAGES - 2 - 2 * i) for i in range(count - 1)] + [(0, 1)]
    return list(zip(pages[-count:], lengths, strict=True))


def filled(model, chosen):
    """A pool where the sequences' contexts stand among pages of other requests."""
    pool = model.new_latents(PAGES)
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(7)))
    for seed, (pages, length) in enumerate(chosen):
        item = one_slice(pages, 0, length)
        model(Batch.build([item], [tokens_of(length, seed)]), pool, "absorbed")
    return pool


def others(pool, chosen):
    """The pages that the next position of no sequence stands on."""
    own = {pages[length // 64] for pages, length in chosen if length // 64 < len(pages)}
    return [page for page in range(pool.shape[0]) if page not in own]


def next_rows(chosen):
    slices = [one_slice(pages, n, n + 1) for pages, n in chosen if n < 64 * len(pages)]
    return Batch.build(slices, [[17 + i] for i in range(len(slices))])


@pytest.mark.parametrize("count", [1, 3, 5, 7])
@pytest.mark.parametrize("form", ["absorbed", "mha"])
def test_rows_that_fill_up_a_batch_change_no_page_and_no_other_row(count, form):
    """vllm-project/vllm#43810: the first and the last page of the pool are in use."""
    model = tiny_model()
    chosen = sequences(count)
    pool = filled(model, chosen)
    batch = next_rows(chosen)
    assert batch.padded_tokens.shape[0] % 4 == 0
    before = pool.clone()
    alone = []
    for item, token in zip(batch.slices, batch.tokens.tolist(), strict=True):
        mine = before.clone()
        mine[[p for p in range(PAGES) if p not in item.page_table]] = NAN
        alone.append(model(Batch.build([item], [[token]]), mine, form))
    got = model(batch, pool, form)
    assert equal(got, torch.cat(alone))
    rest = others(pool, [(item.page_table, item.start) for item in batch.slices])
    assert torch.equal(pool[rest], before[rest])
    for item in batch.slices:
        page, slot = item.page_table[item.start // 64], item.start % 64
        kept = [s for s in range(64) if s != slot]
        assert torch.equal(pool[page][:, kept], before[page][:, kept])


@pytest.mark.parametrize("count", [3, 5, 7])
def test_rows_that_fill_up_a_ranks_part_change_no_page_either(count):
    """vllm-project/vllm#43810: two microbatches, each filled up, over heads and experts shared."""
    model = wide_model()
    chosen = sequences(count)
    pool = filled(model, chosen)
    batch = next_rows(chosen)
    wanted = pool.clone()
    hidden = model(batch, wanted, "absorbed")
    pools = (pool, pool.clone())
    ranks = VirtualRanks(model, Groups(4, 2), settings=Settings(mode="microbatch"))
    found = ranks.forward([RankBatch(batch, pools), None])
    same(found, [hidden, None])
    for own in pools:
        assert torch.equal(own, wanted)


def test_what_fills_up_recomputed_rows_of_a_full_hit_writes_nothing_at_all():
    """vllm-project/vllm#43810: no row may be written, and none is."""
    model = tiny_model()
    pool = filled(model, [((PAGES - 1, 0), 100)])
    before = pool.clone()
    item = one_slice((PAGES - 1, 0), 97, 100, write_from=100)
    model(Batch.build([item], [tokens_of(100, 0)[97:]]), pool, "absorbed")
    assert torch.equal(pool, before)


def test_drafts_of_every_width_write_their_own_slots_alone():
    """vllm-project/vllm#43810: the MTP layer's rows too."""
    model = tiny_model()
    for count in (1, 2, 3, 5):
        item = one_slice((PAGES - 1, 0), 0, 60 + count)
        pool = stale_pool(model, PAGES)
        batch = Batch.build([item], [tokens_of(60 + count)])
        hidden = model(batch, pool, "absorbed")
        model.mtp_forward(later_rows(batch), hidden[:-1], pool, "absorbed")
        written = ~pool.isnan().all(dim=-1)
        assert int(written[PAGES - 1, :-1].sum()) == (pool.shape[1] - 1) * min(64, 60 + count)
        assert int(written[PAGES - 1, -1].sum()) == min(64, 60 + count) - 1
        assert int(written[0].sum()) == pool.shape[1] * max(0, count - 4)
        assert not bool(written[1 : PAGES - 1].any())
