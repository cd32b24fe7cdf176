"""What a worker tells Prometheus."""

import asyncio
import logging
import socket
import threading
from pathlib import Path
from urllib.error import URLError

import meshes
import msgspec
import pytest
from model_cases import tiny_model

from pdmesh.decode.facts import DecodeStepFacts
from pdmesh.decode.metrics import DecodeMetrics
from pdmesh.model import rows_check
from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.prefill.metrics import PrefillMetrics
from pdmesh.registry.metrics import WorkerMetrics, metrics_endpoint, on_loop
from pdmesh.registry.transfer_metrics import TransferMetrics
from pdmesh.router.metrics import Metrics
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import FirstToken, Lease, PoolStatus, ReserveRequest, WorkerStatus

DOCS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
FORMAT = PageFormat("tiny", "w", "float32", 16, 7, 1, 576)
STATUS = WorkerStatus(
    worker_id="w-0",
    instance="i",
    role="decode",
    state="ready",
    page_format=FORMAT,
    pool=PoolStatus(total=100, free=40, reserved=10, used=20, cached=25, quarantined=5),
    queued=3,
    running=4,
    leases=9,
    tokens_computed=500,
    tokens_generated=77,
    cancelled=2,
    preempted=6,
    parked=1,
    drafted=8,
    accepted=5,
    moved_in=4,
    moved_out=3,
)


def decode(status: WorkerStatus = STATUS) -> DecodeMetrics:
    return DecodeMetrics(FORMAT, "w-0", lambda: status, lambda: 4096)


def prefill() -> PrefillMetrics:
    return PrefillMetrics(FORMAT, "w-0", lambda: msgspec.structs.replace(STATUS, role="prefill"))


STATES = ("free", "reserved", "used", "cached", "quarantined")
BOTH = {
    "pdmesh_num_requests_running": 4,
    "pdmesh_num_requests_waiting": 3,
    "pdmesh_kv_cache_usage_perc": 0.35,
    "pdmesh_num_leases": 9,
    "pdmesh_requests_cancelled_total": 2,
}


@pytest.mark.parametrize("make", [decode, prefill])
def test_the_status_is_told_under_the_names_that_others_use(make):
    metrics = make()
    assert {name: metrics.value(name) for name in BOTH} == pytest.approx(BOTH)
    states = {name: metrics.value("pdmesh_kv_cache_pages", state=name) for name in STATES}
    assert states == {"free": 40, "reserved": 10, "used": 20, "cached": 25, "quarantined": 5}


def test_a_decode_worker_tells_of_tokens_drafts_and_preemptions():
    metrics = decode()
    want = {
        "pdmesh_generation_tokens_total": 77,
        "pdmesh_num_preemptions_total": 6,
        "pdmesh_num_requests_parked": 1,
        "pdmesh_parked_bytes": 4096,
        "pdmesh_spec_decode_num_draft_tokens_total": 8,
        "pdmesh_spec_decode_num_accepted_tokens_total": 5,
        "pdmesh_answers_moved_in_total": 4,
        "pdmesh_answers_moved_out_total": 3,
    }
    assert {name: metrics.value(name) for name in want} == want
    assert metrics.value("pdmesh_prompt_tokens_computed_total") is None


def test_a_gauge_is_read_when_it_is_asked_for():
    now = [STATUS]
    metrics = DecodeMetrics(FORMAT, "w-0", lambda: now[0], lambda: 0)
    assert metrics.value("pdmesh_num_requests_running") == 4
    now[0] = msgspec.structs.replace(STATUS, running=1)
    assert metrics.value("pdmesh_num_requests_running") == 1


def test_a_step_of_decode_is_observed():
    metrics = decode()
    for duration, model in ((0.25, 0.2), (0.5, 0.5)):
        metrics.observe(
            DecodeStepFacts(
                duration_s=duration,
                model_s=model,
                num_sequences=3,
                num_tokens=5,
                drafted=3,
                accepted=2,
                pages_used=7,
            )
        )
    assert metrics.value("pdmesh_step_duration_seconds_sum") == pytest.approx(0.75)
    assert metrics.value("pdmesh_engine_overhead_seconds_sum") == pytest.approx(0.05)
    assert metrics.value("pdmesh_step_batch_size_sum") == 6
    assert metrics.value("pdmesh_step_batch_size_bucket", le="2.0") == 0
    assert metrics.value("pdmesh_step_batch_size_bucket", le="4.0") == 2


def test_how_long_an_answer_stood_still_is_observed():
    metrics = decode()
    metrics.moved_out(0.25)
    assert metrics.value("pdmesh_migration_frozen_seconds_sum") == 0.25


def test_a_reservation_counts_what_decode_had_cached_of_the_prompt():
    metrics = decode()
    request = ReserveRequest(
        request_id="r", attempt=1, num_prompt_tokens=40, hashes=(), max_tokens=1, deadline_ms=1
    )
    for cached in (1, 3):  # the third page is partial: 40 tokens, not 48
        lease = Lease(
            lease_id="l",
            generation=1,
            instance="i",
            cached_pages=cached,
            num_pages=3,
            transports=(),
            page_format=FORMAT,
        )
        metrics.reserved(request, lease, 0.5)
    assert metrics.value("pdmesh_prefix_cache_queries_total") == 80
    assert metrics.value("pdmesh_prefix_cache_hits_total") == 16 + 40
    assert metrics.value("pdmesh_request_queue_time_seconds_sum") == 1.0


def test_a_step_of_prefill_is_observed():
    metrics = prefill()
    metrics.observe(PrefillStepFacts(0.5, 2, 100, 64, queue_s=(0.25, 0.5), failed_prompts=1))
    assert metrics.value("pdmesh_step_duration_seconds_sum") == 0.5
    assert metrics.value("pdmesh_step_batch_size_sum") == 2
    assert metrics.value("pdmesh_step_tokens_sum") == 100
    assert metrics.value("pdmesh_request_queue_time_seconds_count") == 2
    assert metrics.value("pdmesh_request_queue_time_seconds_sum") == 0.75
    assert metrics.value("pdmesh_failed_prompts_total") == 1
    assert metrics.value("pdmesh_prompt_tokens_computed_total") == 500


def test_a_prompt_counts_its_tokens_its_prefix_hit_and_its_pages():
    metrics = prefill()
    first = FirstToken(
        token_ids=(1,), cached_tokens=32, computed_tokens=8, pushed_pages=2, compute_ms=250.0
    )
    metrics.computed(first)
    want = {
        "pdmesh_prompt_tokens_total": 40,
        "pdmesh_prefix_cache_queries_total": 40,
        "pdmesh_prefix_cache_hits_total": 32,
        "pdmesh_kv_transfer_pages_total": 2,
        "pdmesh_kv_transfer_bytes_total": 2 * 7 * 16 * 576 * 4,
        "pdmesh_request_prefill_time_seconds_sum": 0.25,
    }
    assert {name: metrics.value(name) for name in want} == want


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def test_the_endpoint_answers_from_the_workers_loop_and_is_gone_afterwards():
    threads = []

    def facts() -> WorkerStatus:
        threads.append(threading.get_ident())
        return STATUS

    metrics = DecodeMetrics(FORMAT, "w-0", on_loop(asyncio.get_running_loop(), facts), lambda: 0)
    port = free_port()
    async with metrics_endpoint(metrics.registry, "127.0.0.1", port):
        values = await asyncio.to_thread(meshes.scrape, f"127.0.0.1:{port}")
        assert values["pdmesh_num_requests_running"] == 4
        assert threads == [threading.get_ident()]
    with pytest.raises(URLError):
        await asyncio.to_thread(meshes.scrape, f"127.0.0.1:{port}")


async def test_what_goes_wrong_with_the_facts_is_raised_where_they_are_asked_for():
    def facts() -> WorkerStatus:
        raise RuntimeError("no books")

    read = on_loop(asyncio.get_running_loop(), facts)
    with pytest.raises(RuntimeError, match="no books"):
        await asyncio.to_thread(read)


async def test_a_taken_port_is_one_sentence_and_port_0_is_no_endpoint():
    metrics = decode()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{port}: Addr"):
            async with metrics_endpoint(metrics.registry, "127.0.0.1", port):
                pass
    before = threading.active_count()
    async with metrics_endpoint(metrics.registry, "127.0.0.1", 0):
        assert threading.active_count() == before


@pytest.mark.parametrize("make", [decode, prefill, Metrics], ids=["decode", "prefill", "router"])
def test_every_metric_stands_in_the_documentation(make):
    text = DOCS.read_text()
    names = []
    metrics = make()
    if isinstance(metrics, WorkerMetrics):
        TransferMetrics(metrics)
    for family in metrics.registry.collect():
        names.append(family.name + "_total" * (family.type == "counter"))
    assert [name for name in names if f"`{name}" not in text] == []


def test_a_processor_on_which_rows_vary_is_named_once(monkeypatch, caplog):
    model = tiny_model(hidden_size=48)
    with caplog.at_level(logging.WARNING):
        assert rows_check.check_rows(model) == []
    assert not caplog.records
    tried = []

    def varying(shapes, dtype):
        tried.extend(shapes)
        return [shape for shape in shapes if shape[1] == 48]

    monkeypatch.setattr(rows_check, "varying_shapes", varying)
    with caplog.at_level(logging.WARNING):
        found = rows_check.check_rows(model)
    assert found
    assert len(tried) == len(set(tried))
    (record,) = caplog.records
    assert "rows vary on this processor" in record.getMessage()
    assert f"{found[0][0]}x48" in record.fields["shapes"]
