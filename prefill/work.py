"""One prompt on a prefill worker and what hangs on it: pages, transfer, the waiting caller."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch

from pdmesh.kvcache.reservation import Reservation
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.sender import Transfer
from pdmesh.model.grammar import Grammar, Grammars
from pdmesh.model.sampler import Choice, SamplingState
from pdmesh.prefill.runner import ChunkResult, PromptRows
from pdmesh.prefill.scheduler import Chunk, PrefillJob
from pdmesh.wire.errors import Incompatible, InvalidRequest, PdmeshError
from pdmesh.wire.hashes import PageFormat, page_hashes, root_hash
from pdmesh.wire.messages import Fin, FirstToken, PrefillRequest
from pdmesh.wire.sampling import check_token_ids


@dataclass(frozen=True)
class PrefillLimits:
    """What the worker checks a request against; without ``grammars`` none is served."""

    page_format: PageFormat
    vocab_size: int
    max_context: int
    secret: bytes
    grammars: Grammars | None = None

    def num_pages(self, num_tokens: int) -> int:
        """Pages of a prompt, the last partial one included."""
        return -(-num_tokens // self.page_format.page_size)

    def check(self, request: PrefillRequest, pool_pages: int) -> None:
        """Refuses what can never be computed, or would harm other prompts of its step.

        Raises:
            InvalidRequest: the prompt, a parameter or the lease's shape is wrong.
            Incompatible: the lease's pages are of another format.
        """
        tokens = len(request.token_ids)
        if not tokens:
            raise InvalidRequest("the prompt has no tokens")
        if tokens >= self.max_context:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens; "
                f"the context holds {self.max_context}, one of them for the answer"
            )
        if self.num_pages(tokens) > pool_pages:
            raise InvalidRequest(
                f"the prompt needs {self.num_pages(tokens)} pages, this worker has {pool_pages}"
            )
        check_token_ids(request.token_ids, self.vocab_size, "token_ids")
        request.sampling.validate(self.vocab_size)
        check_token_ids(request.eos_token_ids, self.vocab_size, "eos_token_ids")
        if request.sampling.grammar and self.grammars is None:
            raise InvalidRequest("this prefill worker serves no grammars")
        _check_answers(request)
        lease = request.lease
        if difference := self.page_format.difference(lease.page_format):
            raise Incompatible(f"prefill and decode worker do not fit together: {difference}")
        pages = self.num_pages(tokens)
        if lease.num_pages != pages or not 0 <= lease.cached_pages <= pages:
            raise InvalidRequest(
                f"the lease is for {lease.num_pages} pages, {lease.cached_pages} of them cached; "
                f"the prompt has {pages}"
            )

    def grammar(self, request: PrefillRequest) -> Grammar | None:
        """The request's grammar, compiled. Takes a while: not for an event loop.

        Raises:
            InvalidRequest: it is no grammar.
        """
        if not request.sampling.grammar or self.grammars is None:
            return None
        return self.grammars.compile(request.sampling.grammar)

    def job(self, job_id: str, request: PrefillRequest, arrived: float) -> PrefillJob:
        """The request for the scheduler; it was received at ``arrived``, seconds."""
        return PrefillJob(
            job_id,
            len(request.token_ids),
            priority=request.priority,
            arrived=arrived - request.waited_ms / 1e3,
            deadline=arrived + request.deadline_ms / 1e3,
            hashes=self.hashes(request),
        )

    def hashes(self, request: PrefillRequest) -> list[bytes]:
        """Hashes of the prompt's full pages."""
        root = root_hash(self.secret, self.page_format.fingerprint(), request.tenant)
        return page_hashes(self.secret, root, request.token_ids, self.page_format.page_size)


def _check_answers(request: PrefillRequest) -> None:
    if not 0 <= request.output_offset < len(request.token_ids):
        raise InvalidRequest(
            f"output_offset is {request.output_offset}; it counts from 0 and leaves a prompt"
            f" of the {len(request.token_ids)} tokens"
        )
    if request.sample_index < 0:
        raise InvalidRequest(f"sample_index is {request.sample_index}; it counts from 0")
    if request.waited_ms < 0:
        raise InvalidRequest(f"waited_ms is {request.waited_ms}; it counts from 0")
    answers = 1 + len(request.lease.forks)
    if request.n != answers:
        raise InvalidRequest(f"n is {request.n}; the lease is for {answers} answers")
    if request.n > 1 and request.output_offset:
        raise InvalidRequest(
            f"n is {request.n}; a prompt with tokens of an answer can have this answer only"
        )


@dataclass(eq=False)
class Work:
    """A job and what hangs on it.

    Times are monotonic, in seconds. ``pushed`` counts, for each layer, the prompt's leading pages
    that need no push any more; ``begun`` tells whether a chunk of it has been computed.
    """

    job: PrefillJob
    request: PrefillRequest
    limits: PrefillLimits
    store: LatentStore
    transfer: Transfer
    first: asyncio.Future[FirstToken]
    arrived: float
    grammar: Grammar | None = None
    pushed: list[int] = field(init=False)
    started: float = 0.0
    begun: bool = False
    reservation: Reservation | None = None
    carry: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.pushed = [self.request.lease.cached_pages] * self.limits.page_format.num_layers
        self.first.add_done_callback(_retrieve)

    @property
    def pages(self) -> Reservation:
        """The reservation of a job that has started."""
        assert self.reservation is not None
        return self.reservation

    @property
    def cached_tokens(self) -> int:
        """Positions that the prefix cache spared a job that has started."""
        return min(self.job.write_from, self.job.num_tokens - 1)

    def refuse(self, error: PdmeshError) -> None:
        """Ends the job with an error, between steps; the caller is told if it still waits."""
        self.job.cancelled = True
        if not self.first.done():
            self.first.set_exception(error)

    def rows(self, chunk: Chunk) -> PromptRows:
        """A chunk as the model sees it."""
        end = chunk.end
        page_table = tuple(self.pages.pages)
        return PromptRows(
            tokens=self.request.token_ids,
            page_table=page_table,
            start=chunk.start,
            end=end,
            write_from=chunk.write_from,
            cached_tokens=self.job.write_from,
            last=chunk.last,
            choices=self._choices,
            push=lambda layer: self._push(page_table, layer, end),
            carry=self.carry,
        )

    def _choices(self) -> list[Choice]:
        """How the first token of each answer is chosen. On the compute thread."""
        request = self.request
        split = len(request.token_ids) - request.output_offset
        return [
            SamplingState(
                request.sampling,
                request.token_ids[:split],
                eos=request.eos_token_ids,
                index=request.sample_index + answer,
                grammar=self.grammar,
                output=request.token_ids[split:],
            ).choice()
            for answer in range(request.n)
        ]

    def _push(self, page_table: tuple[int, ...], layer: int, end: int) -> None:
        """Pushes the pages of ``layer`` that are complete below position ``end``.

        Pages that the prefill worker had cached and decode lacks go out with the first chunk. A
        chunk that is computed again pushes what its first attempt did not. On the compute thread.
        """
        size = self.limits.page_format.page_size
        complete = end // size if end < self.job.num_tokens else self.request.lease.num_pages
        first = self.pushed[layer]
        if first < complete:
            self.transfer.push_layer(self.store, first, layer, page_table[first:complete])
            self.pushed[layer] = complete

    def publish(self, end: int) -> None:
        """Shares the full pages below position ``end``: all their layers are written."""
        first = self.pages.matched
        full = end // self.limits.page_format.page_size
        self.pages.publish(first, self.job.hashes[first:full])

    def answer(self, result: ChunkResult, now: float) -> FirstToken:
        """What the caller gets once the last chunk is computed; ``now`` is monotonic, seconds."""
        lease, tokens = self.request.lease, self.job.num_tokens
        return FirstToken(
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            cached_tokens=self.cached_tokens,
            computed_tokens=tokens - self.cached_tokens,
            pushed_pages=lease.num_pages - lease.cached_pages,
            queue_ms=(self.started - self.arrived) * 1e3,
            compute_ms=(now - self.started) * 1e3,
        )

    def fin(self, tokens: tuple[int, ...]) -> Fin:
        """What decode needs besides the pages: the first token of each answer, and for MTP."""
        lease, page_format = self.request.lease, self.limits.page_format
        with_hidden = page_format.mtp_layers > 0 and self.carry is not None
        return Fin(
            lease_id=lease.lease_id,
            generation=lease.generation,
            request_id=self.request.request_id,
            num_writes=(lease.num_pages - lease.cached_pages) * page_format.num_layers,
            first_tokens=tokens,
            last_hidden=_raw(self.carry) if with_hidden else b"",
        )


def _raw(hidden: torch.Tensor | None) -> bytes:
    """The bytes of a hidden state, whatever its dtype."""
    assert hidden is not None
    return hidden.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _retrieve(first: asyncio.Future[FirstToken]) -> None:
    """Marks an error as seen: the caller may have left before it came."""
    if not first.cancelled():
        first.exception()
