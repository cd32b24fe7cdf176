"""The Triton kernels of latent attention against float64, in the interpreter."""

import pytest
import torch

from pdmesh.kernels import flash_mla_backend, flashinfer_backend, hopper_mla, mla_reference
from pdmesh.kernels.attention_choice import HopperDecode
from pdmesh.kernels.quantised import pack_latents, unpack_latents
from pdmesh.kernels.triton import mla_decode as decode
from pdmesh.kernels.triton import mla_prefill as prefill

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def batch(lengths, heads, rows, page, rank=32, rope=16, packed=False, seed=0, shared=True):
    """A pool of two layers whose tokens beyond a sequence's length are NaN, and a query."""
    g = torch.Generator().manual_seed(seed)
    width = 576 if packed else rank + rope
    per = [-(-length // page) for length in lengths]
    most = max(1, *per) + 1
    order = torch.randperm(sum(per) + 1, generator=g).tolist()
    pool = torch.full((sum(per) + 1, 2, page, width), float("nan"), dtype=torch.bfloat16)
    table = torch.full((len(lengths), most), 1 << 20, dtype=torch.int32)
    for i, length in enumerate(lengths):
        for j in range(per[i]):
            table[i, j] = order.pop()
            count = min(page, length - j * page)
            pool[table[i, j], 1, :count] = torch.randn(count, width, generator=g).bfloat16()
    query = torch.randn(len(lengths) * rows, heads, width, generator=g).bfloat16()
    if packed:
        nothing = pool.isnan().any(-1)
        pool = pack_latents(pool, shared)
        pool[nothing] = 0xFF
    sizes = torch.tensor(lengths, dtype=torch.int32)
    return query.to(DEVICE), pool.to(DEVICE)[:, 1], table.to(DEVICE), sizes.to(DEVICE)


def error(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def plain(query, pages, table, lengths, rows, scale, rank):
    host = [t.cpu() for t in (query, pages, table, lengths)]
    return mla_reference.mla_decode(*host, rows, scale, rank=rank)


SMALL = decode.Tuning(16, 16, 4, 1)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("heads", "page"), [(8, 8), (3, 4)])
def test_decode_gives_what_softmax_over_the_whole_sequence_gives(rows, heads, page):
    args = batch([1, 0, 37, 5, 16], heads, rows, page)
    wanted = plain(*args, rows, 0.2, 32)
    for split in (16, 64):
        got = decode.mla_decode(*args, rows, 0.2, rank=32, split=split, tuning=SMALL).cpu()
        assert error(got, wanted) < 1e-2
        assert torch.equal(got == 0, wanted == 0)


def test_decode_does_not_read_tokens_before_the_first_key():
    """Slot 0 of the MTP layer stays empty: it may hold what another owner of the page left."""
    query, pages, table, lengths = batch([37, 1, 17], 4, 2, 8)
    pages[table[:, 0].long(), 0] = float("nan")
    for split in (16, 64):
        got = decode.mla_decode(
            *(query, pages, table, lengths, 2, 0.2), rank=32, first_key=1, split=split, tuning=SMALL
        )
        host = [t.cpu() for t in (query, pages, table, lengths)]
        wanted = mla_reference.mla_decode(*host, 2, 0.2, rank=32, first_key=1)
        assert not wanted.isnan().any()
        assert error(got.cpu(), wanted) < 1e-2
        assert bool((wanted[2:4] == 0).all())


@pytest.mark.parametrize("shared", [True, False], ids=["one scale", "four scales"])
def test_decode_reads_packed_latents(shared):
    args = batch([1, 0, 35], 4, 2, 8, rank=512, packed=True, shared=shared)
    wanted = plain(*args, 2, 0.05, 512)
    got = decode.mla_decode(*args, 2, 0.05, split=32, tuning=SMALL).cpu()
    assert error(got, wanted) < 1e-2


def test_a_sequence_gets_the_same_whoever_stands_beside_it():
    query, pages, table, lengths = batch([37, 5, 0, 21], 4, 2, 8)
    together = decode.mla_decode(
        query, pages, table, lengths, 2, 0.2, rank=32, split=16, tuning=SMALL
    )
    for i in (0, 1, 3):
        alone = decode.mla_decode(
            query[2 * i : 2 * i + 2].contiguous(),
            pages,
            table[i : i + 1],
            lengths[i : i + 1],
            2,
            0.2,
            rank=32,
            split=16,
            tuning=SMALL,
        )
        assert torch.equal(alone, together[2 * i : 2 * i + 2])


def test_decode_writes_every_row_of_a_given_output():
    args = batch([0, 7], 4, 2, 8)
    out = torch.full((4, 4, 32), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    for split in (16, 4096):
        decode.mla_decode(*args, 2, 0.2, rank=32, split=split, out=out, tuning=SMALL)
        assert (out[:2] == 0).all()
        assert not out.isnan().any()
        out.fill_(float("nan"))


def test_splits_cover_the_longest_sequence_and_do_not_depend_on_lengths():
    assert decode.split_tokens(5120, 128, 256) >= 5120
    few = decode.split_tokens(5120, 1, 128)
    assert 256 <= few < 5120
    assert few % 256 == 0


@pytest.mark.parametrize("widths", [(24, 16), (192, 128), (112, 48)])
def test_prefill_sees_its_own_past_and_the_cached_prefix(widths):
    g = torch.Generator().manual_seed(1)
    queries, keys = [5, 0, 17, 1], [5, 0, 30, 9]
    starts = [torch.tensor([0, *c]).cumsum(0).int() for c in (queries, keys)]
    q = torch.randn(sum(queries), 2, widths[0], generator=g).bfloat16()
    kv = torch.randn(sum(keys), 2, sum(widths), generator=g).bfloat16()
    args = [q, kv[..., : widths[0]], kv[..., widths[0] :], *starts]
    wanted = mla_reference.mla_prefill(*args, 0.1)
    got = prefill.mla_prefill(*[a.to(DEVICE) for a in args], 0.1, block_m=16, block_n=16, warps=4)
    assert error(got.cpu(), wanted) < 1e-2


@pytest.mark.skipif(GPU, reason="says what a machine without a GPU says")
@pytest.mark.parametrize("backend", [flash_mla_backend, flashinfer_backend, hopper_mla, decode])
def test_a_backend_says_why_it_is_not_there(backend):
    assert backend.unavailable() == "no CUDA device"


def test_latents_with_one_scale_are_as_exact_as_with_four():
    g = torch.Generator().manual_seed(0)
    latent = torch.randn(64, 576, generator=g)
    four, one = pack_latents(latent, shared_scale=False), pack_latents(latent)
    scales = one[:, 512:528].contiguous().view(torch.float32)
    assert (scales == scales[:, :1]).all()
    errors = [error(unpack_latents(p)[:, :512], latent[:, :512]) for p in (four, one)]
    assert 0.9 < errors[1] / errors[0] < 1.1


def test_no_latents_are_packed_into_no_bytes():
    assert pack_latents(torch.zeros(0, 576)).shape == (0, 656)
    assert pack_latents(torch.zeros(0, 576), shared_scale=False).shape == (0, 656)


def test_packed_pages_are_decoded_by_one_scale_a_latent(monkeypatch):
    asked = []
    monkeypatch.setattr(hopper_mla, "mla_decode", lambda *args, **more: asked.append((args, more)))
    HopperDecode()("query", "pages", "table", "lengths", 2, 0.1, rank=512, first_key=0)
    assert asked == [(("query", "pages", "table", "lengths", 2, 0.1), {})]


def test_flash_mla_names_the_shape_it_does_not_take():
    assert flash_mla_backend.supports(128, 64, 576, torch.bfloat16) is None
    assert "pages of 64" in flash_mla_backend.supports(128, 16, 576, torch.bfloat16)
    assert "576 values" in flash_mla_backend.supports(128, 64, 96, torch.bfloat16)
    assert "uint8" in flash_mla_backend.supports(128, 64, 576, torch.uint8)


def test_the_fp8_kernel_takes_a_layer_of_the_pool_and_no_cut_rows():
    pool = torch.zeros((3, 4, 64, 656), dtype=torch.uint8)
    assert hopper_mla.supports(pool[:, 2]) is None
    assert "strides" in hopper_mla.supports(torch.zeros((3, 64, 700), dtype=torch.uint8)[..., :656])
    assert "takes pages" in hopper_mla.supports(pool[:, 2, :32])


def test_the_fp8_kernel_is_split_in_whole_steps():
    for sequences, pairs, longest in ((1, 16, 5000), (128, 256, 5000), (8, 128, 100)):
        split = hopper_mla.split_tokens(longest, sequences, pairs)
        assert split % 128 == 0
        assert sequences < 100 or split >= longest
    pages = torch.zeros((1, 64, 656), dtype=torch.uint8)
    table, lengths = torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.zeros((1, 16, 576), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="128"):
        hopper_mla.mla_decode(query, pages, table, lengths, 1, 1.0, split=64)


@pytest.mark.full
@pytest.mark.skipif(hopper_mla.compiler() is None, reason="needs nvcc")
def test_the_fp8_kernel_compiles_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PDMESH_KERNEL_CACHE", str(tmp_path))
    path = hopper_mla.build()
    made = path.stat().st_mtime_ns
    assert hopper_mla.build() == path
    assert path.stat().st_mtime_ns == made
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
