"""Pages from device to device within an NVSHMEM job: several processes on one GPU."""

import json
import os
import random
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_path import python_path

from pdmesh.kvtransfer import nvshmem

ROOT = Path(__file__).resolve().parent.parent
PAGES = 64


def on_a_gpu(test):
    """Needs a CUDA device and the library."""
    reason = nvshmem.missing()
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


class Process:
    """A process of the job; ``tell`` starts a command, ``answer`` reads what came of it."""

    def __init__(self, rank, size, job_id):
        environment = {
            **os.environ,
            "PYTHONPATH": python_path("tests"),
            "NVSHMEM_DISABLE_NVLS": "1",
            "NVSHMEM_SYMMETRIC_SIZE": os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "268435456"),
        }
        command = [sys.executable, "-P", str(ROOT / "tests" / "nvshmem_peer.py")]
        self.process = subprocess.Popen(
            [*command, str(rank), str(size), job_id],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, do, **rest):
        self.process.stdin.write(json.dumps({"do": do, **rest}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, do, **rest):
        self.tell(do, **rest)
        return self.answer()


@contextmanager
def job(size):
    job_id = nvshmem.new_job_id().hex()
    peers = [Process(rank, size, job_id) for rank in range(size)]
    try:
        for peer in peers:
            assert peer.answer() == "ready"
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
            peer.process.stdin.close()
            peer.process.stdout.close()


def hand_off(sender, receiver, to, number, rng, how):
    """Random pages into random places; both sides' digests of them."""
    count = rng.choice((0, 1, 2, 7, 31))
    source, target = rng.sample(range(PAGES), count), rng.sample(range(PAGES), count)
    first = rng.randrange(4)
    lease = f"lease-{number}"
    receiver.ask("expect", lease_id=lease, pages=target, first=first)
    receiver.tell("arrived", lease_id=lease)
    sent = sender.ask("send", lease_id=lease, to=to, pages=source, first=first, how=how)
    assert sent == "done"
    assert receiver.answer() == "arrived"
    assert receiver.ask("cancel", lease_id=lease) is True
    return sender.ask("digest", pages=source), receiver.ask("digest", pages=target)


@pytest.mark.parametrize("size", [2, 4])
@on_a_gpu
def test_five_hundred_hand_offs_arrive_bit_for_bit(size):
    rng = random.Random(size)
    with job(size) as (sender, *receivers):
        sender.ask("fill", seed=1)
        addresses = [receiver.ask("address") for receiver in receivers]
        for receiver in receivers:
            receiver.ask("poison")
        for number in range(500):
            one = number % len(receivers)
            how = ("pages", "layers")[number // 2 % 2]
            mine, theirs = hand_off(sender, receivers[one], addresses[one], number, rng, how)
            assert mine == theirs
        for peer in (sender, *receivers):
            assert peer.ask("problems") == []


@on_a_gpu
def test_an_aborted_hand_off_leaves_quarantine_when_the_sender_has_drained():
    with job(2) as (sender, receiver):
        sender.ask("fill", seed=2)
        to = receiver.ask("address")
        receiver.ask("expect", lease_id="a", pages=[3, 4], first=0)
        rest = {"to": to, "pages": [7, 8], "first": 0, "how": "layers", "part": "abort"}
        assert sender.ask("send", lease_id="a", **rest) == "aborted"
        assert "stopped on purpose" in receiver.ask("arrived", lease_id="a")
        assert receiver.ask("phase", lease_id="a") == "free"
        assert receiver.ask("cancel", lease_id="a") is True
        mine, theirs = hand_off(sender, receiver, to, 1, random.Random(5), "pages")
        assert mine == theirs


@on_a_gpu
def test_a_sender_that_is_killed_ends_its_transfers_and_their_quarantine():
    with job(2) as (sender, receiver):
        sender.ask("fill", seed=3)
        to = receiver.ask("address")
        mine, theirs = hand_off(sender, receiver, to, 0, random.Random(1), "pages")
        assert mine == theirs
        receiver.ask("expect", lease_id="b", pages=[3, 4], first=0)
        rest = {"to": to, "pages": [7, 8], "first": 0, "how": "layers", "part": "hold"}
        assert sender.ask("send", lease_id="b", **rest) == "held"
        assert receiver.ask("phase", lease_id="b") == "filling"
        sender.process.kill()
        sender.process.wait()
        assert "the connection was lost" in receiver.ask("arrived", lease_id="b")
        assert receiver.ask("cancel", lease_id="b") is True
        assert receiver.ask("problems") == []


def test_without_the_library_or_a_device_the_reason_is_a_sentence():
    if nvshmem.missing() is None:
        pytest.skip("there is a device")
    assert nvshmem.missing().startswith(("the package nvshmem4py-cu13", "there is no CUDA device"))
