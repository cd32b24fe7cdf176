"""Steps of a batch: rows to the compute thread, results to the sequences. On the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from pdmesh.decode.facts import DecodeStepFacts
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.runner import DecodeRunner, StepRows
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.manager import KvManager
from pdmesh.wire.errors import InternalError, InvalidRequest, PdmeshError
from pdmesh.wire.hashes import root_hash
from pdmesh.wire.messages import TokenChunk

log = logging.getLogger(__name__)


class Stepping:
    """Runs steps and counts what they gave.

    Args:
        compute: the thread that steps run on.
        stepped: told of each sequence's chunk, once it is queued.
        failed: ends the lease of a sequence that no step can be made with.
    """

    def __init__(
        self,
        runner: DecodeRunner,
        kv: KvManager,
        limits: DecodeLimits,
        compute: Executor,
        stepped: Callable[[DecodeSequence, TokenChunk], None],
        failed: Callable[[LeaseEntry, PdmeshError], None],
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._limits = limits
        self._fingerprint = limits.page_format.fingerprint()
        self._compute = compute
        self._stepped = stepped
        self._failed = failed
        self.observe: Callable[[DecodeStepFacts], None] | None = None
        self.tokens_generated = 0
        self.drafted = 0
        self.accepted = 0
        self.step_ms = 0.0

    async def step(self, batch: list[DecodeSequence]) -> None:
        """One step; where it fails, one for each sequence alone."""
        try:
            await self._run(batch)
        except _StepFailed as failed:
            fields = {"requests": ",".join(s.request.request_id for s in batch)}
            log.error("decode step failed", exc_info=failed.__cause__, extra={"fields": fields})
            for sequence in batch:
                await self._step_alone(sequence)

    async def _step_alone(self, sequence: DecodeSequence) -> None:
        """Runs one sequence of a step that failed: only who fails again is to blame."""
        if sequence.cancelled:
            return
        try:
            await self._run([sequence])
        except _StepFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, InvalidRequest):  # the request itself is to blame
                self._failed(sequence.entry, cause)
            else:
                self._failed(sequence.entry, InternalError(f"decode step failed: {cause}"))

    async def _run(self, batch: list[DecodeSequence]) -> None:
        began = time.perf_counter()
        rows = [sequence.rows() for sequence in batch]
        loop = asyncio.get_running_loop()
        try:
            steps = await loop.run_in_executor(self._compute, self._runner.step, rows)
        except Exception as error:
            raise _StepFailed from error
        duration = (time.perf_counter() - began) * 1e3
        self.step_ms = 0.9 * self.step_ms + 0.1 * duration if self.step_ms else duration
        tokens, accepted = self.tokens_generated, self.accepted
        for sequence, step in zip(batch, steps, strict=True):
            if not sequence.cancelled:
                self._apply(sequence, step, duration)
        if self.observe is not None:
            self.observe(
                DecodeStepFacts(
                    duration_s=time.perf_counter() - began,
                    model_s=steps[0].model_s,
                    num_sequences=len(steps),
                    num_tokens=self.tokens_generated - tokens,
                    drafted=sum(step.drafted for step in steps),
                    accepted=self.accepted - accepted,
                    pages_used=self._kv.status().used,
                )
            )

    def _apply(self, sequence: DecodeSequence, step: StepRows, duration: float) -> None:
        drafted, accepted = sequence.drafted, sequence.accepted
        chunk, complete = sequence.apply(step, duration)
        self._publish(sequence, complete)
        self.tokens_generated += len(chunk.token_ids)
        self.drafted += sequence.drafted - drafted
        self.accepted += sequence.accepted - accepted
        sequence.unread.append(chunk)
        sequence.queue.put_nowait(chunk)
        self._stepped(sequence, chunk)

    def _publish(self, sequence: DecodeSequence, complete: int) -> None:
        size = self._limits.page_format.page_size
        if (len(sequence.hashes) + 1) * size > complete:
            return
        root = root_hash(self._limits.secret, self._fingerprint, sequence.request.tenant)
        first, hashes = sequence.extend_hashes(self._limits.secret, root, size, complete)
        sequence.entry.reservation.publish(first, hashes)


class _StepFailed(Exception):
    """The compute thread raised; the cause says what."""
