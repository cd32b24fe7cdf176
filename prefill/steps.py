"""Steps of a prefill worker on its one compute thread; a failed one is taken apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pdmesh.prefill.facts import PrefillStepFacts
from pdmesh.prefill.runner import ChunkResult, PrefillRunner
from pdmesh.prefill.scheduler import Chunk
from pdmesh.prefill.work import Work

log = logging.getLogger(__name__)

Outcome = ChunkResult | Exception


class Steps:
    """Runs batches one after another beside the event loop."""

    def __init__(self, runner: PrefillRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "prefill-compute")

    async def run(self, batch: Sequence[tuple[Work, Chunk]]) -> list[Outcome]:
        """What each chunk gives, or why it failed.

        A batch of several that fails is done again, each chunk alone: only a prompt that fails
        alone has failed. What a chunk has written and pushed is written again with the same bits,
        and not pushed again.
        """
        results = await self._attempt(batch)
        if not isinstance(results, Exception):
            return list(results)
        if len(batch) == 1:
            return [results]
        outcomes: list[Outcome] = []
        for pair in batch:
            alone = await self._attempt([pair])
            outcomes.append(alone if isinstance(alone, Exception) else alone[0])
        return outcomes

    async def _attempt(self, batch: Sequence[tuple[Work, Chunk]]) -> list[ChunkResult] | Exception:
        rows = [work.rows(chunk) for work, chunk in batch]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._runner.step, rows)
        except Exception as error:
            requests = ",".join(work.request.request_id for work, _ in batch)
            log.exception("prefill step failed", extra={"fields": {"requests": requests}})
            return error

    def close(self) -> None:
        """Ends the thread after the step under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def step_facts(
    duration_s: float, batch: Sequence[tuple[Work, Chunk]], outcomes: Sequence[Outcome]
) -> PrefillStepFacts:
    """The figures of a step; before its chunks are marked as computed."""
    computed = [
        pair
        for pair, outcome in zip(batch, outcomes, strict=True)
        if not isinstance(outcome, Exception)
    ]
    fresh = [work for work, _ in computed if not work.begun]
    return PrefillStepFacts(
        duration_s=duration_s,
        num_prompts=len(computed),
        num_tokens=sum(chunk.end - chunk.start for _, chunk in computed),
        cached_tokens=sum(work.cached_tokens for work in fresh),
        queue_s=tuple(work.started - work.arrived for work in fresh),
        failed_prompts=len(batch) - len(computed),
    )
