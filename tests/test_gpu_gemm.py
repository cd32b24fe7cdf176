"""The FP8 products on a device, DeepSeek-V3's shapes, every backend against float64."""

import pytest
import torch

from pdmesh.kernels import cublaslt_backend, cuda_absorbed, cuda_gemm, deep_gemm_backend
from pdmesh.kernels.gemm_config import CLUSTERS, ClusterTile
from pdmesh.kernels.quantised import BlockWeight, Rows, dequantise_rows, new_scales

pytestmark = pytest.mark.gpu

SHAPES = [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (576, 7168)]
ROWS = [0, 1, 127, 129, 256]
NAN_BITS = 0x7F


@pytest.fixture(autouse=True)
def _a_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def fp8(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cuda") * 100
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def uniform(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(shape, generator=generator, device="cuda") * 1e-3 + 1e-4


def rows(seed: int, *shape: int) -> Rows:
    *batch, m, k = shape
    scales = new_scales(*batch, m, -(-k // 128), device="cuda")
    scales.copy_(uniform(seed, *scales.shape))
    return Rows(fp8(seed, *shape), scales)


def weight(seed: int, *shape: int) -> BlockWeight:
    *batch, n, k = shape
    return BlockWeight(fp8(seed, *shape), uniform(seed, *batch, -(-n // 128), -(-k // 128)))


def wide_rows(x: Rows) -> torch.Tensor:
    scales = x.scales.double().repeat_interleave(128, -1)
    return x.values.double() * scales[..., : x.values.shape[-1]]


def wide_weight(w: BlockWeight) -> torch.Tensor:
    scales = w.scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return w.values.double() * scales[..., : w.values.shape[-2], : w.values.shape[-1]]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def dense_product(name: str, m: int, n: int, k: int):
    """The backend's function, or skips."""
    if name == "split":
        pytest.importorskip("triton")
        from pdmesh.kernels.triton import splitk_gemm

        return splitk_gemm.fp8_gemm
    if name == "deep_gemm":
        reason = deep_gemm_backend.unavailable() or deep_gemm_backend.unsupported(n, k)
        product = deep_gemm_backend.fp8_gemm
    elif name == "cublaslt":
        reason = cublaslt_backend.unavailable() or cublaslt_backend.unsupported(m, n, k)
        product = cublaslt_backend.fp8_gemm
    else:
        reason = cuda_gemm.unavailable() or cuda_gemm.unsupported(n, k)
        product = cuda_gemm.fp8_gemm
    if reason:
        pytest.skip(reason)
    return product


@pytest.mark.parametrize("name", ["split", "cuda", "deep_gemm", "cublaslt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_any_number_of_rows_is_that_of_float64(shape, name):
    n, k = shape
    w = weight(1, n, k)
    exact = wide_weight(w).t()
    tried = 0
    for m in ROWS:
        if name == "cublaslt" and cublaslt_backend.unsupported(m, n, k):
            continue
        product = dense_product(name, m, n, k)
        x = rows(m, m, k)
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        got = product(x, w, out=out)
        assert got.data_ptr() == out.data_ptr()
        if m:
            assert error(got, wide_rows(x) @ exact) < 5e-3, m
            tried += 1
    assert tried


TILES = [
    ClusterTile(136, 4, 2),
    ClusterTile(136, 8, 1),
    ClusterTile(128, 2, 2),
    ClusterTile(112, 1, 2),
    ClusterTile(72, 4, 1, 7),
    *dict.fromkeys(tile for by_rows in CLUSTERS.values() for tile in by_rows.values()),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_cluster_gives_the_product_and_the_same_bits_again(tile):
    if reason := cuda_gemm.unavailable():
        pytest.skip(reason)
    for m, n, k in ((1, 2112, 7168), (130, 264, 1536), (300, 1000, 1040), (256, 2112, 7168)):
        x, w = rows(m, m, k), weight(n, n, k)
        exact = wide_rows(x) @ wide_weight(w).t()
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        got = cuda_gemm.fp8_gemm(x, w, tile=tile, out=out).clone()
        assert error(got, exact) < 5e-3
        for _ in range(20):
            assert cuda_gemm.fp8_gemm(x, w, tile=tile, dependent=True).equal(got)


def test_a_split_product_in_a_graph_is_right_every_time_it_is_replayed():
    product = dense_product("split", 256, 2112, 7168)
    x, w = rows(1, 256, 7168), weight(2, 2112, 7168)
    wanted = product(x, w).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [product(x, w) for _ in range(4)]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(out.equal(wanted) for out in outs)


def grouped_module(name: str):
    if name == "deep_gemm":
        if reason := deep_gemm_backend.unavailable():
            pytest.skip(reason)
        return deep_gemm_backend
    pytest.importorskip("triton")
    from pdmesh.kernels.triton import grouped_gemm

    return grouped_gemm


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
@pytest.mark.parametrize("shape", [(4096, 7168), (7168, 2048)], ids=str)
def test_experts_multiply_the_rows_that_count(shape, name):
    module, (n, k) = grouped_module(name), shape
    counts = torch.tensor([0, 1, 127, 129, 256], dtype=torch.int32, device="cuda")
    x, w = rows(1, 5, 256, k), weight(2, 5, n, k)
    unused = torch.arange(256, device="cuda") >= counts[:, None]
    exact = wide_rows(x) @ wide_weight(w).transpose(1, 2)
    x.values.view(torch.uint8)[unused] = NAN_BITS
    x.scales[unused] = torch.nan
    got = module.masked_grouped_gemm(x, w, counts, 128)
    assert error(got[~unused], exact[~unused]) < 5e-3


@pytest.mark.parametrize("used", [0, 4, 40])
@pytest.mark.parametrize("expected", [1, 20, 64])
def test_experts_with_rows_are_found_among_those_without(expected, used):
    module = grouped_module("triton")
    counts = torch.zeros(64, dtype=torch.int32, device="cuda")
    counts[3], counts[40], counts[63] = 1, 128, 17
    x, w = rows(1, 64, 128, 512), weight(2, 64, 384, 512)
    unused = torch.arange(128, device="cuda") >= counts[:, None]
    exact = wide_rows(x) @ wide_weight(w).transpose(1, 2)
    x.values.view(torch.uint8)[unused] = NAN_BITS
    x.scales[unused] = torch.nan
    got = module.masked_grouped_gemm(x, w, counts, expected, used)
    assert error(got[~unused], exact[~unused]) < 5e-3


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
@pytest.mark.parametrize("expected", [16, 32, 64, 128])
def test_rows_in_groups_take_their_experts_weight(expected, name):
    module = grouped_module(name)
    n, k = 4096, 7168
    expert = torch.full((896,), -1, dtype=torch.int32, device="cuda")
    expert[:129], expert[256:257], expert[384:640], expert[768:895] = 2, 0, 1, 3
    used = expert >= 0
    x, w = rows(1, 896, k), weight(2, 4, n, k)
    wide, exact = wide_rows(x), torch.empty(896, n, dtype=torch.float64, device="cuda")
    for e in range(4):
        exact[expert == e] = wide[expert == e] @ wide_weight(w)[e].t()
    x.values.view(torch.uint8)[~used] = NAN_BITS
    x.scales[~used] = torch.nan
    got = module.contiguous_grouped_gemm(x, w, expert, expected)
    assert error(got[used], exact[used]) < 5e-3


def absorbed_module(name: str):
    if name.startswith("cuda"):
        if reason := cuda_absorbed.unavailable():
            pytest.skip(reason)
        return cuda_absorbed
    pytest.importorskip("triton")
    from pdmesh.kernels.triton import absorbed

    return absorbed


@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("m", [*ROWS, 700])
def test_absorbed_products_are_those_of_float64(m, heads, name):
    absorbed = absorbed_module(name)

    generator = torch.Generator("cuda").manual_seed(m)
    whole = torch.randn(m, heads, 192, generator=generator, device="cuda").bfloat16()
    latent = torch.randn(m, heads, 512, generator=generator, device="cuda").bfloat16()
    up, down = weight(1, heads, 512, 128), weight(2, heads, 128, 512)
    out = torch.full((m, heads, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    query = absorbed.absorb_query(whole[..., :128], up, whole[..., 128:], 0.1, out=out)
    values = absorbed.project_values_quantise(latent, down)
    assert query.shape == (m, heads, 576)
    assert values.values.shape == (m, heads * 128)
    if m == 0:
        return
    exact = torch.einsum("mhd,hrd->mhr", whole[..., :128].double(), wide_weight(up)) * 0.1
    assert error(query[..., :512], exact) < 4e-3
    assert error(query[..., 512:], whole[..., 128:].double() * 0.1) < 4e-3
    exact = torch.einsum("mhr,hvr->mhv", latent.double(), wide_weight(down))
    assert error(dequantise_rows(values), exact.flatten(1)) < 4e-2
