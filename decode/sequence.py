"""One sequence on a decode worker, and the lease it lives in."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmesh.decode.config import MAX_DRAFTS
from pdmesh.decode.drafter import SequenceRows
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.runner import StepRows
from pdmesh.decode.speculate import Accepted
from pdmesh.model.sampler import SamplingState
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.handoff import StreamItem
from pdmesh.wire.hashes import child_hash
from pdmesh.wire.messages import StreamRequest, TokenChunk


@dataclass(eq=False)
class DecodeSequence:
    """Tokens, pages and position of a running sequence.

    ``computed`` positions have latents; ``tokens`` is one longer: its last token is known but not
    computed. ``sampling`` stands after the last of them. ``pending`` [k, hidden]: see
    ``SequenceRows``; it grows while nothing is drafted, up to a page.
    """

    entry: LeaseEntry
    request: StreamRequest
    tokens: list[int]
    computed: int
    pending: Tensor | None
    sampling: SamplingState
    hashes: list[bytes]
    """Hashes of the published full pages; grows with the sequence."""
    generated: int = 1
    """Output tokens so far; the first came from prefill."""
    drafted: int = 0
    accepted: int = 0
    transfer_ms: float = 0.0
    done: bool = False
    queue: asyncio.Queue[StreamItem | PdmeshError | None] = field(default_factory=asyncio.Queue)
    """For its stream; None ends the stream of a sequence that goes on elsewhere."""
    unread: deque[TokenChunk] = field(default_factory=deque)
    """Chunks that the stream has not handed on yet."""
    moving: bool = False
    """A handoff to another worker is under way."""
    stopping: bool = False
    """It is to leave the batch before the next step, for a handoff."""

    @property
    def cancelled(self) -> bool:
        """The lease was ended from outside: no further step runs."""
        return self.entry.ended is not None

    @property
    def pinned(self) -> bool:
        """Its pages cannot be set aside: they are being copied to another worker."""
        return self.moving or self.entry.readers > 0

    @property
    def room(self) -> int:
        """Output tokens that the request may still get."""
        return self.request.sampling.max_tokens - self.generated

    def pages_needed(self, page_size: int, look_ahead: int = MAX_DRAFTS) -> int:
        """Pages that the next step touches if it drafts ``look_ahead`` tokens.

        Those of ``look_ahead`` 0 are needed; with fewer than the others a step drafts less.
        """
        drafts = 0 if self.pending is None else min(look_ahead, self.room - 1)
        return (self.computed + max(0, drafts)) // page_size + 1

    def rows(self) -> SequenceRows:
        """This sequence as the next step sees it."""
        return SequenceRows(
            tokens=self.tokens,
            page_table=self.entry.reservation.page_table,
            computed=self.computed,
            sampling=self.sampling,
            room=self.room,
            pending=self.pending,
        )

    def apply(self, step: StepRows, step_ms: float) -> tuple[TokenChunk, int]:
        """Takes over a step's result.

        Returns:
            The chunk to stream, and how many leading positions are complete in every layer, the
            MTP layer included.
        """
        result = self._advance(step.accepted)
        first_position = self.request.output_offset + self.generated
        kept = len(result.path)
        complete = self._complete(step, kept)
        self.computed += kept
        self.tokens.extend(result.tokens)
        self.generated += len(result.tokens)
        self.drafted += step.drafted
        self.accepted += result.drafts_accepted
        self.done = result.finish is not None
        return self._chunk(result, step, first_position, step_ms), complete

    def _advance(self, accepted: Accepted) -> Accepted:
        """Tells the sampling state of the tokens; where a grammar ends, so does the sequence."""
        for count, token in enumerate(accepted.tokens, 1):
            self.sampling.advance((token,))
            if self.sampling.ended:
                return accepted.cut(count)
        return accepted

    def _complete(self, step: StepRows, kept: int) -> int:
        """Leading positions whose latents are true in every layer; keeps what MTP rows still lack.

        The MTP latents of this step's positions come from drafts, if they were written at all: they
        count once they have been computed from ``pending``.
        """
        if self.pending is None:
            return self.computed + kept
        rows = step.hidden[:kept]
        if step.filled:
            self.pending = rows
            return self.computed + 1
        complete = self.computed + 1 - self.pending.shape[0]
        self.pending = torch.cat([self.pending.to(rows.device), rows])
        return complete

    def _chunk(self, result: Accepted, step: StepRows, position: int, step_ms: float) -> TokenChunk:
        wanted = [entry for entry in step.logprobs[: len(result.tokens)] if entry is not None]
        return TokenChunk(
            attempt=self.request.attempt,
            position=position,
            token_ids=result.tokens,
            logprobs=tuple(wanted),
            finish=result.finish,
            stop_token=result.stop_token,
            drafted=self.drafted,
            accepted=self.accepted,
            transfer_ms=self.transfer_ms,
            step_ms=step_ms,
        )

    def extend_hashes(
        self, secret: bytes, root: bytes, page_size: int, complete: int
    ) -> tuple[int, list[bytes]]:
        """Hashes of pages that became full: (index of the first, hashes)."""
        first = len(self.hashes)
        while (len(self.hashes) + 1) * page_size <= complete:
            start = len(self.hashes) * page_size
            parent = self.hashes[-1] if self.hashes else root
            page = self.tokens[start : start + page_size]
            self.hashes.append(child_hash(secret, parent, page))
        return first, self.hashes[first:]
