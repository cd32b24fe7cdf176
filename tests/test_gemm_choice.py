"""Which backend computes an FP8 product, how it is tiled, and what is said of it."""

import subprocess

import pytest
import torch

from pdmesh.kernels import (
    cublaslt_backend,
    cuda_absorbed,
    cuda_build,
    cuda_gate,
    cuda_gemm,
    deep_gemm_backend,
    dense,
    gemm_choice,
    gemm_config,
    quantised,
)
from pdmesh.kernels.gemm_choice import (
    Choice,
    Measured,
    choose_contiguous,
    choose_dense,
    choose_masked,
)
from pdmesh.kernels.gemm_config import ClusterTile, cluster_tile, split_config
from pdmesh.kernels.routing import ALIGNMENT

SHAPES = [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (8, 16)]


@pytest.fixture
def measured(monkeypatch):
    times = {"deep_gemm": 12.0, "cluster": 9.0, "torch": 900.0}
    table = {(64, 128): (Measured(128, times), Measured(256, {"cublaslt": 7.5, "split": 8.0}))}
    monkeypatch.setattr(gemm_choice, "MEASURED", table)


@pytest.mark.usefixtures("measured")
def test_the_fastest_that_was_measured_is_taken_and_named():
    assert choose_dense(64, 64, 128, {}) == Choice(
        "cluster", "the fastest that was measured, 9.0 us at 128 rows"
    )
    assert choose_dense(129, 64, 128, {}).backend == "cublaslt"


@pytest.mark.usefixtures("measured")
def test_the_next_one_is_taken_with_the_reason_why_the_first_is_not():
    got = choose_dense(64, 64, 128, {"cluster": "nvcc was not found"})
    assert got.backend == "deep_gemm"
    assert "not cluster, as nvcc was not found" in got.reason


@pytest.mark.usefixtures("measured")
def test_a_shape_whose_measured_backends_are_all_missing_is_chosen_by_the_rule():
    got = choose_dense(129, 64, 128, {"cublaslt": "no", "split": "no triton"})
    assert got.backend in ("cluster", "deep_gemm")


def test_torch_is_what_is_left_and_every_missing_one_is_named():
    missing = {name: f"{name} is not there" for name in (*gemm_choice.DENSE, "triton")}
    for m in (1, 4096):
        got = choose_dense(m, 576, 7168, missing)
        assert got.backend == "torch"
        for name in gemm_choice.DENSE[:-1]:
            assert f"not {name}, as {name} is not there" in got.reason
    assert choose_masked(8, 16, missing).backend == "torch"
    assert choose_masked(8, 128, missing).backend == "torch"


def test_many_experts_of_few_rows_take_the_generic_product_and_others_the_library():
    assert choose_masked(8, 16, {}).backend == "triton"
    assert choose_masked(8, 17, {}).backend == "deep_gemm"
    assert choose_masked(4, 16, {}).backend == "deep_gemm"
    assert choose_masked(8, 16, {"triton": "no triton"}).backend == "deep_gemm"
    assert choose_masked(8, 128, {"deep_gemm": "no"}).backend == "triton"


def test_sorted_rows_take_the_library_where_its_larger_tiles_fill_up():
    for rows, backend in ((1, "triton"), (128, "triton"), (129, "deep_gemm"), (0, "deep_gemm")):
        assert choose_contiguous(rows, {}).backend == backend
    assert choose_contiguous(64, {"triton": "no triton"}).backend == "deep_gemm"
    assert choose_contiguous(1024, {"deep_gemm": "no"}).backend == "triton"
    assert choose_contiguous(64, {"triton": "no", "deep_gemm": "no"}).backend == "torch"


@pytest.mark.parametrize("rows", [0, 1, 16, 20, 21, 64, 128, 512, 513, 4096])
def test_a_tile_of_sorted_rows_lies_in_one_experts_space(rows):
    pytest.importorskip("triton")
    from pdmesh.kernels.triton.grouped_gemm import contiguous_config

    tile = contiguous_config(rows)
    assert ALIGNMENT % tile.block_m == 0
    assert (tile.block_m < 64) == (0 < rows <= 20)


def test_the_library_is_not_given_tiles_that_reach_into_the_next_expert():
    for rows, taken in ((64, True), (128, True), (1024, True), (16, False), (192, False)):
        assert (deep_gemm_backend.unsupported_masked(rows, 4096, 7168) is None) is taken
    assert deep_gemm_backend.unsupported_masked(128, 24, 7168)


def test_the_table_is_in_order_of_rows_and_names_backends_that_exist():
    for lines in gemm_choice.MEASURED.values():
        assert [line.rows for line in lines] == sorted(line.rows for line in lines)
        for line in lines:
            assert line.times
            assert set(line.times) <= set(gemm_choice.DENSE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_fit_the_kernels_for_any_number_of_rows(shape):
    n, k = shape
    for m in (1, 16, 17, 64, 65, 128, 129, 256, 5000):
        split = split_config(m, n, k)
        assert 128 % split.block_n == 0
        assert split.block_m & (split.block_m - 1) == 0
        assert 1 <= split.split <= max(1, k // 128)
        tile = cluster_tile(m, n, k)
        assert tile.block_n % 8 == 0
        assert tile.split * tile.pair <= 8
        assert tile.pair == 1 or m > 128
        assert 3 <= tile.stages <= 8


def test_every_backend_says_why_it_cannot_be_used_without_a_device():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    for backend in (cublaslt_backend, cuda_gemm, deep_gemm_backend):
        assert backend.unavailable() == "there is no CUDA device"


def test_backends_say_which_shapes_they_do_not_take():
    assert deep_gemm_backend.unsupported(2112, 7168) is None
    assert "24 x 128" in deep_gemm_backend.unsupported(24, 128)
    assert cublaslt_backend.unsupported(128, 2112, 7168) is None
    assert "127 x 2112 x 7168" in cublaslt_backend.unsupported(127, 2112, 7168)
    assert cuda_gemm.unsupported(2112, 7168) is None
    assert cuda_gemm.unsupported(12, 128)


def test_a_product_of_no_rows_needs_no_library():
    x = quantised.quantise_rows(torch.zeros(0, 128))
    w = quantised.BlockWeight(torch.zeros(16, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))
    for backend in (cublaslt_backend, cuda_gemm, deep_gemm_backend):
        got = backend.fp8_gemm(x, w)
        assert got.shape == (0, 16)
        assert got.dtype == torch.bfloat16


def test_the_cuda_source_has_the_instruction_of_its_width():
    text = cuda_gemm.source(ClusterTile(72, 4, 2, 5))
    assert "m64n72k32.f32.e4m3.e4m3" in text
    assert text.count('"+f"(d[') == 36
    for line in ("#define BLOCK_N 72", "#define SPLIT 4", "#define PAIR 2", "#define STAGES 5"):
        assert line in text


def test_a_model_of_other_sizes_is_told_which_ones_the_cuda_kernels_take():
    assert cuda_absorbed.unsupported(128, 512, 64, 128) is None
    assert "rank of 512" in cuda_absorbed.unsupported(16, 32, 8, 16)


@pytest.mark.parametrize(
    ("m", "heads", "wanted"),
    [(1, 128, (1, 1)), (256, 128, (1, 1)), (256, 16, (4, 2)), (1, 16, (1, 8)), (700, 300, (1, 1))],
)
def test_few_heads_are_shared_among_thread_blocks(m, heads, wanted):
    assert cuda_absorbed.shares(m, heads) == wanted


def compiler(tmp_path, body: str) -> str:
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_absorbed_query_lets_the_next_kernel_begin_early_only_if_asked():
    """FlashMLA's decode comes next, is launched as a dependent, and waits for nothing."""
    lines = [line.strip() for line in cuda_absorbed.source("absorb_query").splitlines()]
    early = [line for line in lines if line.endswith("let_next_begin();")]
    assert early
    assert all(line.startswith("if (next_may_begin) ") for line in early)
    assert [line for line in lines if "wait_stores" in line][-1].endswith("wait_stores();")


def test_the_product_in_clusters_is_launched_as_it_was_measured(monkeypatch):
    monkeypatch.setattr(cuda_gemm, "fp8_gemm", lambda *_, **options: options)
    assert dense._call.__wrapped__("cluster")(None, None) == {"dependent": True}


def test_a_tile_is_compiled_once_and_another_apart(tmp_path):
    made = compiler(
        tmp_path, f'echo x >>{tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done; : >"$2"'
    )
    first = cuda_build.build(cuda_gemm.source(ClusterTile(128, 1, 1)), tmp_path / "cache", made)
    again = cuda_build.build(cuda_gemm.source(ClusterTile(128, 1, 1)), tmp_path / "cache", made)
    other = cuda_build.build(cuda_gemm.source(ClusterTile(128, 2, 1)), tmp_path / "cache", made)
    assert first == again != other
    assert (tmp_path / "calls").read_text().count("x") == 2
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".so", ".so"]


def test_what_the_compiler_says_is_in_the_error(tmp_path):
    failing = compiler(tmp_path, "echo no such wgmma >&2; exit 1")
    with pytest.raises(RuntimeError, match="no such wgmma"):
        cuda_build.build(cuda_gemm.source(ClusterTile(128, 1, 1)), tmp_path / "cache", failing)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_scales_that_do_not_lie_column_by_column_are_refused():
    x = quantised.Rows(torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(4, 2))
    w = quantised.BlockWeight(torch.zeros(16, 256).to(torch.float8_e4m3fn), torch.ones(1, 2))
    with pytest.raises(ValueError, match="column by column"):
        cuda_gemm.fp8_gemm(x, w)


@pytest.mark.full
def test_the_cuda_kernels_compile_without_spilled_registers(tmp_path):
    made = cuda_build.nvcc()
    if made is None:
        pytest.skip("nvcc was not found")
    chosen = {tile for by_rows in gemm_config.CLUSTERS.values() for tile in by_rows.values()}
    tiles = {ClusterTile(136, 4, 2), ClusterTile(128, 1, 1), *chosen}
    names = ("absorb_query", "project_values")
    sources = [*map(cuda_gemm.source, tiles), *map(cuda_absorbed.source, names)]
    sources += map(cuda_gate.source, cuda_gate.FORMS)
    for text in sources:
        unit = tmp_path / "unit.cu"
        unit.write_text(text)
        command = [made, "-std=c++17", "-Xptxas", "-v", "-gencode=arch=compute_90a,code=sm_90a"]
        command += ["-cubin", "-o", str(tmp_path / "unit.cubin"), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr
        assert "wgmma" not in done.stderr  # ptxas warns when it puts waits between instructions


def test_the_processors_of_the_rule_are_filled_by_the_fused_projection():
    tile = cluster_tile(256, 2112, 7168)
    programs = -(-256 // 128) * -(-2112 // tile.block_n) * tile.split
    assert gemm_config.PROCESSORS * 0.85 < programs <= gemm_config.PROCESSORS
