"""The prefill scheduler: which positions a step computes, and how long a prompt may wait for it."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.prefill.config import STEP_PROMPTS, scheduler_on, step_rows
from pdmesh.prefill.scheduler import (
    MAX_OVERTAKEN,
    MAX_PRIORITY,
    PrefillJob,
    PrefillScheduler,
    first_position,
)
from pdmesh.wire.errors import Overloaded


def scheduler(budget=512, page=64, queue=100, **fields):
    return PrefillScheduler(budget, page, queue, **fields)


@dataclass
class Pages:
    """A prefix cache and a pool without tensors: what ``start`` and ``cached_pages`` answer from.

    ``room`` counts free pages; a job holds all its pages from its start to its end.
    """

    page_size: int = 64
    room: float = math.inf
    mtp: bool = True
    cached: set = field(default_factory=set)
    held: dict = field(default_factory=dict)
    computed: int = 0
    longest_wait: int = 0

    def cached_pages(self, job):
        count = 0
        while count < len(job.hashes) and job.hashes[count] in self.cached:
            count += 1
        return count

    def start(self, job):
        needed = -(-job.num_tokens // self.page_size) - self.cached_pages(job)
        if needed > self.room:
            return False
        self.room -= needed
        self.held[job] = needed
        job.write_from = self.cached_pages(job) * self.page_size
        job.next_position = first_position(job.num_tokens, job.write_from, self.mtp)
        return True

    def step(self, s, now=0.0):
        """One step of a scheduler: what was computed, as (name, start, end)."""
        chunks = s.next_batch(now, self.start, self.cached_pages)
        for chunk in chunks:
            s.advance(chunk)
            self.computed += chunk.end - chunk.start
            self.cached.update(chunk.job.hashes[: chunk.end // self.page_size])
            if chunk.last:
                self.room += self.held.pop(chunk.job)
        return [(c.job.job_id, c.start, c.end) for c in chunks]

    def sizes(self, s, now=0.0):
        return [(name, end - start) for name, start, end in self.step(s, now)]


def add(s, *jobs, **fields):
    """Queues jobs given as (name, tokens)."""
    made = [PrefillJob(name, tokens, **fields) for name, tokens in jobs]
    for job in made:
        s.add(job)
    return made


def names(steps):
    return [name for name, *_ in steps]


# ---- chunks ---------------------------------------------------------------------------------


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
    s, pages = scheduler(budget=100), Pages()
    add(s, ("a", 300))
    spans = []
    while not s.idle:
        ((_, *span),) = pages.step(s)
        spans.append(tuple(span))
    assert spans == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=8),
    budget=st.integers(1, 600),
    join=st.integers(1, 600),
    page=st.sampled_from([16, 64]),
    mtp=st.booleans(),
    data=st.data(),
)
def test_every_prompt_ends_and_no_position_is_skipped_or_done_twice(
    lengths, budget, join, page, mtp, data
):
    s, pages = scheduler(budget, page, join_tokens=join), Pages(page, mtp=mtp)
    seen = {}
    for i, length in enumerate(lengths):
        hashes = [bytes([i, n]) for n in range(length // page)]
        cached = data.draw(st.integers(0, len(hashes)))
        pages.cached.update(hashes[:cached])
        seen[str(i)] = first_position(length, cached * page, mtp)
        s.add(PrefillJob(str(i), length, hashes=hashes))
    for _ in range(2000):
        if s.idle:
            break
        spans = pages.step(s)
        assert spans
        assert len(set(names(spans))) == len(spans)
        assert sum(end - start for _, start, end in spans) <= max(budget, 2 * s.share)
        for name, start, end in spans:
            assert start == seen[name] < end
            assert end % page == 0 or end == lengths[int(name)]
            seen[name] = end
    assert s.idle
    assert [seen[str(i)] for i in range(len(lengths))] == lengths


@given(budget=st.integers(128, 600), lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6))
def test_a_step_is_not_larger_than_told_where_two_pages_fit_in(budget, lengths):
    s, pages = scheduler(budget), Pages()
    add(s, *((str(i), n) for i, n in enumerate(lengths)))
    while not s.idle:
        assert sum(size for _, size in pages.sizes(s)) <= budget


# ---- shares -----------------------------------------------------------------------------------


def test_short_prompts_share_a_step_up_to_a_bound_and_a_long_one_fills_it_alone():
    s, pages = scheduler(join_tokens=128), Pages()
    add(s, *((name, 60) for name in "abcd"), ("long", 2000))
    assert pages.sizes(s) == [("a", 60), ("b", 60), ("c", 60)]
    assert pages.sizes(s) == [("d", 60), ("long", 448)]
    assert pages.sizes(s) == [("long", 512)]


def test_short_prompts_take_half_of_the_steps_of_a_long_one():
    s, pages = scheduler(), Pages()
    add(s, ("long", 4000))
    assert pages.sizes(s) == [("long", 512)]
    add(s, *((str(i), 100) for i in range(4)))
    assert pages.sizes(s) == [("long", 256), ("0", 100), ("1", 100)]
    assert pages.sizes(s) == [("long", 256), ("2", 100), ("3", 100)]
    assert pages.sizes(s) == [("long", 512)]


def test_a_short_prompt_waits_for_the_length_of_no_long_one():
    s, pages = scheduler(), Pages()
    add(s, *((name, 4000) for name in "abc"))
    pages.step(s)
    add(s, ("short", 10))
    assert ("short", 10) in pages.sizes(s)


@given(
    before=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    steps=st.integers(0, 3),
    later=st.lists(st.integers(1, 3000), max_size=8),
    short=st.integers(1, 900),
    budget=st.integers(128, 1200),
)
def test_where_steps_are_filled_a_short_prompt_waits_for_no_step_but_the_one_under_way(
    before, steps, later, short, budget
):
    s, pages = scheduler(budget, join_tokens=budget), Pages()
    jobs = add(s, *((f"b{i}", n) for i, n in enumerate(before)))
    for _ in range(steps):
        if not s.idle:
            pages.step(s)
    jobs += add(s, ("short", short), *((f"l{i}", n) for i, n in enumerate(later)))
    shorter = sum(j.remaining for j in jobs if 0 < j.remaining <= short)
    spans = pages.step(s)
    if shorter <= s.share:
        assert ("short", 0, short) in spans


@given(
    tokens=st.lists(st.integers(1, 600), min_size=1, max_size=8),
    budget=st.integers(1, 300),
    page=st.sampled_from([16, 64, 512]),
    device=st.sampled_from(["cpu", "cuda"]),
)
@example(tokens=[200, 200], budget=1, page=64, device="cuda")
def test_no_step_has_more_rows_than_its_memory_is_counted_for(tokens, budget, page, device):
    s, pages = scheduler_on(device, budget, page, 100), Pages(page_size=page)
    add(s, *((str(i), n) for i, n in enumerate(tokens)))
    while not s.idle:
        assert sum(rows for _, rows in pages.sizes(s)) <= step_rows(budget, page)


def test_a_step_has_no_more_prompts_than_told():
    s, pages = scheduler(join_tokens=512, most_prompts=3), Pages()
    add(s, *((str(i), 10) for i in range(4)), ("long", 4000))
    assert names(pages.step(s)) == ["0", "1", "2"]
    add(s, ("4", 10), ("5", 10))
    assert names(pages.step(s)) == ["3", "4", "5"]
    add(s, *((str(i), 10) for i in range(6, 10)))
    assert names(pages.step(s)) == ["long", "6", "7"]


def test_a_gpu_fills_its_steps_and_a_cpu_does_not():
    for device, joined in (("cpu", 1), ("cuda", 4), ("cuda:1", 4)):
        s, pages = scheduler_on(device, 4096, 64, 100), Pages()
        add(s, *((str(i), 1024) for i in range(6)))
        assert len(pages.step(s)) == joined
    assert scheduler_on("cpu", 512, 64, 9) == PrefillScheduler(512, 64, 9)
    s, pages = scheduler_on("cuda", 4096, 64, 100), Pages()
    add(s, *((str(i), 1) for i in range(100)))
    assert len(pages.step(s)) == STEP_PROMPTS


def test_a_stream_of_short_prompts_leaves_a_long_one_its_half():
    s, pages = scheduler(), Pages()
    add(s, ("long", 2816))
    assert pages.sizes(s) == [("long", 512)]
    for step in range(9):
        add(s, *((f"{step}-{i}", 60) for i in range(5)), deadline=1e9)
        assert pages.sizes(s)[0] == ("long", 256)


# ---- priorities, ageing, deadlines --------------------------------------------------------------


def test_a_higher_priority_goes_first_and_an_earlier_deadline_within_one():
    s, pages = scheduler(join_tokens=1), Pages()
    add(s, ("a", 10), deadline=90.0)
    add(s, ("b", 10), deadline=80.0)
    add(s, ("c", 10), priority=1, deadline=99.0)
    add(s, ("d", 10), priority=-1, deadline=70.0)
    assert [names(pages.step(s)) for _ in range(4)] == [["c"], ["b"], ["a"], ["d"]]


def test_a_prompt_that_has_waited_rises_above_later_ones_of_a_higher_priority():
    s, pages = scheduler(join_tokens=1, ageing_s=10.0), Pages()
    add(s, ("old", 10), arrived=0.0)
    add(s, ("new", 10), priority=2, arrived=15.0)
    add(s, ("newer", 10), priority=2, arrived=31.0)
    assert names(pages.step(s, now=19.0)) == ["new"]
    assert names(pages.step(s, now=31.0)) == ["old"]


def test_a_priority_beyond_the_largest_counts_as_it():
    s = scheduler()
    top, beyond = add(s, ("a", 1), priority=MAX_PRIORITY), add(s, ("b", 1), priority=10**9)
    assert s.level(*top, now=5.0) == s.level(*beyond, now=5.0)


def test_a_prompt_past_its_deadline_never_starts_and_a_started_one_is_taken_out():
    s, pages = scheduler(budget=128), Pages()
    add(s, ("running", 1000), deadline=5.0)
    pages.step(s, now=0.0)
    add(s, ("waiting", 10), deadline=5.0)
    add(s, ("later", 10), deadline=6.0)
    assert s.next_deadline() == 5.0
    assert s.take_expired(4.9) == []
    assert names(pages.step(s, now=5.0)) == ["later"], "also before it is taken out"
    assert {job.job_id for job in s.take_expired(5.0)} == {"running", "waiting"}
    assert s.idle
    assert s.next_deadline() == math.inf


ARRIVALS = st.tuples(
    st.integers(0, 30), st.integers(1, 400), st.integers(-2, 2), st.sampled_from([50.0, math.inf])
)


@settings(deadline=None, max_examples=50)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=30),
    budget=st.integers(1, 300),
    page=st.sampled_from([1, 16, 64]),
    join=st.sampled_from([1, 128]),
    ageing=st.sampled_from([0.5, 3.0, 20.0]),
    stream=st.sampled_from([0, 100]),
)
def test_a_prompt_waits_only_for_those_that_may_stand_above_it_whatever_comes_later(
    arrivals, budget, page, join, ageing, stream
):
    """A step a second. One that comes (q - p + 1) * ageing_s later stands below for ever.

    The stream fills every step with prompts of a high priority.
    """
    s = scheduler(budget, page, queue=1000, join_tokens=join, ageing_s=ageing)
    pages = Pages(page)
    jobs = [
        PrefillJob(str(i), tokens, priority, float(at), 1e6 + late)
        for i, (at, tokens, priority, late) in enumerate(arrivals)
    ]
    jobs += [PrefillJob(f"s{n}", max(budget, page), 2, float(n)) for n in range(stream)]
    ended, step = {}, 0
    while len(ended) < len(jobs):
        for job in jobs:
            if job.arrived == step:
                s.add(job)
        pages.step(s, float(step))
        step += 1
        for job in jobs:
            if job.remaining == 0:
                ended.setdefault(job, step)
        assert step < 30_000
    for job in jobs:
        rivals = [
            other
            for other in jobs
            if other.arrived < job.arrived + (other.priority - job.priority + 1) * ageing
        ]
        steps = ended[job] - job.arrived
        assert steps <= sum(s.turns(other.num_tokens) for other in {*rivals, job})


# ---- pages ------------------------------------------------------------------------------------


def test_a_prompt_without_pages_waits_and_none_takes_them_from_it():
    s, pages = scheduler(budget=128), Pages(room=5)
    add(s, ("a", 256))
    pages.step(s)
    add(s, ("big", 320), priority=1)
    add(s, ("small", 10))
    assert pages.sizes(s) == [("a", 128)]
    assert s.queued == 2
    assert names(pages.step(s))[0] == "big"


def test_small_prompts_that_keep_coming_do_not_keep_the_pages_from_a_big_one():
    """Two of them overlap at any time; each is above the big one until that has waited a while."""
    s, pages = scheduler(budget=128, ageing_s=5.0), Pages(room=8)
    add(s, ("early", 190))
    pages.step(s)
    add(s, ("big", 512))
    for step in range(20):
        add(s, (f"{step}", 190), priority=1, arrived=float(step))
        if "big" in names(pages.step(s, float(step))):
            break
    assert 5 <= step < 15


def test_prompts_that_are_cached_as_a_whole_overtake_one_without_pages_but_not_for_ever():
    s, pages = scheduler(budget=2000), Pages(room=5)
    hashes = [b"x", b"y"]
    pages.cached.update(hashes)
    held, *_ = add(s, ("held", 256), ("big", 320), ("new", 128))
    pages.start(held)
    held.started = True
    s._queue.remove(held)
    overtaking = 0
    for step in range(2 * MAX_OVERTAKEN):
        add(s, (f"cached {step}", 128), hashes=hashes)
        overtaking += len(pages.step(s))
    assert overtaking == MAX_OVERTAKEN
    assert {job.job_id for job in s._queue} >= {"big", "new"}
    pages.room += pages.held.pop(held)
    assert names(pages.step(s))[0] == "big"


# ---- a shared cold prefix -----------------------------------------------------------------------


def prefixed(name, own, **fields):
    """A prompt of four shared pages and some tokens of its own."""
    hashes = [b"shared %d" % i for i in range(4)] + [name.encode()] * ((256 + own) // 64 - 4)
    return PrefillJob(name, 256 + own, hashes=hashes, **fields)


def test_a_prompt_waits_for_the_pages_that_another_is_computing():
    s, pages = scheduler(), Pages(mtp=False)
    for name in "abc":
        s.add(prefixed(name, 10))
    add(s, ("other", 100))
    assert pages.sizes(s) == [("a", 266), ("other", 100)]
    assert pages.sizes(s) == [("b", 10), ("c", 10)]


def test_the_turn_of_a_prompt_that_waits_for_a_page_goes_to_who_computes_it():
    s, pages = scheduler(budget=128), Pages(mtp=False)
    s.add(prefixed("low", 1000))
    assert names(pages.step(s)) == ["low"]
    s.add(prefixed("high", 10, priority=1))
    add(s, ("between", 64), priority=1, deadline=9.0)
    assert pages.sizes(s) == [("between", 64), ("low", 64)]
    assert pages.sizes(s) == [("low", 128)]
    assert pages.sizes(s) == [("high", 10), ("low", 64)]


def test_a_prompt_does_not_wait_for_one_that_is_cancelled_or_behind():
    s, pages = scheduler(budget=128), Pages(mtp=False)
    first = prefixed("first", 500)
    s.add(first)
    pages.step(s)
    second = prefixed("second", 10)
    s.add(second)
    first.cancelled = True
    assert names(pages.step(s)) == ["second"]
    behind = prefixed("behind", 500)
    s.add(behind)
    pages.cached.update(second.hashes)
    assert "behind" in names(pages.step(s))


@settings(deadline=None)
@given(
    shared=st.lists(st.integers(0, 6), min_size=1, max_size=10),
    own=st.lists(st.integers(1, 200), min_size=10, max_size=10),
    priorities=st.lists(st.integers(-1, 1), min_size=10, max_size=10),
    budget=st.integers(1, 400),
)
def test_no_position_of_a_shared_prefix_is_computed_twice(shared, own, priorities, budget):
    """Prompts of one family share their first pages; all end, within the bound of one queue."""
    page = 16
    s, pages = scheduler(budget, page), Pages(page, mtp=False)
    for i, count in enumerate(shared):
        tokens = count * page + own[i]
        hashes = [bytes([n]) for n in range(count)]
        hashes += [bytes([255, i, n]) for n in range(tokens // page - count)]
        s.add(PrefillJob(str(i), tokens, priorities[i], hashes=hashes))
    bound = sum(s.turns(job.num_tokens) for job in s._queue)
    steps = 0
    while not s.idle:
        assert pages.step(s)
        steps += 1
    assert steps <= bound
    assert pages.computed == max(shared) * page + sum(own[: len(shared)])


# ---- the queue ----------------------------------------------------------------------------------


def test_a_cancelled_job_leaves_the_queue_or_the_running_set():
    s, pages = scheduler(budget=64), Pages()
    jobs = add(s, ("a", 200))
    pages.step(s)
    jobs += add(s, ("b", 200))
    for job in jobs:
        job.cancelled = True
    assert {job.job_id for job in s.take_cancelled()} == {"a", "b"}
    assert s.idle
    assert s.take_cancelled() == []


def test_a_full_queue_refuses_with_a_sentence():
    s = scheduler(queue=1)
    add(s, ("a", 1))
    with pytest.raises(Overloaded, match="holds 1 prompts"):
        add(s, ("b", 1))
