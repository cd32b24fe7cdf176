"""Requests that could not be served in time are refused at once, and told when to come again."""

import random

import grpc
import pytest
import router_fakes as fakes
from test_router_policy import FACTS, decode, prefill

from pdmesh.router.admission import LEAST_SEEN, LEAST_TOKENS, RETRY_S, Admission
from pdmesh.router.policies import make_policy
from pdmesh.router.policy import Snapshot
from pdmesh.wire.errors import Overloaded
from pdmesh.wire.messages import ReserveRequest

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LONG = "word " * 200


def learned(token_s: float) -> Admission:
    admission = Admission()
    for _ in range(LEAST_SEEN):
        admission.note(1000, 1000 * token_s)
    return admission


def checked(admission, remaining_s, **load):
    snapshot = Snapshot((prefill("p", **load),), (decode("d"),))
    route = make_policy("priced").choose(FACTS, snapshot, random.Random(0), 0.0)
    admission.check(route, snapshot, remaining_s)


def test_nothing_is_refused_before_a_speed_is_known():
    admission = Admission()
    for _ in range(LEAST_SEEN - 1):
        admission.note(1000, 1000.0)
        assert admission.token_s is None
        checked(admission, 1e-9, own_tokens=10**9)
    assert admission.retry_after_s(Snapshot((prefill("p", own_tokens=10**9),), ())) == 1.0


def test_short_prompts_and_empty_times_teach_nothing():
    admission = Admission()
    for _ in range(100):
        admission.note(LEAST_TOKENS - 1, 1.0)
        admission.note(1000, 0.0)
    assert admission.token_s is None


def test_what_is_queued_and_the_own_work_have_to_be_done_before_the_deadline():
    admission = learned(0.001)
    checked(admission, 0.65)
    with pytest.raises(Overloaded, match=r"could come in 0\.6 s, after the deadline in 0\.6 s"):
        checked(admission, 0.63)
    checked(admission, 1.65, own_tokens=1000)
    with pytest.raises(Overloaded) as caught:
        checked(admission, 1.0, own_tokens=5000)
    assert caught.value.retry_after_s == pytest.approx(4.64)
    with pytest.raises(Overloaded):
        checked(admission, 1.0, other_requests=2)


@pytest.mark.parametrize("queued", [0, 10**12])
def test_the_time_to_come_again_is_bounded(queued):
    admission = learned(0.001)
    told = admission.retry_after_s(Snapshot((prefill("p", own_tokens=queued),), ()))
    assert told == RETRY_S[bool(queued)]


def test_the_least_busy_worker_says_when_to_come_again():
    workers = (prefill("a", own_tokens=9000), prefill("b", own_tokens=3000))
    assert learned(0.001).retry_after_s(Snapshot(workers, ())) == pytest.approx(3.0)


def test_a_time_that_was_shared_with_others_hardly_changes_the_speed():
    admission = learned(0.001)
    admission.note(1000, 10.0)
    assert admission.token_s < 0.0015
    for _ in range(20):
        admission.note(1000, 0.5)
    assert admission.token_s == pytest.approx(0.0005, rel=0.05)


async def test_a_request_that_would_come_too_late_is_refused_before_it_asks_a_worker(tmp_path):
    async with fakes.mesh(tmp_path) as mesh:
        mesh.prefill[0].compute_ms = 1e6
        for _ in range(LEAST_SEEN):
            await mesh.chat(fakes.ask(LONG, max_tokens=2), timeout=60)
        before = len(mesh.decode[0].seen(ReserveRequest))
        late = fakes.ask(LONG, max_tokens=2)
        late.tenant = "nothing of it is cached"
        error = await mesh.error(late, timeout=60)
        assert error.code() is EXHAUSTED
        assert "retry later or allow more time" in error.details()
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) == RETRY_S[1] * 1e3
        assert dict(error.trailing_metadata())["pdmesh-error"] == "Overloaded"
        assert len(mesh.decode[0].seen(ReserveRequest)) == before
        assert mesh.outcome("overloaded") == 1
        assert (await mesh.chat(fakes.ask(LONG, max_tokens=2), timeout=9000)).reason == "length"
        await mesh.at_rest()
