"""Latent attention at real shapes on a GPU, every backend that is there, against float64."""

import pytest
import torch

from pdmesh.kernels import (
    cuda_absorbed,
    flash_mla_backend,
    flashinfer_backend,
    hopper_mla,
    mla_reference,
)
from pdmesh.kernels.quantised import BlockWeight, pack_latents, unpack_latents
from pdmesh.kernels.triton import absorbed
from pdmesh.kernels.triton import mla_decode as decode
from pdmesh.kernels.triton import mla_prefill as prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCALE = 192**-0.5
PAGE = 64
MIXED = [1, 5000, 0, 64, 65, 63, 4096, 129, 2, 777, 1023, 3]


def error(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def batch(lengths, heads, rows, packed=False, seed=0, layers=3, poison=True):
    """A pool whose tokens beyond a length are NaN, page tables, a query: all random."""
    g = torch.Generator("cuda").manual_seed(seed)
    per = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(per) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.randn(
        (sum(per) + 1, layers, PAGE, 576), generator=g, device="cuda", dtype=torch.bfloat16
    )
    table = torch.full((len(lengths), max(per) + 2), order[-1], dtype=torch.int32)
    used = torch.zeros((sum(per) + 1, PAGE), dtype=torch.bool)
    for i, length in enumerate(lengths):
        for j in range(per[i]):
            table[i, j] = order[0]
            used[order.pop(0), : min(PAGE, length - j * PAGE)] = True
    nothing = ~used.cuda()
    pages = pack_latents(pool) if packed else pool
    if poison:
        pages.transpose(1, 2)[nothing] = 0xFF if packed else float("nan")
    query = torch.randn(
        (len(lengths) * rows, heads, 576), generator=g, device="cuda", dtype=torch.bfloat16
    )
    sizes = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return query, pages[:, 1], table.cuda(), sizes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_triton_decode_of_mixed_lengths(heads, rows, packed):
    args = batch(MIXED, heads, rows, packed)
    wanted = mla_reference.mla_decode(*args, rows, SCALE)
    for split in (512, 8192):
        out = torch.full_like(wanted, float("nan"))
        got = decode.mla_decode(*args, rows, SCALE, split=split, out=out)
        assert error(got, wanted) < 8e-3
        assert torch.equal((got == 0).all(-1), (wanted == 0).all(-1))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("library", ["flash_mla", "flashinfer"])
def test_a_library_reads_a_layer_of_the_pool_in_place(library, heads, rows):
    backend = {"flash_mla": flash_mla_backend, "flashinfer": flashinfer_backend}[library]
    if why := backend.unavailable():
        pytest.skip(why)
    lengths = [5000, 64, 65, 4096, 129, 777, 1023, 8]
    args = batch(lengths, heads, rows, poison=library != "flash_mla")
    query, pages, table, lengths = args
    wanted = mla_reference.mla_decode(*args, rows, SCALE)
    if library == "flash_mla":
        got = flash_mla_backend.mla_decode(*args, rows, SCALE)
    else:
        space = torch.empty(flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer_backend.Decode(space, 8, table.shape[1])
        wrapper.plan(table.cpu(), lengths.cpu(), rows, heads, PAGE, SCALE)
        got = wrapper.run(query, pages)
    assert error(got, wanted) < 8e-3


def test_a_row_does_not_depend_on_its_neighbours():
    for packed in (False, True):
        query, pages, table, lengths = batch(MIXED, 128, 2, packed)
        whole = decode.mla_decode(query, pages, table, lengths, 2, SCALE, split=1024)
        for i in (1, 7):
            alone = decode.mla_decode(
                query[2 * i : 2 * i + 2],
                pages,
                table[i : i + 1],
                lengths[i : i + 1],
                2,
                SCALE,
                split=1024,
            )
            assert torch.equal(alone, whole[2 * i : 2 * i + 2])


@pytest.fixture
def fp8_kernel():
    if why := hopper_mla.unavailable():
        pytest.skip(why)
    return hopper_mla.mla_decode


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_the_fp8_kernel_is_as_exact_as_fp8_weights_allow(heads, rows, fp8_kernel):
    args = batch(MIXED, heads, rows, packed=True)
    wanted = mla_reference.mla_decode(*args, rows, SCALE)
    for split in (512, 8192):
        out = torch.full_like(wanted, float("nan"))
        given = {"split": split, "out": out}
        got = fp8_kernel(*args, rows, SCALE, **given)
        assert not got.isnan().any()
        assert error(got, wanted) < 6e-2
        assert torch.equal((got == 0).all(-1), (wanted == 0).all(-1))


def test_the_fp8_kernel_follows_scales_that_differ_between_tokens(fp8_kernel):
    query, pages, table, lengths = batch([5000, 300], 128, 2, packed=True, poison=False)
    g = torch.Generator("cuda").manual_seed(5)
    latent = unpack_latents(pages).view(*pages.shape[:-1], 9, 64)
    growth = torch.randn(*pages.shape[:-1], 1, 1, generator=g, device="cuda").mul(2).exp2()
    pages = pack_latents((latent * growth).flatten(-2).bfloat16())
    args = (query * 0.2, pages, table, lengths)
    wanted = mla_reference.mla_decode(*args, 2, SCALE)
    got = fp8_kernel(*args, 2, SCALE)
    assert error(got, wanted) < 6e-2


def test_a_row_of_the_fp8_kernel_does_not_depend_on_its_neighbours(fp8_kernel):
    query, pages, table, lengths = batch(MIXED, 128, 2, packed=True)
    whole = fp8_kernel(query, pages, table, lengths, 2, SCALE, split=1024)
    for i in (1, 7):
        one = query[2 * i : 2 * i + 2], pages, table[i : i + 1], lengths[i : i + 1]
        alone = fp8_kernel(*one, 2, SCALE, split=1024)
        assert torch.equal(alone, whole[2 * i : 2 * i + 2])


@pytest.mark.parametrize("library", ["triton", "flashinfer"])
def test_prefill_of_ragged_chunks_behind_a_prefix(library):
    if library == "flashinfer" and (why := flashinfer_backend.unavailable()):
        pytest.skip(why)
    g = torch.Generator("cuda").manual_seed(3)
    queries, keys, heads = [1000, 1, 129, 64], [1000, 700, 1500, 64], 16
    q_starts, k_starts = [torch.tensor([0, *c]).cumsum(0).int() for c in (queries, keys)]

    def normal(*shape):
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    q, k = normal(sum(queries), heads, 192), normal(sum(keys), heads, 192)
    v = normal(sum(keys), heads, 128)
    wanted = mla_reference.mla_prefill(q, k, v, q_starts.cuda(), k_starts.cuda(), SCALE)
    if library == "triton":
        got = prefill.mla_prefill(q, k, v, q_starts.cuda(), k_starts.cuda(), SCALE)
    else:
        space = torch.empty(flashinfer_backend.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer_backend.Prefill(space)
        wrapper.plan(q_starts, k_starts, heads, (192, 128), SCALE)
        got = wrapper.run(q, k, v)
    assert error(got, wanted) < 8e-3


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_flash_mla_reads_the_query_that_the_kernel_before_it_writes(name, rows):
    """In a graph, where kernels follow each other closest; the query's memory is NaN before."""
    if why := flash_mla_backend.unavailable():
        pytest.skip(why)
    module = absorbed if name == "triton" else cuda_absorbed
    if name != "triton" and (why := cuda_absorbed.unavailable()):
        pytest.skip(why)
    lengths = [777] * 64
    _, pages, table, sizes = batch(lengths, 128, rows, poison=False)
    g = torch.Generator("cuda").manual_seed(1)
    whole = torch.randn(64 * rows, 128, 192, generator=g, device="cuda").bfloat16()
    values = torch.randn(128, 512, 128, generator=g, device="cuda").mul_(64)
    weight = BlockWeight(
        values.to(torch.float8_e4m3fn), torch.full((128, 4, 1), 3e-4, device="cuda")
    )
    memory = torch.empty(64 * rows, 128, 576, dtype=torch.bfloat16, device="cuda")
    plan = flash_mla_backend.Plan(sizes, rows, 128)

    def query():
        given = (whole[..., :128], weight, whole[..., 128:], 1.0)
        module.absorb_query(*given, out=memory)

    def both():
        memory.fill_(float("nan"))
        query()
        return plan.decode(memory, pages, table, sizes, rows, SCALE)

    query()
    torch.cuda.synchronize()
    wanted = plan.decode(memory, pages, table, sizes, rows, SCALE)
    torch.cuda.synchronize()
    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [both() for _ in range(8)]
    graph.replay()
    assert all(torch.equal(got, wanted) for got in outputs)


@pytest.mark.parametrize("lengths", [[1], [64], [5000], [1, 64, 5000], [8] * 200])
def test_what_reads_flash_mla_s_output_reads_all_of_it(lengths):
    """Also where no sequence is split, so that no part of the merging kernel waits."""
    if why := flash_mla_backend.unavailable():
        pytest.skip(why)
    query, pages, table, sizes = batch(lengths, 128, 1, poison=False)
    plan = flash_mla_backend.Plan(sizes, 1, 128)
    wanted = plan.decode(query, pages, table, sizes, 1, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = [plan.decode(query, pages, table, sizes, 1, SCALE) + 0 for _ in range(16)]
    graph.replay()
    assert all(torch.equal(got, wanted) for got in copies)
