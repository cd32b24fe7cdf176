"""One sequence on a decode worker, and the lease it lives in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from torch import Tensor

from pdmesh.decode.runner import SequenceRows, StepRows
from pdmesh.decode.speculate import Accepted, accept
from pdmesh.kvcache.manager import Reservation
from pdmesh.wire.errors import PdmeshError
from pdmesh.wire.hashes import child_hash
from pdmesh.wire.messages import ReserveRequest, StreamRequest, TokenChunk


@dataclass
class LeaseEntry:
    """A promise of pages to one request, from Reserve to Release.

    ``ended`` says why it was ended from outside, and is set once; the pages follow (``freed``)
    when no step touches them. It stays None where the sequence comes to its own end.
    """

    lease_id: str
    generation: int
    request: ReserveRequest
    reservation: Reservation
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    sequence: DecodeSequence | None = None
    streaming: bool = False
    ended: PdmeshError | None = None
    freed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class DecodeSequence:
    """Tokens, pages and position of a running sequence.

    ``computed`` positions have latents; ``tokens`` is one longer: its last token is known but not
    computed. ``pending`` [k, hidden]: see ``SequenceRows``.
    """

    entry: LeaseEntry
    request: StreamRequest
    tokens: list[int]
    computed: int
    pending: Tensor | None
    stop_tokens: frozenset[int]
    hashes: list[bytes]
    """Hashes of the published full pages; grows with the sequence."""
    generated: int = 1
    """Output tokens so far; the first came from prefill."""
    drafted: int = 0
    accepted: int = 0
    transfer_ms: float = 0.0
    done: bool = False
    queue: asyncio.Queue[TokenChunk | PdmeshError] = field(default_factory=asyncio.Queue)

    @property
    def cancelled(self) -> bool:
        """The lease was ended from outside: no further step runs."""
        return self.entry.ended is not None

    @property
    def room(self) -> int:
        """Output tokens that the request may still get."""
        return self.request.sampling.max_tokens - self.generated

    @property
    def wants_draft(self) -> bool:
        return self.pending is not None and self.room >= 2

    def pages_needed(self, page_size: int) -> int:
        """Pages that the next step touches, the draft's position included."""
        return (self.computed + self.wants_draft) // page_size + 1

    def rows(self) -> SequenceRows:
        """This sequence as the next step sees it."""
        return SequenceRows(
            tokens=self.tokens,
            page_table=tuple(self.entry.reservation.pages),
            computed=self.computed,
            sampling=self.request.sampling,
            output_position=self.request.output_offset + self.generated,
            draft=self.wants_draft,
            pending=self.pending,
        )

    def apply(self, step: StepRows, step_ms: float) -> tuple[TokenChunk, int]:
        """Takes over a step's result.

        Returns:
            The chunk to stream, and how many leading positions are complete in every layer, the
            MTP layer included.
        """
        result = accept(step.chosen, step.drafts, self.room, self.stop_tokens)
        first_position = self.request.output_offset + self.generated
        complete = self.computed + (1 if self.pending is not None else result.rows)
        self.computed += result.rows
        self.tokens.extend(result.tokens)
        self.generated += len(result.tokens)
        self.drafted += len(step.drafts)
        self.accepted += result.drafts_accepted
        if self.pending is not None:
            self.pending = step.hidden[: result.rows]
        self.done = result.finish is not None
        return self._chunk(result, step, first_position, step_ms), complete

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
