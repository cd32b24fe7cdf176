"""Ranks on GPUs exchange rows over NVSHMEM: several processes, on one GPU or on one each."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from child_path import python_path
from exact_experts import ExactExperts
from symmetric_rig import Group, inputs, scattered

from pdmesh.kernels import symmetric
from pdmesh.kernels.expert_exchange import ExchangeSize

ROOT = Path(__file__).resolve().parent.parent
REASON = symmetric.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


class Process:
    """A rank's process."""

    def __init__(self, rank, size, job_id, meeting):
        environment = {
            **os.environ,
            "PYTHONPATH": python_path("tests"),
            "NVSHMEM_DISABLE_NVLS": "1",
            "NVSHMEM_SYMMETRIC_SIZE": str(4 << 30),
        }
        command = [sys.executable, "-P", str(ROOT / "tests" / "ep_peer.py")]
        self.process = subprocess.Popen(
            [*command, str(rank), str(size), job_id, meeting],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = 0

    def line(self):
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def tell(self, **command):
        self.told += 1
        self.process.stdin.write(json.dumps({**command, "number": self.told}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """The last command's; a test that was cut off leaves answers that nobody took."""
        while True:
            number, answer = self.line()
            if number == self.told:
                return answer


@contextmanager
def job(size, folder):
    job_id = symmetric.new_job_id().hex()
    peers = [Process(rank, size, job_id, str(folder / "meeting")) for rank in range(size)]
    try:
        for peer in peers:
            assert peer.line() == "ready"
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
            peer.process.stdin.close()
            peer.process.stdout.close()


LAYOUTS = ["masked", "contiguous"]
RANKS = [int(number) for number in os.environ.get("EP_RANKS", "2,4,8").split(",")]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request, tmp_path_factory):
    with job(request.param, tmp_path_factory.mktemp("job")) as peers:
        yield peers


def ask(peers, **command):
    for peer in peers:
        peer.tell(**command)
    return [peer.answer() for peer in peers]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["mapped", "put"])
@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "padded"])
def test_what_arrives_is_bit_for_bit_the_definition(ranks, path, kind, layout):
    for seed, counts, hidden in ((0, [16, 16], 7168), (1, [0, 40, 7, 1], 1024), (2, [0, 3], 1024)):
        per_rank = [counts[rank % len(counts)] for rank in range(len(ranks))]
        command = {"do": "layout", "path": path, "kind": kind, "hidden": hidden, "seed": seed}
        answers = ask(ranks, **command, layout=layout, counts=per_rank)
        assert answers == ["right"] * len(ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("path", ["mapped", "put"])
def test_exchange_after_exchange_without_a_meeting_gives_the_right_sums(ranks, path, graph, layout):
    # Ranks that share a GPU take turns at it, and a waiting one keeps its turn for milliseconds.
    own = torch.cuda.device_count() >= len(ranks)
    steps = 2000 if own else {2: 400, 4: 100, 8: 25}[len(ranks)]
    for kind in ("balanced", "padded"):
        command = {"do": "stream", "path": path, "kind": kind, "tokens": 24, "hidden": 1024}
        answers = ask(ranks, **command, layout=layout, steps=steps, seed=7, graph=graph)
        assert answers == ["right"] * len(ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["mapped", "put"])
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_batches_of_one_row_to_4096_give_the_right_sums(ranks, path, tokens, layout):
    command = {"do": "stream", "path": path, "kind": "balanced", "tokens": tokens, "hidden": 1024}
    answers = ask(ranks, **command, layout=layout, steps=3, seed=0, graph=True)
    assert answers == ["right"] * len(ranks)


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_a_prefill_of_16384_rows_a_rank_gives_the_right_sums(ranks, kind):
    if len(ranks) > 4:
        pytest.skip("what eight ranks need of one GPU's memory is another test's")
    command = {"do": "stream", "path": "mapped", "kind": kind, "tokens": 16384, "hidden": 1024}
    answers = ask(ranks, **command, layout="contiguous", steps=2, seed=0, graph=False)
    assert answers == ["right"] * len(ranks)


def test_the_library_knows_the_numbers_of_a_puts_signal_operations():
    from nvshmem.core import SignalOp

    from pdmesh.kernels.triton import ep_put

    assert int(SignalOp.SIGNAL_SET) == ep_put.SIGNAL_SET
    assert int(SignalOp.SIGNAL_ADD) == ep_put.SIGNAL_ADD


def test_bytes_are_counted_by_peer(ranks):
    for path in ("mapped", "put"):
        assert ask(ranks, do="bytes", path=path) == [{"found": True}] * len(ranks)


def test_a_rank_that_sends_nothing_is_named_and_nobody_hangs(ranks):
    silent = len(ranks) - 1
    assert ask(ranks, do="lost", path="mapped") == [f"rank {silent}"] * silent + ["nothing"]


def sized(placement, layout, tokens=24, hidden=7168, max_rows=192):
    of_all = placement.num_ranks, max(map(len, placement.layers[0])), tokens, hidden, 8
    if layout == "contiguous":
        return ExchangeSize.contiguous(*of_all)
    return ExchangeSize(*of_all, max_rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "padded"])
def test_ranks_of_one_process_on_the_device_equal_the_definition(kind, layout):
    placement = scattered(4, 32, seed=3)
    group = Group(placement, sized(placement, layout), "cuda")
    for step, counts in enumerate(((24, 0, 7, 1), (0, 0, 0, 0), (3, 24, 24, 24))):
        group.check(*inputs(group.size, counts, kind, 32, step, "cuda"))
    torch.cuda.synchronize()


def test_experts_in_fp8_compute_on_the_contiguous_layout_whatever_lies_between_their_rows():
    from pdmesh.kernels.grouped import contiguous_grouped_gemm
    from pdmesh.kernels.triton.quantise import masked_silu_mul_quantise

    placement = scattered(4, 32, seed=3)
    group = Group(placement, sized(placement, "contiguous", tokens=200, hidden=1024), "cuda")
    experts = ExactExperts(32, 1024, 512, device="cuda")
    ops = experts.ops_with(
        contiguous_grouped_gemm=contiguous_grouped_gemm,
        masked_silu_mul_quantise=masked_silu_mul_quantise,
    )
    data = inputs(group.size, (200, 0, 3, 129), "padded", 32, 1, "cuda")
    received, _, _ = group.exchange(*data)
    for rank, there in received.items():
        held = experts.held(placement.layers[0][rank])
        arrived = there.arrived
        used = arrived.row_expert >= 0
        arrived.rows.values.view(torch.uint8)[~used] = 0x7F
        arrived.rows.scales[~used] = torch.nan
        found = there.quantised_outputs(ops, *held)[used].float()
        want = there.quantised_outputs(experts.ops, *held)[used].float()
        assert found.isfinite().all()
        assert (found - want).norm() <= 0.01 * want.norm()
