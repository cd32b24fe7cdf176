"""What the policy is shown of the mesh."""

import asyncio
import random
from contextlib import suppress

from msgspec.structs import replace
from router_fakes import FORMAT, FakeDecode, FakePrefill, FakeRegistry

from pdmesh.router.clients import WorkerClients
from pdmesh.router.metrics import Metrics
from pdmesh.router.policy import Candidate
from pdmesh.router.polled import Polled
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.view import MeshView
from pdmesh.wire.messages import PoolStatus, WorkerStatus

PROMPT = PromptHashes(b"k" * 32, "", tuple(range(5 * 64 + 1)))
PAGES = PROMPT.for_format(FORMAT)


def view_of(registry):
    return MeshView(registry, WorkerClients(), "tiny", Metrics())


def registry_of(prefill=3, decode=3):
    registry = FakeRegistry()
    registry.records += [FakePrefill(f"prefill-{i}", "prefill").record() for i in range(prefill)]
    registry.records += [FakeDecode(f"decode-{i}", "decode").record() for i in range(decode)]
    return registry


def status_of(record, rng):
    free, cached = rng.randint(0, 9), rng.randint(0, 9)
    return WorkerStatus(
        worker_id=record.worker_id,
        instance=record.instance,
        role=record.role,
        state="ready",
        page_format=record.page_format,
        pool=PoolStatus(
            total=free + cached, free=free, reserved=0, used=0, cached=cached, quarantined=0
        ),
        queued=rng.randint(0, 5),
        running=rng.randint(0, 5),
        leases=rng.randint(0, 12),
    )


def test_a_snapshot_shows_each_change_as_soon_as_it_is_known():
    """Against a plain account of the same changes, in any order."""
    for seed in range(40):
        rng = random.Random(seed)
        registry = registry_of()
        view = view_of(registry)
        requests, tokens, polls = {}, {}, {}
        for _ in range(60):
            record = rng.choice(registry.records)
            name = record.instance
            match rng.randrange(5):
                case 0:
                    view.add(
                        name, record.role, more := rng.randint(-1, 3), left := rng.randint(0, 9)
                    )
                    requests[name] = requests.get(name, 0) + more
                    tokens[name] = tokens.get(name, 0) + left
                case 1:
                    polls[name] = Polled(status_of(record, rng), rng.randint(0, 3))
                    view.note_poll(name, polls[name])
                case 2:
                    registry.owned[record.worker_id] = set(PAGES[: rng.randint(0, 5)])
                case 3:  # told anew, with another pool
                    place = registry.records.index(record)
                    registry.records[place] = replace(record, capacity_pages=rng.randint(9, 99))
                case 4:  # another process
                    place = registry.records.index(record)
                    kind = FakePrefill if record.role == "prefill" else FakeDecode
                    registry.records[place] = kind(record.worker_id, record.role).record()
            snapshot = view.snapshot(PROMPT)
            assert snapshot.anchor == PAGES[0]
            shown = [*snapshot.prefill, *snapshot.decode]
            assert [c.record for c in shown] == registry.records
            for candidate in shown:
                assert candidate == expected(candidate.record, registry, requests, tokens, polls)


def expected(record, registry, requests, tokens, polls):
    polled, name = polls.get(record.instance), record.instance
    others, free, empty = 0, None, None
    if polled is not None:
        status = polled.status
        there = max(status.queued + status.running, status.leases)
        others = max(0, there - polled.own_requests)
        free, empty = status.pool.free + status.pool.cached, status.pool.free
    return Candidate(
        record=record,
        owned_pages=len(registry.owned.get(record.worker_id, ())),
        own_requests=requests.get(name, 0),
        own_tokens=tokens.get(name, 0),
        other_requests=others,
        free_pages=free,
        empty_pages=empty,
    )


def test_only_workers_that_hold_more_than_the_chosen_one_are_named_as_sources():
    registry = registry_of(prefill=2, decode=3)
    view = view_of(registry)
    for name, pages in (("prefill-0", 2), ("prefill-1", 5), ("decode-0", 2), ("decode-1", 3)):
        registry.owned[name] = set(PAGES[:pages])
    records = {record.worker_id: record for record in registry.records}
    chosen, besides = records["prefill-0"], [records["decode-1"]]
    assert [s.address for s in view.sources(PROMPT, chosen)] == ["", ""]
    assert [s.pages for s in view.sources(PROMPT, chosen)] == [5, 3]
    (source,) = view.sources(PROMPT, chosen, besides)
    assert source.instance == records["prefill-1"].instance
    assert view.sources(PROMPT, records["prefill-1"]) == ()
    assert len(view.sources(PROMPT, records["decode-2"])) == 3, "three are enough"


async def test_polling_ends_though_a_round_takes_no_notice_of_that_at_first():
    view, begun = view_of(registry_of()), asyncio.Event()

    async def changed():
        if not begun.is_set():
            begun.set()
            with suppress(asyncio.CancelledError):  # as a wait of Python 3.11 may, once
                await asyncio.Event().wait()

    await view.start(0.001, changed)
    await begun.wait()
    await asyncio.wait_for(view.close(), 60)
    assert not view._polling
