"""Prompts computed in one process of an NVSHMEM job, answers generated in another, on one GPU."""

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest
from child_path import python_path
from nvshmem_worker import SECRET

from pdmesh.kvtransfer import nvshmem
from pdmesh.wire.handoff import StreamItem
from pdmesh.wire.hashes import page_hashes, root_hash
from pdmesh.wire.messages import (
    Empty,
    FirstToken,
    Lease,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
    StreamRequest,
    WorkerStatus,
)
from pdmesh.wire.rpc import Client
from pdmesh.wire.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
COUNT = 100


@contextmanager
def workers(folder):
    environment = {
        **os.environ,
        "PYTHONPATH": python_path("tests"),
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_SYMMETRIC_SIZE": str(1 << 29),
    }
    job_id = nvshmem.new_job_id().hex()
    ready = [folder / f"ready-{rank}" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "tests" / "nvshmem_worker.py"),
             str(rank), "2", job_id, str(ready[rank])],
            env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not all(path.exists() and path.read_text() for path in ready):
            assert all(process.poll() is None for process in processes), "a worker ended"
            assert time.monotonic() < deadline, "the workers did not start"
            time.sleep(0.1)
        yield [path.read_text() for path in ready]
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def answer(prefill, decode, fmt, prompt, tenant, transport, sampling):
    """Tokens and log-probabilities of an answer whose pages go over ``transport``."""
    root = root_hash(SECRET, fmt.fingerprint(), tenant)
    hashes = tuple(page_hashes(SECRET, root, prompt, fmt.page_size))
    shared = {"request_id": tenant, "attempt": 1, "tenant": tenant}
    reserve = ReserveRequest(
        num_prompt_tokens=len(prompt), hashes=hashes, max_tokens=sampling.max_tokens,
        deadline_ms=60_000, **shared,
    )  # fmt: skip
    lease = await decode.unary("Reserve", reserve, Lease, timeout=30)
    only = tuple(pair for pair in lease.transports if pair[0] == transport)
    assert only, f"{transport} is not offered"
    lease = msgspec.structs.replace(lease, transports=only)
    compute = PrefillRequest(
        token_ids=prompt, sampling=sampling, lease=lease, deadline_ms=60_000, **shared
    )
    first = await prefill.unary("Prefill", compute, FirstToken, timeout=30)
    stream = StreamRequest(
        lease_id=lease.lease_id, generation=lease.generation, token_ids=prompt,
        first_token=first.token_ids[0], sampling=sampling, **shared,
    )  # fmt: skip
    tokens, logprobs = list(first.token_ids), list(first.logprobs)
    items = decode.stream("Stream", stream, cast(type[StreamItem], StreamItem), timeout=30)
    async for chunk in items:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
    release = ReleaseRequest(lease_id=lease.lease_id, reason="finished")
    await decode.unary("Release", release, Empty, timeout=30)
    return tokens, logprobs


async def compare(addresses):
    prefill, decode = Client(addresses[0], "prefill"), Client(addresses[1], "decode")
    rng = random.Random(0)
    status = await decode.unary("Status", Empty(), WorkerStatus, timeout=30)
    fmt = status.page_format
    for number in range(COUNT):
        prompt = tuple(rng.randrange(3, 4000) for _ in range(rng.choice((5, 63, 64, 65, 200))))
        sampling = SamplingParams(
            max_tokens=6, temperature=rng.choice((0.0, 1.0)), seed=number, ignore_eos=True,
            logprobs=2,
        )  # fmt: skip
        both = [
            await answer(prefill, decode, fmt, prompt, f"{number}-{name}", name, sampling)
            for name in ("nvshmem", "tcp")
        ]
        assert both[0] == both[1], f"hand-off {number}"
        assert len(both[0][0]) == 6
    for client in (prefill, decode):
        status = await client.unary("Status", Empty(), WorkerStatus, timeout=30)
        assert status.problems == ()
        assert (status.pool.used, status.pool.reserved, status.pool.quarantined) == (0, 0, 0)
        await client.close()


@pytest.mark.gpu
@pytest.mark.skipif(nvshmem.missing() is not None, reason=str(nvshmem.missing()))
def test_answers_are_the_same_to_the_last_bit_over_nvshmem_and_over_tcp(tmp_path):
    with workers(tmp_path) as addresses:
        asyncio.run(compare(addresses))
