"""Pages that workers are about to own: what a router expects of those that it has just chosen."""

import asyncio
import random
import secrets
from contextlib import AsyncExitStack

import pytest
import router_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rig import until
from test_router_view import PAGES, PROMPT, registry_of

from pdmesh.registry.client import RegistryView
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.publisher import WorkerLease
from pdmesh.router.clients import WorkerClients
from pdmesh.router.expected import GRACE_S, MOST_S, Expectations, under_way_s
from pdmesh.router.metrics import Metrics
from pdmesh.router.policies import make_policy
from pdmesh.router.policy import RequestFacts, Route, Score
from pdmesh.router.prompt import PromptHashes
from pdmesh.router.view import MeshView
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import InternalError
from pdmesh.wire.hashes import placed
from pdmesh.wire.messages import PrefillRequest

FACTS = RequestFacts(num_prompt_tokens=5 * 64 + 1, max_tokens=8)


def chain(*path):
    return [bytes(path[: i + 1]) for i in range(len(path))]


# ---- the expectations -------------------------------------------------------------------------

CHAINS = [chain(0, 0, 0, 0), chain(0, 0, 1), chain(0, 2), chain(1, 1, 1)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["expect", "expect", "expect", "end", "later", "wait", "prune"]),
        st.integers(0, 4),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_any_expectations_match_as_a_list_of_them_would(steps):
    expectations, model, now = Expectations(), [], 0.0
    for kind, number, which, seconds in steps:
        instance, pages = f"i{number}", CHAINS[which]
        if kind == "expect":
            handle = expectations.expect(instance, pages, now + seconds)
            model.append([handle, instance, pages, now + seconds])
        elif kind == "end" and model:
            expectations.end(model.pop(number % len(model))[0])
        elif kind == "later" and model:
            chosen = model[number % len(model)]
            chosen[3] = now + seconds
            expectations.ends_at(chosen[0], chosen[3])
        elif kind == "wait":
            now += seconds / 2
        elif kind == "prune":
            expectations.prune({"i0", "i1"})
        model = [entry for entry in model if entry[3] > now]
        for pages in CHAINS:
            wanted = {}
            for _, instance, others, _ in model:
                same = [a == b for a, b in zip(pages, others, strict=False)]
                if depth := [*same, False].index(False):
                    wanted[instance] = max(wanted.get(instance, 0), depth)
            assert expectations.match(pages, now) == wanted
        assert len(expectations) == len(model)


def test_an_expectation_that_is_ended_twice_takes_no_other_one_along():
    expectations = Expectations()
    first, _ = (expectations.expect("a", CHAINS[0], 9.0) for _ in range(2))
    for _ in range(2):
        expectations.end(first)
    assert expectations.match(CHAINS[0], 0.0) == {"a": 4}
    expectations.ends_at(first, 20.0)
    assert expectations.match(CHAINS[0], 9.0) == {}


def test_instances_that_come_and_go_leave_nothing_behind():
    expectations = Expectations()
    for number in range(200):
        expectations.expect(f"i{number}", CHAINS[0], float(number + 1))
        expectations.match(CHAINS[0], float(number))
        expectations.prune(())
    assert len(expectations._slots) <= 2
    assert expectations._index._next_bit <= 3
    assert len(expectations._index._fenced) <= 3


# ---- in the view of a router ------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def view_of(registry):
    clock = Clock()
    return MeshView(registry, WorkerClients(), "tiny", Metrics(), clock=clock), clock


def chosen(view, prompt=PROMPT, policy="priced"):
    snapshot = view.snapshot(prompt)
    return make_policy(policy).choose(FACTS, snapshot, random.Random(0), 0.0)


def expected_of(view, prompt=PROMPT):
    snapshot = view.snapshot(prompt)
    seen = [*snapshot.prefill, *snapshot.decode]
    return {c.record.worker_id: c.expected_pages for c in seen if c.expected_pages}


@pytest.mark.parametrize("policy", ["priced", "tokens"])
def test_prefill_is_about_to_own_a_prompt_from_the_choice_on_and_decode_from_the_hand_over(policy):
    view, clock = view_of(registry_of())
    route = chosen(view, policy=policy)
    prefill, decode = route.prefill.worker_id, route.decode.worker_id
    with view.book(route, PROMPT) as booking:
        assert expected_of(view) == {prefill: 5}
        begun = PromptHashes(b"k" * 32, "", (*range(3 * 64), *[7] * 128))
        assert expected_of(view, begun) == {prefill: 3}
        assert expected_of(view, PromptHashes(b"k" * 32, "another", tuple(range(321)))) == {}
        booking.prefilled()
        assert expected_of(view) == {prefill: 5, decode: 5}
        clock.now += GRACE_S - 0.01
        assert expected_of(view) == {prefill: 5, decode: 5}
        clock.now += 0.01
        assert expected_of(view) == {}


@pytest.mark.parametrize("error", [InternalError("no"), asyncio.CancelledError()])
@pytest.mark.parametrize("computed", [False, True])
def test_what_a_failed_attempt_was_to_bring_is_expected_no_longer(error, computed):
    view, _ = view_of(registry_of())
    route = chosen(view)

    def attempt():
        with view.book(route, PROMPT) as booking:
            if computed:
                booking.prefilled()
            raise error

    with pytest.raises(type(error)):
        attempt()
    left = {route.prefill.worker_id: 5} if computed else {}
    assert expected_of(view) == left, "a prompt that was computed is there, whatever failed then"


def test_a_prompt_under_way_for_too_long_is_given_up():
    view, clock = view_of(registry_of())
    route = chosen(view)
    with view.book(route, PROMPT):
        clock.now += under_way_s(route)
        assert expected_of(view) == {}


def test_the_time_that_a_prompt_may_take_follows_from_what_it_should_take():
    def seconds(**terms):
        record = registry_of().records[0]
        seen = view_of(registry_of())[0].snapshot(PROMPT).prefill[0]
        score = Score(seen, 0, 0.0, terms)
        return under_way_s(Route(record, record, 1, [], chosen=(score, score)))

    assert seconds(queue=500.0, compute=500.0, others=1e9) == GRACE_S + 3
    assert seconds(queue=1e9, compute=1.0) == MOST_S
    assert GRACE_S < seconds() < MOST_S


def test_pages_that_a_worker_owns_already_are_not_expected_of_it():
    registry = registry_of(prefill=1, decode=1)
    for record in registry.records:
        registry.owned[record.worker_id] = set(PAGES)
    view, _ = view_of(registry)
    with view.book(chosen(view), PROMPT) as booking:
        booking.prefilled()
        assert expected_of(view) == {}


def test_nobody_is_named_as_a_source_of_pages_that_it_is_only_about_to_own():
    registry = registry_of(prefill=2, decode=2)
    view, _ = view_of(registry)
    route = chosen(view)
    other = next(r for r in registry.records if r.role == "prefill" and r != route.prefill)
    with view.book(route, PROMPT) as booking:
        booking.prefilled()
        assert expected_of(view)
        assert view.sources(PROMPT, other) == ()
        registry.owned[route.prefill.worker_id] = set(PAGES[:2])
        (source,) = view.sources(PROMPT, other)
        assert (source.instance, source.pages) == (route.prefill.instance, 2)


def test_another_process_under_the_name_of_a_worker_is_about_to_own_nothing():
    registry = registry_of(prefill=1)
    view, _ = view_of(registry)
    with view.book(chosen(view), PROMPT):
        assert expected_of(view) == {"prefill-0": 5}
        registry.records[0] = fakes.FakePrefill("prefill-0", "prefill").record()
        assert expected_of(view) == {}
    assert expected_of(view_of(registry)[0]) == {}, "nor does a router know that just began"


# ---- whatever happens to the index that it knows owners from ----------------------------------


@pytest.fixture(scope="module")
def server():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


async def test_what_is_expected_outlives_the_index_and_ends_with_the_process(server):
    """A partition read afresh, a worker fenced, a router and a worker started again."""
    name = secrets.token_hex(4)
    records = registry_of(prefill=2, decode=1).records
    leases = [WorkerLease(server.url, name, record) for record in records]
    async with AsyncExitStack() as stack:
        for lease in leases:
            stack.push_async_callback(lease.close)
            await lease.start()
            await lease.ready()
        registry = RegistryView(server.url, name)
        stack.push_async_callback(registry.close)
        await registry.start()
        await until(lambda: len(registry.workers()) == 3 and registry.warm, "all are known")
        view, _ = view_of(registry)
        route = chosen(view)
        first = route.prefill.worker_id
        lease = next(one for one in leases if one.record == route.prefill)

        def registered_again(epoch):
            return any(o == (first, epoch) for o in registry._state.owners().values())

        with view.book(route, PROMPT):
            assert expected_of(view) == {first: 5}

            registry._pages.forget()
            await until(lambda: registry.warm, "the partitions are read afresh")
            assert expected_of(view) == {first: 5}

            lease.publish(placed(PAGES[:2]))
            await until(lambda: registry.owned_prefix(first, PAGES) == 2, "it says what it owns")
            before = lease.epoch
            lease._doubt = "tried out"
            lease._wake.set()
            await until(lambda: lease.epoch > before, "it registers again")
            await until(lambda: registered_again(lease.epoch), "the router knows")
            await until(lambda: registry.owned_prefix(first, PAGES) == 0, "it owned no snapshot")
            assert expected_of(view) == {first: 5}

            other, _ = view_of(registry)
            assert expected_of(other) == {}, "a router that has just begun"

            await lease.stop()
            reborn = fakes.FakePrefill(first, "prefill").record()
            again = WorkerLease(server.url, name, reborn)
            stack.push_async_callback(again.close)
            await again.start()
            await again.ready()
            await until(lambda: reborn in registry.workers(), "another process under its name")
            assert expected_of(view) == {}
            again.publish(placed(PAGES))
            await until(lambda: registry.owned_prefix(first, PAGES) == 5, "it owns them")
        assert chosen(view).prefill == reborn


# ---- bursts, through a whole router: llm-d/llm-d-router#1726 ----------------------------------


def request(tokens, **sampling):
    fields = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True} | sampling
    return chat_pb2.ChatRequest(prompt_token_ids=tokens, sampling=chat_pb2.Sampling(**fields))


def prompt(shared, own, number):
    """Tokens of a prompt whose beginning is the same for all numbers."""
    return [*range(100, 100 + shared), *(1000 + (7 * number + i) % 2000 for i in range(own))]


async def burst(mesh, prompts):
    """Sends prompts at once while no prefill worker gets on; how many went to each of them."""
    for worker in mesh.prefill:
        worker.wait_in("Prefill")
    asked = [asyncio.ensure_future(mesh.chat(request(p), timeout=60)) for p in prompts]
    async with asyncio.timeout(60):
        while sum(counts := [len(w.seen(PrefillRequest)) for w in mesh.prefill]) < len(prompts):
            for task in asked:
                assert not task.done() or not task.exception()
            await asyncio.sleep(0.005)
    for worker in mesh.prefill:
        worker.hold["Prefill"].set()
    await asyncio.gather(*asked)
    return counts


async def test_a_burst_of_equal_cold_prompts_is_computed_where_the_first_one_went(tmp_path):
    """No event can have come from there."""
    async with fakes.mesh(tmp_path, prefill=2) as mesh:
        counts = await burst(mesh, [prompt(1026, 0, 0)] * 16)
        assert sorted(counts) == [0, 16]
        sources = [r.sources for w in mesh.workers for r in w.requests if hasattr(r, "sources")]
        assert len(sources) == 32
        assert set(sources) == {()}
        await mesh.at_rest()


async def test_a_burst_whose_own_parts_are_long_is_shared_by_the_workers(tmp_path):
    async with fakes.mesh(tmp_path, prefill=2) as mesh:
        counts = await burst(mesh, [prompt(128, 640, n) for n in range(16)])
        assert min(counts) >= 6
        await mesh.at_rest()


async def test_unrelated_prompts_of_a_burst_are_shared_evenly_however_old_the_reports(tmp_path):
    async with fakes.mesh(tmp_path, prefill=4, poll_interval=5.0) as mesh:
        counts = await burst(mesh, [prompt(0, 640, 50 * n) for n in range(16)])
        assert counts == [4] * 4
        await mesh.at_rest()


@pytest.mark.parametrize("how", ["fails", "client leaves"])
async def test_a_prompt_that_came_to_nothing_attracts_nobody(tmp_path, how):
    """What follows goes anywhere, not after it."""
    tokens = prompt(1026, 0, 0)
    hashes = PromptHashes(b"k" * 32, "", tuple(tokens))
    async with fakes.mesh(tmp_path, prefill=2, max_attempts=1) as mesh:
        view = mesh.router.view
        for worker in mesh.prefill:
            worker.wait_in("Prefill")
        call = mesh.stub.StreamChat(request(tokens), timeout=60)
        reading = asyncio.ensure_future(call.read())
        async with asyncio.timeout(60):
            while not any(w.seen(PrefillRequest) for w in mesh.prefill):
                await asyncio.sleep(0.005)
        assert len(expected_of(view, hashes)) == 1
        if how == "fails":
            for worker in mesh.prefill:
                await worker.die()
        else:
            call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(60):
            while expected_of(view, hashes) or len(view._expected):
                await asyncio.sleep(0.005)
        await mesh.at_rest()
