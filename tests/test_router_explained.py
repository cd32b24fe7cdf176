"""What a router remembers of its choices, and how ``pdmesh explain`` shows it."""

import random

import pytest
from test_router_policy import FACTS, worker

from pdmesh.launch.explain import as_text
from pdmesh.router.explained import MOST_CHOICES, Decisions
from pdmesh.router.policies import POLICY_NAMES, Costs, make_policy
from pdmesh.router.policy import Snapshot
from pdmesh.wire.admin import Explanation
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import InvalidRequest

COSTS = Costs(token_ms=0.25, itl_base_ms=12.5)


def route_by(policy):
    snapshot = Snapshot(
        prefill=(worker("prefill-0", "prefill"), worker("prefill-1", "prefill")),
        decode=(worker("decode-0", "decode"),),
        anchor=b"a" * 16,
    )
    return make_policy(policy).choose(FACTS, snapshot, random.Random(0), 1.0)


def noted(decisions, *names, now=1.0):
    for name in names:
        decisions.note(
            name,
            answer=0,
            attempt=1,
            prompt_tokens=9,
            route=route_by("priced"),
            costs=COSTS,
            now=now,
        )


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_can_explain_its_choices(policy):
    decisions = Decisions(policy)
    route = route_by(policy)
    decisions.note("r", answer=1, attempt=2, prompt_tokens=9, route=route, costs=COSTS, now=1.0)
    told = decode(encode(decisions.explain("r", 3.5)), Explanation)
    (choice,) = told.choices
    assert (told.policy, choice.answer, choice.attempt, choice.seconds_ago) == (policy, 1, 2, 2.5)
    assert {c.worker_id for c in choice.candidates} == {"prefill-0", "prefill-1", "decode-0"}
    chosen = {c.worker_id for c in choice.candidates if c.chosen}
    assert chosen == {route.prefill.worker_id, route.decode.worker_id}
    text = as_text(told)
    for one in choice.candidates:
        assert one.worker_id in text


def test_the_terms_of_a_cost_add_up_to_it():
    decisions = Decisions("priced")
    noted(decisions, "r")
    for score in decisions.explain("r", 1.0).choices[0].candidates:
        assert sum(score.terms.values()) == pytest.approx(score.cost)


def test_what_a_worker_was_only_about_to_have_and_the_costs_are_shown():
    decisions, about_to = Decisions("priced"), worker("prefill-0", "prefill", expected_pages=3)
    snapshot = Snapshot(prefill=(about_to,), decode=(worker("decode-0", "decode"),))
    route = make_policy("priced").choose(FACTS, snapshot, random.Random(0), 1.0)
    decisions.note("r", answer=0, attempt=1, prompt_tokens=9, route=route, costs=COSTS, now=1.0)
    told = decode(encode(decisions.explain("r", 1.0)), Explanation)
    (choice,) = told.choices
    assert [c.expected for c in choice.candidates] == [True, False]
    assert choice.costs["prefill_token"] == 0.25
    assert choice.costs["step"] == 12.5
    text = as_text(told)
    assert f" {choice.candidates[0].owned_tokens}* " in text
    assert "* about to have" in text
    assert "costs in ms: prefill_token 0.25, step 12.5, sequence 64" in text
    assert "prefill_pair" not in text, "it costs nothing"


def test_a_beginning_names_a_request_if_no_other_begins_so():
    decisions = Decisions("priced")
    noted(decisions, "ab1", "ab2", "c", "ab")
    assert decisions.explain("c", 1.0).request_id == "c"
    assert decisions.explain("ab", 1.0).request_id == "ab"
    assert decisions.explain("ab2", 1.0).request_id == "ab2"
    with pytest.raises(InvalidRequest, match="3 requests begin with 'a': ab1, ab2, ab"):
        decisions.explain("a", 1.0)
    with pytest.raises(InvalidRequest, match="no request 'x' among the last 512"):
        decisions.explain("x", 1.0)
    with pytest.raises(InvalidRequest, match="no request ''"):
        decisions.explain("", 1.0)


def test_only_the_last_requests_and_their_first_choices_are_kept():
    decisions = Decisions("priced", most=2)
    noted(decisions, "a", "b", "a", "c")
    assert len(decisions) == 2
    with pytest.raises(InvalidRequest):
        decisions.explain("b", 1.0)
    assert len(decisions.explain("a", 1.0).choices) == 2
    noted(decisions, *["a"] * 100)
    assert len(decisions.explain("a", 1.0).choices) == MOST_CHOICES


def test_of_many_workers_the_chosen_and_the_cheapest_are_shown():
    decisions = Decisions("priced")
    noted(decisions, "r")
    lines = as_text(decisions.explain("r", 1.0), most=1).splitlines()
    assert sum(line.startswith("->") for line in lines) == 2
    assert "  and 1 more; --all shows them" in lines
