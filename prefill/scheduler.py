"""Which prompt positions the next prefill step computes. Pure: no clock, no tensors, no I/O."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdmesh.wire.errors import Overloaded
from pdmesh.wire.hashes import PageHash

MAX_PRIORITY = 10
"""Priorities beyond it, up or down, count as it."""
MAX_OVERTAKEN = 8
"""Cached prompts that may start while one waits for pages."""


@dataclass(eq=False)
class PrefillJob:
    """One prompt on its way through a prefill worker. Times are seconds of any one clock.

    ``arrived`` lies back by what the request has waited elsewhere. ``hashes`` are those of its full
    pages. ``next_position`` is the first position not yet computed (before the job starts: as far
    as the prefix cache told when it came); positions below ``write_from`` came from the prefix
    cache. Both are set when the job starts.
    """

    job_id: str
    num_tokens: int
    priority: int = 0
    arrived: float = 0.0
    deadline: float = math.inf
    hashes: Sequence[PageHash] = ()
    next_position: int = 0
    write_from: int = 0
    started: bool = False
    cancelled: bool = False
    overtaken: int = 0

    @property
    def remaining(self) -> int:
        """Positions not yet computed."""
        return self.num_tokens - self.next_position


@dataclass(frozen=True)
class Chunk:
    """Positions ``start..end-1`` of one job; latents of positions >= ``write_from`` are written."""

    job: PrefillJob
    start: int
    end: int
    write_from: int

    @property
    def last(self) -> bool:
        return self.end == self.job.num_tokens


Start = Callable[[PrefillJob], bool]
CachedPages = Callable[[PrefillJob], int]


def first_position(num_tokens: int, cached_tokens: int, mtp: bool) -> int:
    """Where computing starts after a prefix hit of ``cached_tokens``.

    At least the last position is computed, since its logits are needed; with MTP also the last
    cached one, since its hidden state is an input of the first new MTP latent.
    """
    if cached_tokens >= num_tokens:
        return num_tokens - 1
    return cached_tokens - 1 if mtp and cached_tokens else cached_tokens


@dataclass
class PrefillScheduler:
    """Shares the tokens of each step between the prompt whose turn it is and the short ones.

    The *head* of a step is the prompt of the highest level: its priority, plus one for every
    ``ageing_s`` seconds waited. At one level a started prompt goes first, then the earliest
    deadline, then the earliest arrival. A head that needs more than half of the step gets at least
    half of it; the other half goes to the others, higher priority first and then those with the
    fewest tokens left, and what one half does not use the other may. Where the head needs less,
    prompts join in the same order until the step holds ``join_tokens``: more rows would gain
    nothing. ``most_prompts`` are all that a step has.

    So a prompt waits for those only that may ever stand at a higher level, whatever comes later:
    with t tokens each these are at most ``turns(t)`` steps each. And a short prompt does not wait
    for the length of a long one: half of every step belongs to the shortest. Where steps are filled
    (``join_tokens`` is ``chunk_tokens``) it waits for the step that is being computed and for no
    other, unless it and those before it in that order need more than ``share``, or are more than
    ``most_prompts`` with the head.

    A chunk ends at a page boundary or at the end of its prompt, so that a page is complete when
    its chunk is; half a step is therefore at least a page. Where there are no pages for a prompt
    whose turn it is, no other takes new ones in that step; started prompts go on, and so do up to
    ``MAX_OVERTAKEN`` prompts that are cached as a whole. A prompt whose next page a started one is
    computing is not started: its turn goes to that one, until the page can be shared.
    """

    chunk_tokens: int
    page_size: int
    max_queue: int
    join_tokens: int = 128
    most_prompts: int = sys.maxsize
    ageing_s: float = 10.0
    _queue: list[PrefillJob] = field(default_factory=list)
    _running: list[PrefillJob] = field(default_factory=list)

    @property
    def share(self) -> int:
        """Tokens of a step that belong to its head, and as many that belong to the others."""
        return max(self.chunk_tokens // 2, self.page_size)

    def turns(self, num_tokens: int) -> int:
        """The most steps of which a prompt of ``num_tokens`` is the head before it is computed."""
        pages = self.share // self.page_size
        return -(-num_tokens // (pages * self.page_size)) + 1

    def level(self, job: PrefillJob, now: float) -> int:
        """Its priority, risen with the time waited."""
        return _bounded(job.priority) + math.floor((now - job.arrived) / self.ageing_s)

    def add(self, job: PrefillJob) -> None:
        """Raises Overloaded when the queue is full."""
        if len(self._queue) >= self.max_queue:
            raise Overloaded(f"the prefill queue holds {self.max_queue} prompts already")
        self._queue.append(job)

    def next_batch(self, now: float, start: Start, cached_pages: CachedPages) -> list[Chunk]:
        """The chunks of the next step; the head's is the first.

        Args:
            now: the time; prompts whose deadline it has reached are passed over.
            start: reserves a queued job's pages and sets its positions; it answers False if there
                is no room now, or if it cancelled the job.
            cached_pages: leading full pages of a queued job that are cached here now.
        """
        jobs = [job for job in (*self._running, *self._queue) if _wanted(job, now)]
        turns = _Turns(self, now, start, cached_pages)
        jobs.sort(key=lambda job: (-self.level(job, now), *_urgency(job)))
        taken = (job for waiting in jobs if (job := turns.take(waiting)) is not None)
        head = next(taken, None)
        if head is None:
            return []
        others = self._others(head, [job for job in jobs if job is not head], turns)
        used = sum(chunk.end - chunk.start for chunk in others)
        return [self._cut(head, max(self.chunk_tokens - used, self.share)), *others]

    def _others(self, head: PrefillJob, jobs: list[PrefillJob], turns: _Turns) -> list[Chunk]:
        """What joins the head in a step."""
        large = head.remaining > self.chunk_tokens - self.share
        room = self.share if large else self.chunk_tokens - head.remaining
        chunks: list[Chunk] = []
        served = {head}
        used = 0
        for waiting in sorted(jobs, key=lambda j: (-_bounded(j.priority), j.remaining, j.deadline)):
            left = room - used
            if left <= 0 or not (large or head.remaining + used < self.join_tokens):
                break
            if len(served) >= self.most_prompts:
                break
            if left < min(self.page_size, waiting.remaining):
                continue
            job = turns.take(waiting)
            if job is None or job in served or left < min(self.page_size, job.remaining):
                continue
            served.add(job)
            chunks.append(self._cut(job, left))
            used += chunks[-1].end - chunks[-1].start
        return chunks

    def _cut(self, job: PrefillJob, tokens: int) -> Chunk:
        """The job's next chunk; ``tokens`` are at least a page, or what remains of the job."""
        start = job.next_position
        end = min(start + tokens, job.num_tokens)
        if end < job.num_tokens:
            end -= end % self.page_size
        return Chunk(job, start, end, max(start, job.write_from))

    def advance(self, chunk: Chunk) -> None:
        """Records that a chunk is computed; a finished job leaves the running set."""
        chunk.job.next_position = chunk.end
        if chunk.last:
            self._running.remove(chunk.job)

    def take_cancelled(self) -> list[PrefillJob]:
        """Removes and returns the jobs cancelled since the last call. Call between steps."""
        return self._take(lambda job: job.cancelled)

    def take_expired(self, now: float) -> list[PrefillJob]:
        """Removes and returns the jobs whose deadline has come. Call between steps."""
        return self._take(lambda job: job.deadline <= now)

    def _take(self, gone: Callable[[PrefillJob], bool]) -> list[PrefillJob]:
        taken = [job for job in (*self._queue, *self._running) if gone(job)]
        if taken:
            self._queue = [job for job in self._queue if not gone(job)]
            self._running = [job for job in self._running if not gone(job)]
        return taken

    def drop(self, job: PrefillJob) -> None:
        """Takes a started job out, after its step failed."""
        self._running.remove(job)

    def next_deadline(self) -> float:
        """The earliest deadline; infinite where there is none."""
        return min((j.deadline for j in (*self._queue, *self._running)), default=math.inf)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._running


class _Turns:
    """Who may compute in one step; starts the queued jobs that may."""

    def __init__(
        self, scheduler: PrefillScheduler, now: float, start: Start, cached_pages: CachedPages
    ) -> None:
        self._scheduler = scheduler
        self._now = now
        self._start = start
        self._cached_pages = cached_pages
        self._blocked: PrefillJob | None = None

    def take(self, job: PrefillJob) -> PrefillJob | None:
        """Who computes when it is ``job``'s turn: itself, who computes its next page, or nobody."""
        if job.started:
            return job
        if (other := self._computes_for(job)) is not None:
            return other
        if not self._may_start(job):
            return None
        if not self._start(job):
            if not (job.cancelled or self._blocked):
                self._blocked = job
            return None
        if self._blocked is not None:
            self._blocked.overtaken += 1
        job.started = True
        self._scheduler._queue.remove(job)
        self._scheduler._running.append(job)
        return job

    def _computes_for(self, job: PrefillJob) -> PrefillJob | None:
        """The started job that is computing the first page ``job`` lacks."""
        for other in self._scheduler._running:
            if not (_wanted(other, self._now) and other.hashes and job.hashes):
                continue
            if other.hashes[0] != job.hashes[0]:
                continue
            page = self._cached_pages(job)
            ready = max(other.next_position, other.write_from) // self._scheduler.page_size
            shared = ready <= page < min(len(job.hashes), len(other.hashes))
            if shared and job.hashes[page] == other.hashes[page]:
                return other
        return None

    def _may_start(self, job: PrefillJob) -> bool:
        if self._blocked is None:
            return True
        if self._blocked.overtaken >= MAX_OVERTAKEN or job.num_tokens % self._scheduler.page_size:
            return False
        return self._cached_pages(job) * self._scheduler.page_size == job.num_tokens


def _wanted(job: PrefillJob, now: float) -> bool:
    return not job.cancelled and now < job.deadline


def _bounded(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def _urgency(job: PrefillJob) -> tuple[bool, float, float]:
    """The order within a level."""
    return (not job.started, job.deadline, job.arrived)
