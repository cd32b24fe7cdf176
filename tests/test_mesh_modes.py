"""Modes of a whole mesh: exact arithmetic, small pages, several drafts, and the metrics of workers.

Real processes of ``pdmesh up``, with the shipped model and with a small random one.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import meshes
import pytest
import torch
from checkpoints import random_checkpoint
from child_path import python_path

from pdmesh.launch.status import collect
from pdmesh.launch.topology import shipped_model
from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.registry.store import read_members
from pdmesh.wire.errors import Incompatible
from pdmesh.wire.messages import (
    Empty,
    FirstToken,
    Lease,
    PrefillRequest,
    ReleaseRequest,
    ReserveRequest,
)
from pdmesh.wire.rpc import Client
from pdmesh.wire.sampling import SamplingParams

PAGE = 16
NEW_TOKENS = 12
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 2, 9 * PAGE - 1, 12 * PAGE)


def mode(drafts: str) -> str:
    """A topology with one decode worker; both workers ask for the same metrics port."""
    return (
        f"[model]\narithmetic = 'exact'\npage_size = {PAGE}\n"
        "[prefill]\npages = 512\nmetrics_port = 9200\n"
        f"[decode]\nworkers = 1\npages = 512\nmetrics_port = 9200\n{drafts}"
    )


def some_prompts(vocab: int) -> list[list[int]]:
    """Half random ids, where choices are close; half repeating ones, where drafts are right."""
    rng = random.Random(17)
    base = [rng.randrange(20, vocab) for _ in range(7)]
    return [
        [base[j % 7] if i % 2 else rng.randrange(20, vocab) for j in range(length)]
        for i, length in enumerate(LENGTHS)
    ]


@dataclass
class Served:
    """A running mesh, the model that it serves, and how many drafts a step makes at most."""

    mesh: meshes.Mesh
    model: DeepseekV3
    path: Path
    drafts: int


@pytest.fixture(scope="module", params=["shipped-3-drafts", "random-by-default"])
def served(request, tmp_path_factory):
    torch.set_num_threads(1)
    if request.param == "shipped-3-drafts":
        path, model, drafts = shipped_model(), load_model(shipped_model()), "draft_tokens = 3\n"
    else:
        path = tmp_path_factory.mktemp("random-model")
        model, drafts = random_checkpoint(path), ""
    with meshes.running_mesh("--model", str(path), topology=mode(drafts)) as mesh:
        mesh.workers = 2
        yield Served(mesh, model, path, 3 if drafts else 1)


async def test_exact_tokens_over_small_pages_equal_the_reference_cold_and_warm(served):
    mesh, model = served.mesh, served.model
    prompts = some_prompts(model.config.vocab_size)
    expected = [
        generate_reference(model, prompt, NEW_TOKENS, arithmetic="exact") for prompt in prompts
    ]
    async with meshes.chat_stub(mesh.address) as stub:
        for warm in (False, True):
            answers = await asyncio.gather(
                *(
                    meshes.ask(stub, prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
                    for prompt in prompts
                )
            )
            assert [answer.token_ids for answer in answers] == expected
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.usage.drafted_tokens > 0
                if warm:
                    assert answer.usage.cached_tokens >= (len(prompt) - 1) // PAGE * PAGE
    assert await mesh.problems() == []


async def test_an_answer_that_is_part_of_a_prompt_is_found_in_the_cache_and_changes_nothing(served):
    mesh, model = served.mesh, served.model
    prompt = list(range(40, 40 + 2 * PAGE + 3))
    whole = generate_reference(model, prompt, 3 * PAGE, arithmetic="exact")
    longer = [*prompt, *whole[: 2 * PAGE]]
    async with meshes.chat_stub(mesh.address) as stub:
        first = await meshes.ask(stub, prompt, max_tokens=2 * PAGE, ignore_eos=True)
        second = await meshes.ask(stub, longer, max_tokens=PAGE, ignore_eos=True)
    assert [*first.token_ids, *second.token_ids] == whole
    assert await mesh.problems() == []


async def scraped(mesh) -> tuple[dict[str, float], dict[str, float]]:
    """The samples of prefill and decode worker that have no labels but the worker's."""
    lines = await collect(mesh.info["redis_url"], mesh.info["name"])
    by_role = {line.role: await asyncio.to_thread(meshes.scrape, line.metrics) for line in lines}
    return by_role["prefill"], by_role["decode"]


async def test_the_metrics_of_the_workers_count_what_was_asked(served):
    mesh, model = served.mesh, served.model
    prompt = [(7 * i) % 400 + 20 for i in range(5 * PAGE + 4)]
    p0, d0 = await scraped(mesh)
    async with meshes.chat_stub(mesh.address) as stub:
        answers = [
            await meshes.ask(stub, prompt, max_tokens=NEW_TOKENS, ignore_eos=True, tenant="metrics")
            for _ in range(2)
        ]
    assert await mesh.problems() == []
    p1, d1 = await scraped(mesh)
    prefill = {name.removeprefix("pdmesh_"): p1[name] - p0[name] for name in p0}
    decode = {name.removeprefix("pdmesh_"): d1[name] - d0[name] for name in d0}
    assert (
        prefill["prompt_tokens_total"] == prefill["prefix_cache_queries_total"] == 2 * len(prompt)
    )
    assert prefill["prefix_cache_hits_total"] == 5 * PAGE
    assert prefill["kv_transfer_pages_total"] == 6 + 1
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    page_bytes = 4 * PAGE * width * (model.config.num_hidden_layers + 1)
    assert prefill["kv_transfer_bytes_total"] == 7 * page_bytes
    assert prefill["request_prefill_time_seconds_count"] == 2
    assert prefill["request_queue_time_seconds_count"] == 2
    assert prefill["step_duration_seconds_count"] == prefill["step_batch_size_count"] >= 2
    assert decode["generation_tokens_total"] == 2 * (NEW_TOKENS - 1)  # the first is prefill's
    assert decode["prefix_cache_hits_total"] == 5 * PAGE
    drafted = sum(answer.usage.drafted_tokens for answer in answers)
    assert decode["spec_decode_num_draft_tokens_total"] == drafted
    accepted = sum(answer.usage.accepted_tokens for answer in answers)
    assert decode["spec_decode_num_accepted_tokens_total"] == accepted
    steps = decode["step_duration_seconds_count"]
    assert steps == 2 * (NEW_TOKENS - 1) - accepted
    assert drafted <= served.drafts * steps
    assert drafted > (served.drafts - 1) * steps * 0.7
    assert 0 < decode["engine_overhead_seconds_sum"] < decode["step_duration_seconds_sum"]
    for now in (p1, d1):
        assert now["pdmesh_num_requests_running"] == now["pdmesh_num_requests_waiting"] == 0
        assert now["pdmesh_kv_cache_usage_perc"] == 0
        assert now["pdmesh_num_leases"] == 0


async def test_status_and_metrics_tell_the_same_while_an_answer_runs(served):
    mesh = served.mesh
    wanted, running = 1000, False
    async with meshes.chat_stub(mesh.address) as stub:
        while not running:  # an answer that is over by the time of the second look says nothing
            assert await mesh.problems() == []
            _, before = await scraped(mesh)
            asking = meshes.asking(stub, [50, 51, 52], max_tokens=wanted, ignore_eos=True)
            async with asking as (task, answer):
                await meshes.first_token(task, answer)
                _, decode = await scraped(mesh)
                while not (decode["pdmesh_num_requests_running"] or task.done()):
                    _, decode = await scraped(mesh)  # the first token is prefill's
                (status,) = [s for s in await mesh.statuses() if s.role == "decode"]
            told = status.tokens_generated - before["pdmesh_generation_tokens_total"]
            running = told < wanted - 1  # the first is not its own
    assert decode["pdmesh_num_requests_running"] == decode["pdmesh_num_leases"] == 1
    assert 0 < decode["pdmesh_kv_cache_usage_perc"] <= 1
    assert (status.running, status.leases, status.state) == (1, 1, "ready")
    assert status.tokens_generated >= decode["pdmesh_generation_tokens_total"]
    assert await mesh.problems() == []


STRAYS = {
    "stray-arithmetic": (
        ("--page-size", str(PAGE)),
        "arithmetic is 'exact' here and 'fast' there",
    ),
    "stray-page-size": (
        ("--arithmetic", "exact"),
        f"page_size is {PAGE} here and 64 there",
    ),
}
"""Decode workers that somebody starts by hand without one of the mesh's two settings."""


@contextmanager
def stray_workers(served: Served):
    """Starts the workers of ``STRAYS``; ends them."""
    mesh = served.mesh
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with ExitStack() as stack:
        for name, (flags, _) in STRAYS.items():
            command = (
                *(sys.executable, "-P", "-m", "pdmesh.launch.cli", "serve", "decode", "--id", name),
                *("--redis", mesh.info["redis_url"], "--mesh", mesh.info["name"], "--pages", "64"),
                *("--secret-file", str(mesh.state_dir / "secret.key"), "--threads", "1"),
                *("--model", str(served.path), "--model-name", mesh.info["model"], *flags),
            )
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 60)
            stack.callback(process.send_signal, signal.SIGTERM)
        yield


@asynccontextmanager
async def client_of(mesh, worker_id: str):
    """A client of a worker, once it is ready."""
    record = None
    async with asyncio.timeout(meshes.START_S):
        while record is None:
            for member in await read_members(mesh.info["redis_url"], mesh.info["name"]):
                if member.record.worker_id == worker_id and member.state == "ready":
                    record = member.record
            await asyncio.sleep(0.1)
    client = Client(record.address, record.role)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("served", ["random-by-default"], indirect=True)
async def test_workers_of_another_mode_refuse_each_other_by_name(served):
    mesh, prompt = served.mesh, (30, 31, 32, 33)
    with stray_workers(served):
        async with client_of(mesh, "prefill-0") as prefill:
            for name, (_, sentence) in STRAYS.items():
                async with client_of(mesh, name) as stray:
                    lease = await stray.unary("Reserve", reserve_request(prompt), Lease, timeout=30)
                    request = prefill_request(prompt, lease)
                    with pytest.raises(Incompatible, match="do not fit together") as raised:
                        await prefill.unary("Prefill", request, FirstToken, timeout=30)
                    assert sentence in str(raised.value)
                    release = ReleaseRequest(lease_id=lease.lease_id, reason="cancelled")
                    await stray.unary("Release", release, Empty, timeout=30)
        async with meshes.chat_stub(mesh.address) as stub:  # the router passes them over
            answer = await meshes.ask(stub, list(prompt), max_tokens=4, ignore_eos=True)
    assert answer.token_ids == generate_reference(served.model, prompt, 4, arithmetic="exact")
    assert await mesh.problems() == []


def reserve_request(prompt) -> ReserveRequest:
    return ReserveRequest(
        request_id="r",
        attempt=1,
        num_prompt_tokens=len(prompt),
        hashes=(),
        max_tokens=4,
        deadline_ms=30_000,
    )


def prefill_request(prompt, lease: Lease) -> PrefillRequest:
    return PrefillRequest(
        request_id="r",
        attempt=1,
        token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=4),
        lease=lease,
        deadline_ms=30_000,
    )
