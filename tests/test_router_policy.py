"""The choice of workers: a pure function, checked on made-up snapshots."""

import random
from dataclasses import replace

import msgspec
import pytest
import router_fakes as fakes

from pdmesh.router.policy import Avoid, Candidate, RequestFacts, Snapshot, choose_route
from pdmesh.wire.errors import InvalidRequest, Overloaded, Unavailable
from pdmesh.wire.messages import WorkerRecord

FACTS = RequestFacts(num_prompt_tokens=640, max_tokens=64)


def worker(name, role, capacity=1000, page_format=fakes.FORMAT, **seen) -> Candidate:
    record = WorkerRecord(
        worker_id=name,
        instance=f"i-{name}",
        role=role,
        address="127.0.0.1:1",
        page_format=page_format,
        model="tiny",
        vocab_size=4096,
        max_context=4096,
        capacity_pages=capacity,
    )
    return Candidate(record, **seen)


def prefill(name, **seen):
    return worker(name, "prefill", **seen)


def decode(name, **seen):
    return worker(name, "decode", **seen)


def choose(prefills, decodes, facts=FACTS, seed=0):
    snapshot = Snapshot(tuple(prefills), tuple(decodes))
    route = choose_route(facts, snapshot, random.Random(seed))
    return route.prefill.worker_id, route.decode.worker_id


P, D = prefill("p"), decode("d")


def test_the_longest_owned_prefix_wins_among_equally_busy_workers():
    prefills = [prefill("p0"), prefill("p1", owned_pages=4), prefill("p2", owned_pages=7)]
    decodes = [decode("d0", owned_pages=2), decode("d1", owned_pages=3), decode("d2")]
    assert choose(prefills, decodes) == ("p2", "d1")


def test_an_owner_loses_once_it_is_busier_than_its_prefix_saves():
    for waiting, expected in ((4 * 64 - 1, "owner"), (4 * 64 + 1, "idle")):
        owner = prefill("owner", owned_pages=4, own_tokens=waiting, own_requests=1)
        assert choose([owner, prefill("idle")], [D])[0] == expected


def test_requests_of_other_routers_count_as_load():
    assert choose([prefill("busy", other_requests=1), prefill("idle")], [D])[0] == "idle"
    assert choose([P], [decode("busy", other_requests=2), decode("idle", own_requests=1)])[1] == (
        "idle"
    )


def test_ties_are_broken_by_the_random_generator_handed_in_and_reach_every_worker():
    prefills, decodes = [prefill(f"p{i}") for i in range(3)], [decode(f"d{i}") for i in range(3)]
    chosen = [choose(prefills, decodes, seed=seed) for seed in range(60)]
    assert {p for p, _ in chosen} == {"p0", "p1", "p2"}
    assert {d for _, d in chosen} == {"d0", "d1", "d2"}
    assert chosen == [choose(prefills, decodes, seed=seed) for seed in range(60)]


def test_a_decode_worker_without_room_is_the_last_resort():
    full = decode("full", owned_pages=9, free_pages=3)
    assert choose([P], [full, decode("roomy", own_requests=50, free_pages=500)])[1] == "roomy"
    assert choose([P], [full])[1] == "full"


def test_a_whole_cached_prompt_still_computes_its_last_position():
    snapshot = Snapshot((prefill("p", owned_pages=10),), (D,))
    route = choose_route(FACTS, snapshot, random.Random(0))
    assert route.tokens_to_compute == 1


def test_lost_and_full_workers_are_never_chosen_and_suspects_only_when_nothing_else_is_left():
    facts = replace(FACTS, avoid=Avoid(lost=frozenset({"i-a"}), suspect=frozenset({"i-b"})))
    decodes = [decode("a", owned_pages=9), decode("b", owned_pages=9), decode("c", own_requests=99)]
    assert choose([P], decodes, facts)[1] == "c"
    assert choose([P], decodes[:2], facts)[1] == "b"
    with pytest.raises(Unavailable, match="no decode worker is left to try: 1 failed"):
        choose([P], decodes[:1], facts)


def test_workers_that_are_all_full_are_reported_as_full():
    facts = replace(FACTS, avoid=Avoid(full=frozenset({"i-a", "i-b"})))
    with pytest.raises(Overloaded, match="2 decode workers are full; retry later"):
        choose([P], [decode("a"), decode("b")], facts)


def test_a_missing_role_is_named():
    with pytest.raises(Unavailable, match="no prefill worker is ready"):
        choose([], [D])
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        choose([P], [])


def test_workers_of_different_page_formats_are_never_paired():
    other = msgspec.structs.replace(fakes.FORMAT, weights="w1")
    old, new = prefill("old"), prefill("new", page_format=other, own_tokens=9999)
    assert choose([old, new], [decode("d", page_format=other)]) == ("new", "d")
    with pytest.raises(Unavailable, match="weights is 'w0' here and 'w1' there"):
        choose([old], [decode("d", page_format=other)])


def test_a_request_that_fits_no_pool_is_refused_for_good():
    with pytest.raises(InvalidRequest, match="640 prompt tokens and max_tokens 64 fit the memory"):
        choose([P], [decode("d", capacity=10)])
    assert choose([P], [decode("small", capacity=10), decode("d", capacity=11)])[1] == "d"


def test_a_choice_explains_itself():
    snapshot = Snapshot((prefill("p0", owned_pages=2),), (decode("d0"), decode("d1")))
    text = choose_route(FACTS, snapshot, random.Random(0)).explain()
    assert "p0:cost=512.0,owned=128,load=0" in text
    assert "d1:cost=64.0,owned=0,load=0" in text


def test_where_all_decode_workers_are_full_the_best_one_is_waited_at():
    facts = replace(FACTS, avoid=Avoid(full=frozenset({"i-a", "i-b"})), may_wait=True)
    snapshot = Snapshot((P,), (decode("a", own_requests=3), decode("b", owned_pages=5)))
    route = choose_route(facts, snapshot, random.Random(0))
    assert (route.decode.worker_id, route.wait) == ("b", True)
    roomy = Snapshot((P,), (*snapshot.decode, decode("c", own_requests=99)))
    route = choose_route(facts, roomy, random.Random(0))
    assert (route.decode.worker_id, route.wait) == ("c", False)


def test_a_worker_that_lets_nobody_wait_is_not_waited_at():
    both = frozenset({"i-a", "i-b"})
    facts = replace(FACTS, avoid=Avoid(full=both, closed=frozenset({"i-b"})), may_wait=True)
    assert choose([P], [decode("a", own_requests=9), decode("b")], facts)[1] == "a"
    facts = replace(FACTS, avoid=Avoid(full=both, closed=both), may_wait=True)
    with pytest.raises(Overloaded, match="2 decode workers are full"):
        choose([P], [decode("a"), decode("b")], facts)


def test_a_full_prefill_worker_is_not_waited_at():
    facts = replace(FACTS, avoid=Avoid(full=frozenset({"i-p"})), may_wait=True)
    with pytest.raises(Overloaded, match="1 prefill worker is full"):
        choose([P], [D], facts)


def test_answers_share_the_full_pages_of_their_prompt():
    facts = RequestFacts(num_prompt_tokens=640, max_tokens=64, n=4)
    assert facts.decode_pages(64) == 10 + 4
    assert replace(facts, num_prompt_tokens=641).decode_pages(64) == 10 + 4 * 2
    assert choose([P], [decode("d", capacity=14)], facts)[1] == "d"
    with pytest.raises(InvalidRequest, match="max_tokens 64 for each of 4 answers fit the memory"):
        choose([P], [decode("d", capacity=13)], facts)
