"""Sampling in Triton's interpreter beside its definition, and the definition beside the sampler."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import sampling as definition  # noqa: E402
from pdmesh.kernels.triton import sampling as fast  # noqa: E402
from pdmesh.model.choice import Choice  # noqa: E402
from pdmesh.model.philox import uniform  # noqa: E402
from pdmesh.model.sampler import sample  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(fast, "BLOCK", 32)


def batch(vocab, rows, seed=0):
    """Logits, parameters and random numbers of `rows` rows, greedy ones among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    temperatures = torch.tensor([(0.0, 1.0, 0.7, 20.0)[i % 4] for i in range(rows)]).double()
    min_p = torch.tensor([(0.0, 0.0, 0.1, 0.9)[i // 2 % 4] for i in range(rows)]).double()
    numbers = torch.rand(rows, generator=generator).double()
    return logits, temperatures, min_p, numbers


@pytest.mark.parametrize(("vocab", "rows"), [(1, 2), (32, 5), (200, 12), (33, 0)])
def test_tokens_are_those_of_the_definition(vocab, rows):
    arguments = batch(vocab, rows)
    assert torch.equal(fast.sample(*arguments), definition.sample(*arguments))


def cuts(rows):
    """top_k and top_p of `rows` rows, most of them cut."""
    top_k = torch.tensor([(0, 3, 0, 40, 1)[i % 5] for i in range(rows)])
    top_p = torch.tensor([(1.0, 0.9, 0.5, 1.0, 0.01, 0.97)[i % 6] for i in range(rows)]).double()
    return top_k, top_p


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_the_definition_is_the_samplers(cut, ties):
    rows, vocab = 60, 300
    logits, temperatures, min_p, _ = batch(vocab, rows, 1)
    logits = logits.round() if ties else logits
    top_k, top_p = cuts(rows) if cut else (None, None)
    params = [
        SamplingParams(
            temperature=float(temperatures[i]),
            min_p=float(min_p[i]),
            top_k=int(top_k[i]) if cut else 0,
            top_p=float(top_p[i]) if cut else 1.0,
            seed=7 + i,
        )
        for i in range(rows)
    ]
    numbers = torch.tensor([uniform(p.seed, 3) for p in params], dtype=torch.float64)
    want, _ = sample(logits, [Choice(p, 3) for p in params])
    got = definition.sample(logits, temperatures, min_p, numbers, top_k, top_p)
    assert got.tolist() == want


def test_a_cut_beyond_the_sorted_tokens_is_left_to_the_host(monkeypatch):
    rows, vocab = 60, 300
    arguments = (*batch(vocab, rows, 1), *cuts(rows))
    want = definition.sample(*arguments)
    monkeypatch.setattr(definition, "CANDIDATES", 16)
    got = definition.sample(*arguments)
    undecided = got == definition.UNDECIDED
    assert 0 < int(undecided.sum()) < rows // 2
    assert torch.equal(got[~undecided], want[~undecided])


def test_cut_rows_are_drawn_as_by_the_definition():
    rows, vocab = 20, 100
    arguments = (*batch(vocab, rows, 2), *cuts(rows))
    arguments[0][3, 5] = torch.nan
    got = fast.sample(*arguments)
    assert torch.equal(got, definition.sample(*arguments))
    assert got[3] == definition.NO_TOKEN


def test_the_first_of_equals_is_taken_across_blocks():
    logits = torch.zeros(3, 100)
    logits[1, [40, 90]] = 1.0
    logits[2, [99, 31, 32]] = 5.0
    zero = torch.zeros(3, dtype=torch.float64)
    assert fast.sample(logits, zero, zero, zero).tolist() == [0, 40, 31]


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(number):
    logits = torch.full((4, 100), -torch.inf)
    logits[0, 50], logits[1, [3, 70]], logits[2, 99], logits[3, 0] = 1.0, 2.0, -5.0, 9.0
    one = torch.ones(4, dtype=torch.float64)
    got = fast.sample(logits, one, 0 * one, number * one)
    assert torch.equal(got, definition.sample(logits, one, 0 * one, number * one))
    assert got.tolist() == [50, 3 if number < 0.5 else 70, 99, 0]


def test_what_is_no_number_gives_no_token():
    logits, *_ = batch(100, 6)
    logits[0, 99], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    heat = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]).double()
    zero = torch.zeros(6, dtype=torch.float64)
    got = fast.sample(logits, heat, zero, zero)
    assert torch.equal(got, definition.sample(logits, heat, zero, zero))
    assert got[:3].tolist() == [-1, -1, -1]
    assert bool((got[3:] >= 0).all())


def test_a_tiny_temperature_equals_greedy():
    logits, *_ = batch(100, 3)
    heat = torch.full((3,), 1e-300, dtype=torch.float64)
    got = fast.sample(logits, heat, 0 * heat, 0 * heat + 0.9)
    assert got.tolist() == logits.argmax(dim=-1).tolist()


def test_what_does_not_fit_is_refused():
    logits, heat, min_p, numbers = batch(10, 2)
    with pytest.raises(ValueError, match="float64"):
        fast.sample(logits, heat.float(), min_p, numbers)
    with pytest.raises(ValueError, match="logits"):
        fast.sample(logits.double(), heat, min_p, numbers)
