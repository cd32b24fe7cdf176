"""The streams of answers: what a router reads, from the pages' arrival to the last token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from pdmesh.decode.admission import check_stream, new_sequence
from pdmesh.decode.adoption import Adoptions
from pdmesh.decode.framing import Framer
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.leases import Leases
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    PdmeshError,
)
from pdmesh.wire.handoff import ContinueRequest, StreamItem
from pdmesh.wire.logs import event
from pdmesh.wire.messages import StreamRequest, TokenChunk

log = logging.getLogger(__name__)


class Streams:
    """Args:
    let_go: ends a lease, with the reason; idempotent.
    handed_on: told of each chunk that a stream has handed on.
    join: lets a sequence join the batch.
    """

    def __init__(
        self,
        limits: DecodeLimits,
        receiver: TransferReceiver,
        leases: Leases,
        adoptions: Adoptions,
        let_go: Callable[[LeaseEntry, PdmeshError], None],
        handed_on: Callable[[DecodeSequence, TokenChunk], None],
        join: Callable[[DecodeSequence], None],
    ) -> None:
        self._limits = limits
        self._receiver = receiver
        self._leases = leases
        self._adoptions = adoptions
        self._let_go = let_go
        self._handed_on = handed_on
        self._join = join

    async def stream(self, request: StreamRequest) -> AsyncIterator[StreamItem]:
        """Waits for the pages, then yields the tokens of every step until the sequence ends.

        Steps that the reader lets pile up come in one chunk; see ``framing``.

        It ends without a ``finish`` where the sequence has moved to another worker.

        Raises:
            LeaseGone: the lease is over.
            InvalidRequest: it is being streamed already, was reserved for something else, or its
                grammar is stuck.
            TransferFailed: the pages did not arrive; nothing was generated.
            Cancelled: the lease was released, or its deadline passed, meanwhile.
            Preempted: its pages were needed by others, and could not be kept either.
            InternalError: its step failed, also when it ran alone.
        """
        entry = self._leases.find(request.lease_id)
        if entry is None or entry.generation != request.generation or entry.ended is not None:
            raise LeaseGone(f"lease {request.lease_id} is over")
        if entry.streaming:
            raise InvalidRequest(f"lease {request.lease_id} is being streamed already")
        hashes = check_stream(self._limits, entry.request, request)
        admit = partial(self._admit, entry, request, hashes)
        async with aclosing(self._serve(entry, admit)) as items:
            async for item in items:
                yield item

    async def continue_(self, request: ContinueRequest) -> AsyncIterator[StreamItem]:
        """Goes on with an adopted answer; the first item has no tokens, then as ``stream``.

        Raises:
            LeaseGone: the answer is not here, or not ready for this position.
            InvalidRequest: it is being streamed already.
            Cancelled, Preempted, InternalError: as ``stream``.
        """
        sequence = self._adoptions.activate(request)

        async def there() -> DecodeSequence:
            return sequence

        async with aclosing(self._serve(sequence.entry, there)) as items:
            async for item in items:
                yield item

    async def _serve(
        self, entry: LeaseEntry, admit: Callable[[], Awaitable[DecodeSequence]]
    ) -> AsyncGenerator[StreamItem, None]:
        entry.streaming = True
        try:
            sequence = await admit()
            framer = Framer(sequence.queue)
            while True:
                item, parts = await framer.next()
                if item is None:
                    return
                if isinstance(item, PdmeshError):
                    raise item
                yield item
                for part in parts:
                    if part.token_ids:
                        sequence.unread.remove(part)
                if isinstance(item, TokenChunk) and item.token_ids:
                    self._handed_on(sequence, item)
                if isinstance(item, TokenChunk) and item.finish is not None:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self._let_go(entry, Cancelled("the stream was cut"))
            raise
        except PdmeshError as error:
            self._let_go(entry, error)
            if entry.ended is not None and entry.ended is not error:
                raise entry.ended from error  # why it could not go on: the lease was ended
            raise
        finally:
            self._let_go(entry, InternalError("the stream ended"))

    async def _admit(
        self, entry: LeaseEntry, request: StreamRequest, hashes: list[bytes]
    ) -> DecodeSequence:
        """Waits for the prompt's pages; then the sequence joins the batch."""
        opened = time.monotonic()
        grammars, grammar = self._limits.grammars, request.sampling.grammar
        if grammars is not None and grammar:
            await asyncio.to_thread(grammars.compile, grammar)  # kept, and used again below
        assert entry.group is not None
        patience = max(0.001, entry.request.deadline_ms / 1e3)
        fin = await self._receiver.wait(entry.group.transfer_id, patience)
        if not self._leases.holds(entry):
            raise LeaseGone(f"lease {entry.lease_id} is over")
        sequence = new_sequence(self._limits, entry, request, fin, hashes)
        sequence.transfer_ms = (time.monotonic() - opened) * 1e3
        event(
            log,
            "arrived",
            request=request.request_id,
            attempt=request.attempt,
            lease=entry.lease_id,
            ms=f"{sequence.transfer_ms:.1f}",
        )
        self._leases.arrive(entry, hashes)
        entry.sequence = sequence
        self._join(sequence)
        return sequence
