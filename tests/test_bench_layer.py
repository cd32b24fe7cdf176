"""The layer of bench/gpu_layer.py over packed latents: its definitions, on a CPU."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these kernels run in Triton's interpreter here", allow_module_level=True)

from pdmesh.kernels import mla_reference  # noqa: E402
from pdmesh.kernels.quantised import unpack_latents  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("gpu_choices")
    finally:
        sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "packed"])
def world(bench, request):
    """A step's state over two sequences of 70 latents, and the candidates for it."""
    block = importlib.import_module("gpu_block")
    rank = block.Rank("a small one", 128, batch=2, query=2, kv=70, heads=2)
    state = block.State(rank, 2, packed=request.param, device="cpu")
    return rank, state, bench.steps(packed=request.param)


def normal(*shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def test_all_that_append_latents_write_what_the_definition_writes(bench, world):
    rank, state, table = world
    step, timing = table["rope_append"], importlib.import_module("gpu_timing")
    inputs = normal(rank.tokens, rank.heads, 64), normal(rank.tokens, 576), normal(512)
    call = (*inputs, state.cos, state.sin, state.positions, state.slots, state.pool, 1)
    wanted = step.look(step.reference(*call), call)
    assert [one.name for one in step.candidates] == ["torch", "rope_append"]
    for candidate in step.candidates:
        got = step.look(candidate.run(*call), call)
        assert timing.error(got, wanted) < step.tolerance
    nothing = step.look(wanted[0], call)
    assert timing.error(nothing, wanted) > 0.9


def test_attention_is_held_against_what_the_pages_hold(world):
    rank, state, table = world
    step = table["mla"]
    query = normal(rank.tokens, rank.heads, 576)
    call = (query, state.pool[:, 0], state.table, state.lengths, rank.query, 192**-0.5)
    wanted = mla_reference.mla_decode(*call)
    torch.testing.assert_close(step.reference(*call), wanted, rtol=2**-7, atol=1e-3)


def test_packed_latents_are_offered_to_kernels_that_read_them(bench):
    names = [one.name for one in bench.steps(packed=True)["mla"].candidates]
    assert names == ["CUDA", "Triton, 656 bytes"]
    assert "FlashMLA" in [one.name for one in bench.steps()["mla"].candidates]


def test_a_random_pool_holds_unit_values_in_either_form(world):
    _, state, _ = world
    pool = state.pool
    wide = unpack_latents(pool) if pool.dtype == torch.uint8 else pool.float()
    assert wide.shape == (4, 2, 64, 576)
    assert float(wide[:, 0].std()) == pytest.approx(1, abs=0.02)


def test_rows_that_no_expert_computed_are_not_sent_back(bench):
    blocks, choices = (importlib.import_module(name) for name in ("gpu_block", "gpu_choices"))
    rank = blocks.Rank("TP8", 8, batch=1, heads=16, senders=8)
    draw = torch.Generator().manual_seed(1)
    origin = torch.randint(rank.pairs, (rank.tokens, 8), generator=draw)
    weights = SimpleNamespace(pairs=rank.pairs, origin=origin)
    steps = choices.steps()
    ops = {name: steps[name].reference for name in ("combine_send", "combine_sum")}
    block = blocks.Block(rank, weights, None, 0, ops)
    done = torch.full((32, 64, 256), float("nan"), dtype=torch.bfloat16)
    done[: rank.active, : rank.rows] = torch.randn(rank.active, rank.rows, 256).bfloat16()
    shared = torch.randn(rank.tokens, 256, generator=draw).bfloat16()
    got = block.combine(done, torch.rand(rank.tokens, 8, generator=draw), shared)
    assert got.isfinite().all()


class Adds:
    """A layer in one step, which in one of the modes reads too early."""

    def __init__(self, early):
        self.state = SimpleNamespace(x=torch.ones(2, 4), residual=torch.zeros(2, 4))
        self.early, self.ops = early, {"add": lambda x: x + 1}

    def __call__(self, x, residual, side):
        residual += x
        return self.ops["add"](residual) + float(self.early())


class Recorded:
    """A "graph" that computes again."""

    def __init__(self, function):
        self.function, self.kept = function, function()

    def replay(self):
        self.kept = self.function()


@pytest.fixture
def modes(bench, monkeypatch):
    from pdmesh.kernels.triton.launch import lets_next_begin

    found = importlib.import_module("gpu_modes")
    recorded = []

    def capture(function):
        recorded.append(Recorded(function))
        if lets_next_begin():  # a graph keeps how its launches were made
            recorded[-1].function = lambda: function() + 1
        return recorded[-1]

    monkeypatch.setattr(found, "capture", capture)
    monkeypatch.setattr(found, "replay_times", lambda graph, _: [1.0 + recorded.index(graph)])
    monkeypatch.setattr(found, "kernel_gaps", lambda graph: None)
    monkeypatch.setattr(found, "rested", lambda graph: 1.0)
    monkeypatch.setattr(found, "sustained", lambda graph, clocks: (1.0, {}))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_a_mode_whose_launches_read_too_early_has_no_time(modes, capsys):
    layer = modes.whole_layer([Adds(lambda: False)], None)
    assert layer["in_line"] < layer["side"] < layer["side_66"]
    assert layer["best"] == "in_line"
    assert layer["dependent"] is None
    assert layer["unlike"]["dependent"] > 0.1
    assert layer["unlike"]["side"] == 0
    assert "dependent: wrong by" in capsys.readouterr().out


def test_layers_in_line_that_read_too_early_are_an_error(modes):
    once = iter([False])
    with pytest.raises(RuntimeError, match="unlike launches that wait"):
        modes.whole_layer([Adds(lambda: next(once, True))], None)
