"""The policies, on made-up snapshots: what must hold of each, and of the priced one."""

import random
from dataclasses import replace

import msgspec
import pytest
import router_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.router.expected import Expectations
from pdmesh.router.policies import POLICY_NAMES, Costs, make_policy
from pdmesh.router.policies.costs import Link
from pdmesh.router.policies.hot import HotPrefixes
from pdmesh.router.policies.pressure import Pressure, delay_price, waiting_share
from pdmesh.router.policy import Avoid, Candidate, RequestFacts, Snapshot
from pdmesh.wire.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from pdmesh.wire.messages import WorkerRecord

FACTS = RequestFacts(num_prompt_tokens=640, max_tokens=64)
AFFINE = sorted(set(POLICY_NAMES) - {"random", "round_robin", "least_load", "session_affinity"})
"""Policies that look at what is cached."""


def worker(name, role, host="127.0.0.1", capacity=1000, page_format=fakes.FORMAT, **seen):
    record = WorkerRecord(
        worker_id=name,
        instance=f"i-{name}",
        role=role,
        address=f"{host}:1",
        page_format=page_format,
        model="tiny",
        vocab_size=4096,
        max_context=4096,
        capacity_pages=capacity,
    )
    return Candidate(record, **seen)


def prefill(name, host="127.0.0.1", **seen):
    return worker(name, "prefill", host, **seen)


def decode(name, host="127.0.0.1", **seen):
    return worker(name, "decode", host, **seen)


def choose(policy, prefills, decodes=(), facts=FACTS, seed=0, now=0.0, anchor=b""):
    decodes = decodes or [decode("d")]
    snapshot = Snapshot(tuple(prefills), tuple(decodes), anchor)
    return policy.choose(facts, snapshot, random.Random(seed), now)


def priced(**costs):
    return make_policy("priced", Costs(**costs))


def names(route):
    return route.prefill.worker_id, route.decode.worker_id


# ---- every policy -------------------------------------------------------------------------


@pytest.fixture(params=POLICY_NAMES)
def policy(request):
    return make_policy(request.param)


def test_an_unknown_policy_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match="no policy 'best'; there are: tokens, priced, min_ttft"):
        make_policy("best")


def test_equal_workers_get_about_the_same(policy):
    rng = random.Random(5)
    counts = dict.fromkeys([f"p{i}" for i in range(4)], 0)
    others = dict.fromkeys([f"d{i}" for i in range(4)], 0)
    snapshots = [
        Snapshot(tuple(map(prefill, counts)), tuple(map(decode, others)), b"%d" % i)
        for i in range(400)
    ]
    for snapshot in snapshots:
        p, d = names(policy.choose(FACTS, snapshot, rng, 0.0))
        counts[p] += 1
        others[d] += 1
    assert min(*counts.values(), *others.values()) > 60


def test_the_same_calls_give_the_same_choices(policy):
    other = make_policy(next(n for n in POLICY_NAMES if type(make_policy(n)) is type(policy)))
    workers = [prefill(f"p{i}", owned_pages=i % 3) for i in range(5)]
    decodes = [decode(f"d{i}", own_requests=i % 2) for i in range(4)]
    for seed in range(40):
        one = choose(policy, workers, decodes, seed=seed, now=seed / 7)
        two = choose(other, workers, decodes, seed=seed, now=seed / 7)
        assert names(one) == names(two)
        assert one.explain() == two.explain()


def test_a_request_that_never_fits_is_refused_at_once(policy):
    with pytest.raises(InvalidRequest, match="fit the memory of no decode worker"):
        choose(policy, [prefill("p")], [decode("d", capacity=10)])
    with pytest.raises(InvalidRequest, match="fit the memory of no prefill worker"):
        choose(policy, [prefill("p", capacity=9)])
    assert names(choose(policy, [prefill("p", capacity=9), prefill("q", capacity=10)]))[0] == "q"


def test_a_lost_worker_is_never_chosen_whatever_it_owns(policy):
    facts = replace(FACTS, avoid=Avoid(lost=frozenset({"i-a", "i-x"})))
    prefills = [prefill("a", owned_pages=10), prefill("b", own_tokens=10**6)]
    decodes = [decode("x", owned_pages=10), decode("y", own_requests=99)]
    for seed in range(20):
        assert names(choose(policy, prefills, decodes, facts, seed)) == ("b", "y")
    with pytest.raises(Unavailable, match="no prefill worker is left to try: 1 failed"):
        choose(policy, prefills[:1], decodes, facts)


def test_a_suspect_is_the_last_resort(policy):
    facts = replace(FACTS, avoid=Avoid(suspect=frozenset({"i-a", "i-x"})))
    prefills = [prefill("a", owned_pages=10), prefill("b", own_tokens=10**5)]
    decodes = [decode("x", owned_pages=10), decode("y", own_requests=99)]
    for seed in range(20):
        assert names(choose(policy, prefills, decodes, facts, seed)) == ("b", "y")
    assert names(choose(policy, prefills[:1], decodes[:1], facts)) == ("a", "x")


def test_full_workers_are_reported_or_waited_at(policy):
    facts = replace(FACTS, avoid=Avoid(full=frozenset({"i-x"})))
    with pytest.raises(Overloaded, match="1 decode worker is full"):
        choose(policy, [prefill("p")], [decode("x")], facts)
    route = choose(policy, [prefill("p")], [decode("x")], replace(facts, may_wait=True))
    assert route.wait


def test_workers_of_different_page_formats_are_never_paired(policy):
    other = msgspec.structs.replace(fakes.FORMAT, weights="w1")
    old, new = prefill("old", owned_pages=10), prefill("new", page_format=other, own_tokens=9999)
    fits = decode("d", page_format=other)
    assert names(choose(policy, [old, new], [fits])) == ("new", "d")
    with pytest.raises(Unavailable, match="weights is 'w0' here and 'w1' there"):
        choose(policy, [old], [fits])


def test_a_decode_worker_without_room_is_the_last_resort(policy):
    decodes = [decode("full", owned_pages=9, free_pages=3), decode("d", own_requests=50)]
    assert names(choose(policy, [prefill("p")], decodes))[1] == "d"
    assert names(choose(policy, [prefill("p")], decodes[:1]))[1] == "full"


@pytest.mark.parametrize("name", AFFINE)
def test_the_longest_prefix_wins_among_equally_busy_workers(name):
    prefills = [prefill("p0"), prefill("p1", owned_pages=4), prefill("p2", owned_pages=7)]
    assert names(choose(make_policy(name), prefills))[0] == "p2"


SEEN = st.fixed_dictionaries(
    {
        "owned_pages": st.integers(0, 12),
        "own_requests": st.integers(0, 5),
        "own_tokens": st.integers(0, 3000),
        "other_requests": st.integers(0, 3),
        "free_pages": st.none() | st.integers(0, 1000),
        "empty_pages": st.none() | st.integers(0, 20),
    }
)
HOSTS = st.sampled_from(["a", "b", "c"])
MESH = st.tuples(
    st.lists(st.tuples(HOSTS, SEEN), min_size=1, max_size=5),
    st.lists(st.tuples(HOSTS, SEEN), min_size=1, max_size=5),
)
NEAR = {
    "same_host": Link(0.0, 0.02),
    "same_rack": Link(1.0, 0.1),
    "elsewhere": Link(5.0, 0.4),
    "racks": {"a": "r", "b": "r"},
}


def made(mesh):
    ps, ds = mesh
    prefills = [prefill(f"p{i}", host, **seen) for i, (host, seen) in enumerate(ps)]
    return prefills, [decode(f"d{i}", host, **seen) for i, (host, seen) in enumerate(ds)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MESH, st.sampled_from(POLICY_NAMES), st.lists(st.integers(0, 12), min_size=10, max_size=10))
def test_an_index_that_is_wrong_changes_scores_and_never_what_may_be_chosen(mesh, name, lies):
    prefills, decodes = made(mesh)
    lost = frozenset({"i-p0", "i-d0"}) if min(len(prefills), len(decodes)) > 1 else frozenset()
    facts = replace(FACTS, avoid=Avoid(lost=lost))
    wrong = iter(lies)
    told = [[replace(c, owned_pages=next(wrong)) for c in cs] for cs in (prefills, decodes)]
    allowed = {c.record.instance for c in (*prefills, *decodes)} - lost
    for ps, ds in ((prefills, decodes), told):
        route = choose(make_policy(name), ps, ds, facts)
        assert {route.prefill.instance, route.decode.instance} <= allowed
        assert 1 <= route.tokens_to_compute <= FACTS.num_prompt_tokens


# ---- the priced one -----------------------------------------------------------------------


def pair_cost(policy, route_scores, prefills, decodes, p, d):
    """Cost of a pair from the single terms, the transfer over their own link."""
    costs = policy.costs
    terms = {score.candidate.record.worker_id: score for score in route_scores}
    a, b = terms[p.record.worker_id], terms[d.record.worker_id]
    link = costs.link(costs.place(p.record), costs.place(d.record))
    missing = FACTS.num_prompt_tokens - b.owned_tokens
    base = b.cost - b.terms["transfer"]
    return a.cost + base + link.hop_ms + link.token_ms * missing


@settings(max_examples=150, deadline=None, derandomize=True)
@given(MESH)
def test_the_pair_is_the_cheapest_of_all_pairs(mesh):
    prefills, decodes = made(mesh)
    policy = priced(**NEAR, pair_ms=0.001)
    route = choose(policy, prefills, decodes)
    costs = {
        (p.record.worker_id, d.record.worker_id): pair_cost(
            policy, route.scores, prefills, decodes, p, d
        )
        for p in prefills
        for d in decodes
    }
    assert costs[names(route)] <= min(costs.values()) + 0.01


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MESH, st.integers(1, 5000), st.integers(0, 20))
def test_more_load_never_makes_a_worker_more_attractive(mesh, tokens, seed):
    prefills, decodes = made(mesh)
    before = names(choose(priced(**NEAR), prefills, decodes, seed=seed))
    for i, c in enumerate(prefills):
        if c.record.worker_id != before[0]:
            busier = [*prefills]
            busier[i] = replace(c, own_tokens=c.own_tokens + tokens, own_requests=99)
            after = choose(priced(**NEAR), busier, decodes, seed=seed)
            assert after.prefill.worker_id != c.record.worker_id or len(busier) > 1
            assert score_of(after, c) >= score_of(choose(priced(**NEAR), prefills, decodes), c)
    for i, c in enumerate(decodes):
        busier = [*decodes]
        busier[i] = replace(c, own_requests=c.own_requests + tokens)
        after = choose(priced(**NEAR), prefills, busier, seed=seed)
        assert score_of(after, c) > score_of(choose(priced(**NEAR), prefills, decodes), c)


def score_of(route, candidate):
    return next(
        s.cost for s in route.scores if s.candidate.record.instance == candidate.record.instance
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MESH, st.integers(0, 11))
def test_more_cached_pages_never_make_a_worker_dearer(mesh, more):
    prefills, decodes = made(mesh)
    before = choose(priced(fetching=False), prefills, decodes)
    for i, c in enumerate(prefills):
        richer = [*prefills]
        richer[i] = replace(c, owned_pages=min(12, c.owned_pages + more))
        after = choose(priced(fetching=False), richer, decodes)
        assert score_of(after, c) <= score_of(before, c) + 1e-9


def test_a_choice_says_what_each_worker_would_have_cost_in_milliseconds():
    prefills = [prefill("p0", owned_pages=4, own_tokens=100), prefill("p1", empty_pages=0)]
    route = choose(priced(token_ms=2.0, fetching=False), prefills)
    terms = {s.candidate.record.worker_id: s.terms for s in route.scores}
    assert terms["p0"]["queue"] == 200
    assert terms["p0"]["compute"] == 2 * (640 - 256)
    assert terms["p1"]["copy"] == pytest.approx(0.3 * 2 * 256)
    assert terms["d"] == {"decode": 0, "transfer": pytest.approx(64.0), "suspect": 0}
    assert all(s.cost == pytest.approx(sum(s.terms.values())) for s in route.scores)
    assert "p1:cost=1689.6,owned=0,load=0,compute=1280.0,others=256.0,copy=153.6" in route.explain()
    assert [s.candidate.record.worker_id for s in route.scores[:2]] == ["p0", "p1"]


def test_prompts_cost_more_than_their_length_where_attention_is_dear():
    costs = Costs(token_ms=1.0, pair_ms=0.01, step_ms=5.0)
    assert costs.prefill_ms(100, 0) == 100 + 100 + 5
    assert costs.prefill_ms(100, 50) == 50 + 75 + 5


def test_a_queue_takes_as_long_as_its_prompts():
    """Also where a prompt takes its time and not its tokens."""
    costs = Costs(token_ms=0.0, pair_ms=0.01, step_ms=5.0)
    seen = prefill("p", own_tokens=400, own_requests=4, other_requests=2)
    assert costs.queue_ms(seen) == 4 * costs.prefill_ms(100, 0) + 2 * costs.prefill_ms(256, 0)
    assert costs.queue_ms(prefill("idle")) == 0
    busy = [prefill("p0", own_tokens=100, own_requests=1), prefill("p1")]
    assert names(choose(priced(token_ms=0.0, step_ms=5.0), busy))[0] == "p1"


def loaded(work_ms, **costs):
    """A policy that has sent work to two workers for a while."""
    policy = priced(**costs)
    for i in range(300):
        policy.pressure.note(work_ms, i / 10)
    return policy


def test_an_owner_keeps_its_prefix_longer_the_busier_the_pool_is():
    def waits(work_ms):
        """How much may wait at an owner before a request with its prefix goes elsewhere."""
        for waiting in range(0, 5000, 50):
            busy = prefill("owner", owned_pages=4, own_tokens=waiting)
            policy = loaded(work_ms, fetching=False)
            if names(choose(policy, [busy, prefill("idle")], now=30.0))[0] == "idle":
                return waiting
        raise AssertionError

    idle, busy = waits(5), waits(450)
    assert idle == pytest.approx(1.2 * 256, abs=60)
    assert busy > 1.4 * idle


def test_a_copy_costs_extra_only_where_it_evicts_something():
    owner = prefill("owner", owned_pages=4, own_tokens=330)
    for empty, expected in ((0, "owner"), (10, "other"), (None, "other")):
        other = prefill("other", empty_pages=empty)
        assert names(choose(priced(fetching=False), [owner, other]))[0] == expected


def test_a_prefix_that_many_ask_for_is_copied_by_a_request_that_passes():
    owner = prefill("owner", owned_pages=4, own_tokens=300)
    other = prefill("other", empty_pages=0)
    policy = priced(fetching=False, beta=0.0)
    assert names(choose(policy, [owner, other], anchor=b"hot"))[0] == "owner"
    for i in range(200):
        policy.hot.seen(b"hot", 400.0, i / 10)
    assert names(choose(policy, [owner, other], now=20.0, anchor=b"cold"))[0] == "owner"
    assert names(choose(policy, [owner, other], now=20.0, anchor=b"hot"))[0] == "other"


def test_a_long_prefix_is_fetched_over_a_fast_link_and_computed_again_over_a_slow_one():
    prefills = [prefill("owner", "a", owned_pages=9, own_tokens=2000), prefill("idle", "b")]
    fast = {"elsewhere": Link(1.0, 0.1), "same_host": Link(0.0, 0.0)}
    route = choose(priced(**fast), prefills)
    assert names(route)[0] == "idle"
    assert route.tokens_to_compute == 64
    slow = {"elsewhere": Link(1.0, 3.0), "same_rack": Link(1.0, 3.0)}
    route = choose(priced(**slow), prefills)
    assert names(route)[0] == "idle"
    assert route.tokens_to_compute == 640


def test_a_decode_worker_nearby_is_worth_a_little_load():
    decodes = [decode("near", "a", own_requests=1), decode("far", "z")]
    prefills = [prefill("p", "a")]
    costs = {"same_host": Link(0.0, 0.0), "sequence_ms": 50.0}
    assert names(choose(priced(**costs, elsewhere=Link(0.0, 0.1)), prefills, decodes))[1] == "near"
    assert names(choose(priced(**costs, elsewhere=Link(0.0, 0.01)), prefills, decodes))[1] == "far"


def test_each_decode_worker_is_shown_with_the_transfer_from_the_chosen_prefill_worker():
    links = (Link(0.0, 0.01), Link(0.0, 0.1), Link(0.0, 0.5))
    decodes = [decode("near", "a", own_requests=1), decode("far", "z")]
    route = choose(priced(pushes=links), [prefill("p", "a")], decodes)
    terms = {s.candidate.record.worker_id: s.terms for s in route.scores}
    assert terms["near"]["transfer"] == pytest.approx(6.4)
    assert terms["far"]["transfer"] == pytest.approx(320)
    assert names(route)[1] == "near"
    assert route.chosen[1].terms == terms["near"]
    assert len(route.scores[1:]) == 2


def test_context_costs_only_whom_it_is_shared_with():
    """Pages in use of a worker without requests are those of an old poll."""
    decodes = [decode("idle", free_pages=100), decode("busy", free_pages=990, own_requests=1)]
    route = choose(priced(context_ms=1.0, sequence_ms=1.0), [prefill("p")], decodes)
    terms = {s.candidate.record.worker_id: s.terms for s in route.scores}
    assert terms["idle"]["decode"] == 0
    assert terms["busy"]["decode"] == 1 + 10 * 64


def test_a_decode_worker_whose_latency_would_be_over_the_limit_is_avoided():
    costs = {"itl_base_ms": 5.0, "itl_sequence_ms": 1.0, "itl_slo_ms": 20.0, "sequence_ms": 0.1}
    decodes = [decode("busy", owned_pages=9, own_requests=40), decode("idle")]
    assert names(choose(priced(**costs), [prefill("p")], decodes))[1] == "idle"
    decodes = [decode("busy", owned_pages=9, own_requests=4), decode("idle")]
    assert names(choose(priced(**costs), [prefill("p")], decodes))[1] == "busy"


@pytest.mark.parametrize("fetching", [True, False])
def test_a_burst_over_a_cold_prefix_computes_it_a_few_times_and_no_worker_is_flooded(fetching):
    """llm-d/llm-d-router#1726: what was just sent somewhere counts, before any event comes."""
    prefix, tails = [bytes([i]) for i in range(64)], 100
    facts = RequestFacts(num_prompt_tokens=64 * 64 + tails, max_tokens=16)
    policy, rng, expected = priced(fetching=fetching), random.Random(3), Expectations()
    sent = dict.fromkeys((f"p{i}" for i in range(8)), 0)
    computed = 0
    for i in range(32):
        depths = expected.match(prefix, now=i / 3000)
        workers = tuple(
            prefill(name, expected_pages=depths.get(f"i-{name}", 0), own_tokens=tokens)
            for name, tokens in sent.items()
        )
        route = policy.choose(facts, Snapshot(workers, (decode("d"),), b"cold"), rng, i / 3000)
        computed += route.tokens_to_compute > tails
        sent[route.prefill.worker_id] += route.tokens_to_compute
        expected.expect(route.prefill.instance, prefix, until=2.0)
    assert computed <= 4
    assert max(sent.values()) < 2 * facts.num_prompt_tokens


def test_pages_that_a_worker_is_about_to_have_cannot_be_fetched_from_it():
    prefills = [prefill("p0", expected_pages=10, own_tokens=9000), prefill("p1")]
    route = choose(priced(), prefills)
    assert names(route)[0] == "p1"
    assert route.tokens_to_compute == FACTS.num_prompt_tokens
    prefills[0] = replace(prefills[0], owned_pages=10)
    assert choose(priced(), prefills).tokens_to_compute == 1


def test_unrelated_requests_of_a_burst_are_spread_although_no_report_came_between():
    policy, rng = priced(), random.Random(3)
    sent = {f"p{i}": 0 for i in range(8)}
    for i in range(32):
        workers = tuple(prefill(n, own_tokens=t, own_requests=t // 640) for n, t in sent.items())
        route = policy.choose(FACTS, Snapshot(workers, (decode("d"),)), rng, i / 3000)
        sent[route.prefill.worker_id] += route.tokens_to_compute
    assert set(sent.values()) == {4 * 640}


def test_one_busy_worker_does_not_switch_affinity_off_for_the_others():
    workers = [
        prefill("stuck", own_tokens=10**6),
        prefill("owner", owned_pages=8, own_tokens=200),
        *[prefill(f"p{i}") for i in range(6)],
    ]
    assert names(choose(priced(fetching=False), workers))[0] == "owner"


def test_a_miss_goes_to_the_least_loaded_worker_and_not_to_the_one_with_the_smallest_cache():
    workers = [prefill("empty", own_tokens=900, empty_pages=999), prefill("p", empty_pages=0)]
    assert names(choose(priced(), workers))[0] == "p"


# ---- the parts ----------------------------------------------------------------------------


def test_the_share_of_requests_that_wait_is_erlangs():
    assert waiting_share(1, 0.7) == pytest.approx(0.7)
    assert waiting_share(2, 0.5) == pytest.approx(1 / 3)
    assert waiting_share(10, 0.8) == pytest.approx(0.409, abs=1e-3)


def test_delay_in_a_pool_of_one_is_that_of_a_single_server():
    # M/M/1: load^2 / (1 - load) wait on average; the derivative at 0.5 is 3.
    assert delay_price(1, 100) == pytest.approx(3.0, abs=0.01)


def test_the_price_of_work_rises_with_load_and_falls_with_the_number_of_workers():
    def price(load, workers):
        pressure = Pressure(60.0)
        for i in range(4000):
            pressure.note(load * workers * 100, i / 10)
        return pressure.price(workers, 400.0)

    prices = [[price(load, n) for n in (1, 4, 16, 64)] for load in (0.1, 0.4, 0.7, 0.9)]
    assert all(row == sorted(row, reverse=True) for row in prices)
    assert all(list(column) == sorted(column) for column in zip(*prices, strict=True))
    assert prices[0][3] == pytest.approx(0.0, abs=1e-9)


def test_a_pool_of_one_costs_what_the_queue_of_a_single_server_does():
    pressure = Pressure(300.0)
    rng = random.Random(1)
    now = 0.0
    for _ in range(20000):
        now += rng.expovariate(1.0)
        pressure.note(1000 * rng.expovariate(2.0), now)
    assert pressure.load(1, now) == pytest.approx(0.5, abs=0.2)
    assert 1.0 < pressure.price(1, now) < 7.0


def test_a_load_that_ended_is_forgotten():
    pressure = Pressure(10.0)
    for i in range(100):
        pressure.note(900.0, float(i))
    assert pressure.load(1, 99.0) == pytest.approx(0.9, rel=0.1)
    assert pressure.load(1, 200.0) < 1e-3
    assert Pressure(10.0).price(4, 5.0) == pytest.approx(0.0, abs=1e-3)


def test_copies_of_a_hot_prefix_rise_at_once_and_fall_late():
    hot = HotPrefixes(horizon_s=10.0)
    assert hot.copies(b"x", 0.0) == 1
    for i in range(1000):
        hot.seen(b"x", 200.0, i / 10)  # 10 a second, 2 s of work a second
    assert hot.rate(b"x", 100.0) == pytest.approx(10, rel=0.05)
    assert hot.copies(b"x", 100.0) == 4
    assert hot.copies(b"x", 105.0) == 4
    assert hot.copies(b"x", 140.0) == 1


def test_the_coldest_prefixes_are_forgotten_first():
    hot = HotPrefixes(limit=10)
    for i in range(100):
        hot.seen(b"hot", 1.0, i / 10)
        hot.seen(b"%d" % i, 1.0, i / 10)
    assert len(hot) <= 10
    assert hot.rate(b"hot", 10.0) > hot.rate(b"99", 10.0)
