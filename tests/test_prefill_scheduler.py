"""The prefill scheduler: which positions a step computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.prefill.scheduler import PrefillJob, PrefillScheduler, first_position
from pdmesh.wire.errors import Overloaded


def scheduler(budget=512, page=64, queue=100):
    return PrefillScheduler(budget, page, queue)


def start_at(positions):
    """A ``start`` that has room for the named jobs only and sets their first position."""

    def start(job):
        if job.job_id not in positions:
            return False
        job.next_position = job.write_from = positions[job.job_id]
        return True

    return start


@pytest.mark.parametrize(
    ("tokens", "cached", "mtp", "first"),
    [
        (63, 0, True, 0),
        (64, 0, True, 0),
        (64, 64, True, 63),
        (64, 64, False, 63),
        (65, 64, True, 63),
        (65, 64, False, 64),
        (128, 64, True, 63),
        (128, 128, False, 127),
        (1, 0, True, 0),
    ],
)
def test_at_least_one_position_is_computed_whatever_was_cached(tokens, cached, mtp, first):
    assert first_position(tokens, cached, mtp) == first


def test_chunks_end_at_pages_and_cover_the_prompt_once():
    s = scheduler(budget=100)
    job = PrefillJob("a", 300)
    s.add(job)
    spans = []
    while not s.idle:
        (chunk,) = s.next_batch(start_at({"a": 0}))
        spans.append((chunk.start, chunk.end))
        s.advance(chunk)
    assert spans == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=8),
    budget=st.integers(1, 600),
    page=st.sampled_from([16, 64]),
    data=st.data(),
)
def test_every_prompt_ends_and_no_position_is_skipped_or_done_twice(lengths, budget, page, data):
    s = scheduler(budget, page)
    firsts, seen = {}, {}
    for i, length in enumerate(lengths):
        cached = data.draw(st.integers(0, length // page)) * page
        firsts[str(i)] = first_position(length, cached, mtp=True)
        seen[str(i)] = firsts[str(i)]
        s.add(PrefillJob(str(i), length))
    for _ in range(2000):
        if s.idle:
            break
        chunks = s.next_batch(start_at(firsts))
        assert chunks
        assert sum(c.end - c.start for c in chunks) <= budget + page
        for c in chunks:
            assert c.start == seen[c.job.job_id] < c.end
            assert c.last or c.end % page == 0
            seen[c.job.job_id] = c.end
            s.advance(c)
    assert s.idle
    assert [seen[str(i)] for i in range(len(lengths))] == lengths


def test_a_prompt_without_pages_waits_and_none_overtakes_it():
    s = scheduler()
    for name in "abc":
        s.add(PrefillJob(name, 10))
    chunks = s.next_batch(start_at({"a": 0, "c": 0}))
    assert [c.job.job_id for c in chunks] == ["a"]
    assert s.queued == 2


def test_a_cancelled_job_leaves_the_queue_or_the_running_set():
    s = scheduler(budget=64)
    jobs = [PrefillJob(name, 200) for name in "ab"]
    for job in jobs:
        s.add(job)
    s.advance(s.next_batch(start_at({"a": 0, "b": 0}))[0])
    for job in jobs:
        job.cancelled = True
    assert {job.job_id for job in s.take_cancelled()} == {"a", "b"}
    assert s.idle
    assert s.take_cancelled() == []


def test_a_full_queue_refuses_with_a_sentence():
    s = scheduler(queue=1)
    s.add(PrefillJob("a", 1))
    with pytest.raises(Overloaded, match="holds 1 prompts"):
        s.add(PrefillJob("b", 1))


def test_short_prompts_share_a_step_up_to_a_bound_and_a_long_one_fills_it_alone():
    s = PrefillScheduler(512, 64, 100, join_tokens=128)
    for name in "abcd":
        s.add(PrefillJob(name, 60))
    s.add(PrefillJob("long", 2000))
    start = start_at(dict.fromkeys([*"abcd", "long"], 0))
    steps = []
    while not s.idle and len(steps) < 10:
        chunks = s.next_batch(start)
        steps.append([(c.job.job_id, c.end - c.start) for c in chunks])
        for c in chunks:
            s.advance(c)
    assert steps[0] == [("a", 60), ("b", 60), ("c", 60)]
    assert steps[1] == [("d", 60), ("long", 448)]
    assert steps[2] == [("long", 512)]
