"""Which prompt positions the next prefill step computes. Pure: no clock, no tensors, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.wire.errors import Overloaded


@dataclass
class PrefillJob:
    """One prompt on its way through a prefill worker.

    ``next_position`` is the first position not yet computed; positions below ``write_from`` came
    from the prefix cache. Both are set when the job starts.
    """

    job_id: str
    num_tokens: int
    next_position: int = 0
    write_from: int = 0
    started: bool = False
    cancelled: bool = False


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
    """First come, first served, several prompts a step under a token budget.

    A chunk ends at a page boundary or at the end of its prompt, so that a page is complete when
    its chunk is. A prompt for which there are no pages yet waits at the head: those behind it that
    have started go on, none overtakes it.
    """

    chunk_tokens: int
    page_size: int
    max_queue: int
    join_tokens: int = 128
    _queue: deque[PrefillJob] = field(default_factory=deque)
    _running: list[PrefillJob] = field(default_factory=list)

    def add(self, job: PrefillJob) -> None:
        """Raises Overloaded when the queue is full."""
        if len(self._queue) >= self.max_queue:
            raise Overloaded(f"the prefill queue holds {self.max_queue} prompts already")
        self._queue.append(job)

    def next_batch(self, start: Callable[[PrefillJob], bool]) -> list[Chunk]:
        """The chunks of the next step.

        ``start(job)`` reserves a queued job's pages and sets its positions; it answers False if
        there is no room now.
        """
        budget = self.chunk_tokens
        chunks: list[Chunk] = []
        for job in self._running:
            if not self._joins(budget):
                break
            chunks.append(self._cut(job, budget))
            budget -= chunks[-1].end - chunks[-1].start
        while self._queue and self._joins(budget):
            job = self._queue[0]
            if not start(job):
                break
            self._queue.popleft()
            job.started = True
            self._running.append(job)
            chunks.append(self._cut(job, budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _joins(self, budget: int) -> bool:
        """Whether one more prompt may join a step that has ``budget`` tokens left."""
        return budget > 0 and self.chunk_tokens - budget < self.join_tokens

    def _cut(self, job: PrefillJob, budget: int) -> Chunk:
        start = job.next_position
        end = min(start + budget, job.num_tokens)
        if end < job.num_tokens:
            aligned = end - end % self.page_size
            end = aligned if aligned > start else min(start + self.page_size, job.num_tokens)
            end = end if end == job.num_tokens else end - end % self.page_size
        return Chunk(job, start, end, max(start, job.write_from))

    def advance(self, chunk: Chunk) -> None:
        """Records that a chunk is computed; a finished job leaves the running set."""
        chunk.job.next_position = chunk.end
        if chunk.last:
            self._running.remove(chunk.job)

    def take_cancelled(self) -> list[PrefillJob]:
        """Removes and returns the jobs cancelled since the last call. Call between steps."""
        gone = [job for job in (*self._queue, *self._running) if job.cancelled]
        for job in gone:
            if job.started:
                self._running.remove(job)
            else:
                self._queue.remove(job)
        return gone

    def drop(self, job: PrefillJob) -> None:
        """Takes a started job out, after its step failed."""
        self._running.remove(job)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._running
