"""Rotation and the way of latents into pages, in Triton's interpreter, beside the definition."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import rope_append as definition  # noqa: E402
from pdmesh.kernels.norm import rms_norm  # noqa: E402
from pdmesh.kernels.quantised import unpack_latents  # noqa: E402
from pdmesh.kernels.rope import RopeTable, inverse_frequencies  # noqa: E402
from pdmesh.kernels.triton import rope_append as fast  # noqa: E402

LAYERS, PAGE = 3, 4


def case(rank, rope, heads, slots, packed, interleave, seed=0):
    """Arguments of rope_append for len(slots) rows, and a pool that holds a pattern."""
    generator = torch.Generator().manual_seed(seed)
    m = len(slots)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    table = RopeTable.build(inverse_frequencies(rope, 10000.0, None), 50, 1.0, interleave)
    width = 656 if packed else rank + rope
    pool = torch.arange(5 * LAYERS * PAGE * width) % 251
    pool = pool.to(torch.uint8 if packed else torch.bfloat16).view(5, LAYERS, PAGE, width)
    positions = torch.randint(0, 50, (m,), generator=generator)
    # The query and the latent are views of wider rows, as projections give them.
    query = normal(m, heads, 8 + rope)[..., 8:]
    latent = normal(m, 24 + rank + rope)[:, 24:]
    arguments = (query, latent, normal(rank), table.cos, table.sin, positions, torch.tensor(slots))
    return arguments, pool


def both(arguments, pool, interleave, layer=1, **more):
    """(rotated queries, pool) of the kernel and of the definition."""
    results = []
    for module in (fast, definition):
        mine = pool.clone()
        rotated = module.rope_append(
            *(a.clone() for a in arguments[:1]),
            *arguments[1:],
            mine,
            layer,
            interleave=interleave,
            **more,
        )
        results.append((rotated, mine))
    return results


@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(("rank", "rope", "heads"), [(512, 64, 5), (128, 32, 2), (256, 16, 33)])
def test_latents_stand_normalised_and_rotated_in_bfloat16_pages(rank, rope, heads, interleave):
    arguments, pool = case(rank, rope, heads, [7, 0, 38], False, interleave)
    (rotated, mine), (want_rotated, want) = both(arguments, pool, interleave)
    torch.testing.assert_close(rotated, want_rotated, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(mine, want, rtol=2**-7, atol=1e-6)
    changed = (mine != pool).flatten(0, 2).any(dim=-1).nonzero().flatten().tolist()
    assert changed == sorted(slot + PAGE for slot in (7, 0, 38))


@pytest.mark.parametrize("interleave", [True, False], ids=["interleaved", "halves"])
def test_latents_stand_in_pages_of_656_bytes(interleave):
    arguments, pool = case(512, 64, 3, [12, 3, 51], True, interleave)
    (rotated, mine), (want_rotated, want) = both(arguments, pool, interleave)
    torch.testing.assert_close(rotated, want_rotated, rtol=2**-7, atol=1e-6)
    rows = [slot + PAGE for slot in (12, 3, 51)]
    ours, theirs = mine.view(-1, 656), want.view(-1, 656)
    ours_wide, theirs_wide = unpack_latents(ours[rows]), unpack_latents(theirs[rows])
    torch.testing.assert_close(ours_wide, theirs_wide, rtol=1 / 8, atol=1e-3)
    assert float((ours[rows] != theirs[rows]).float().mean()) < 0.01
    others = [row for row in range(len(ours)) if row not in rows]
    assert torch.equal(ours[others], pool.view(-1, 656)[others])
    scales = [p[rows, 512:528].contiguous().view(torch.float32) for p in (ours, theirs)]
    assert torch.equal(scales[0], scales[0][:, :1].expand(-1, 4))
    torch.testing.assert_close(scales[0], scales[1], rtol=2**-7, atol=0)


def test_a_latent_has_the_scale_of_its_largest_value_wherever_that_stands():
    arguments, pool = case(512, 64, 1, [0, 1, 2, 3, 4], True, True)
    latent, weight = arguments[1], arguments[2].fill_(1)
    for row, place in enumerate((0, 127, 128, 300, 511)):
        latent[row, place] = 40.0
    latent[4, :512] = 0
    for written in [p.view(-1, 656)[PAGE : PAGE + 5] for _, p in both(arguments, pool, True)]:
        scales = written[:, 512:528].contiguous().view(torch.float32)
        normed = rms_norm(latent[:, :512], weight, 1e-6).float()
        wanted = normed.abs().amax(dim=1, keepdim=True).clamp_min(1e-10) / 448
        torch.testing.assert_close(scales, wanted.expand(-1, 4), rtol=2**-7, atol=0)
        assert torch.equal(scales, scales[:, :1].expand(-1, 4))
        assert not bool(written[4, :512].any())


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "fp8"])
def test_padding_rows_touch_no_page_whatever_they_hold(packed):
    """vllm-project/vllm#43810: rows that fill up a captured batch wrote through slot -1."""
    first, last = 0, 4 * LAYERS * PAGE + PAGE - 1
    arguments, pool = case(512, 64, 2, [-1, first, last, -1], packed, True)
    query, latent = arguments[0], arguments[1]
    turned = both(arguments, pool, True, layer=0)[0][0]
    query[0], latent[0], latent[3] = torch.nan, torch.nan, torch.nan
    (rotated, mine), _ = both(arguments, pool, True, layer=0)
    assert torch.equal(rotated[3], turned[3])  # a row that is computed again without writing
    unpadded = (*(a[1:3] for a in arguments[:2]), *arguments[2:5], *(a[1:3] for a in arguments[5:]))
    (alone, alone_pool), _ = both(unpadded, pool, True, layer=0)
    assert torch.equal(rotated[1:3], alone)
    assert torch.equal(mine, alone_pool)
    assert bool((mine != pool).any())


def test_queries_can_be_rotated_in_place():
    arguments, pool = case(128, 32, 5, [1, 2], False, True)
    want = both(arguments, pool, True)[1][0]
    query = arguments[0]
    before = query._base.clone()
    assert fast.rope_append(*arguments, pool, 0, out=query) is query
    torch.testing.assert_close(query, want, rtol=2**-7, atol=1e-6)
    assert torch.equal(query._base[..., :8], before[..., :8])


def test_no_rows_are_no_work():
    arguments, pool = case(128, 32, 5, [], False, True)
    before = pool.clone()
    assert fast.rope_append(*arguments, pool, 0).shape == (0, 5, 32)
    assert torch.equal(pool, before)


def test_what_does_not_fit_is_refused():
    arguments, pool = case(128, 32, 5, [1], False, True)
    with pytest.raises(ValueError, match="pool"):
        fast.rope_append(*arguments, pool[..., :-1], 0)
    with pytest.raises(ValueError, match="tables"):
        fast.rope_append(*arguments[:3], pool[0, 0], *arguments[4:], pool, 0)
