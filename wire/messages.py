"""Messages between router and workers: MessagePack, one struct a message.

The order of a request: the router sends ``ReserveRequest`` to a decode worker and gets a
``Lease``; sends ``PrefillRequest`` with the lease to a prefill worker and gets a ``FirstToken``;
opens ``StreamRequest`` at the decode worker and gets ``StreamItem``s; sends ``ReleaseRequest``.
A running answer that moves to another decode worker: see ``handoff``. Cached pages that one worker
reads from another: see ``pulls``. Positions count from 0 at the first prompt token; output position
0 is the first generated token.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.sampling import SamplingParams

PROTOCOL_VERSION = 3
"""Raised with every change of a message; peers of another version are refused by name."""

Role = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Log-probability of a chosen token, and of the most likely ones at its position."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PageSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that is said to hold a prompt's leading pages; a hint, never a promise."""

    instance: str
    role: Role
    address: str
    """host:port of its internal gRPC server."""
    pages: int
    """How many leading pages."""


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to decode: promise pages for a prompt and all it may generate."""

    request_id: str
    attempt: int
    num_prompt_tokens: int
    hashes: tuple[bytes, ...]
    """Hashes of the prompt's full pages."""
    tenant: str = ""
    max_tokens: int
    """Of each answer."""
    n: int = 1
    """Answers that share the prompt's pages; the promise is for all of them."""
    priority: int = 0
    """Higher goes first."""
    waited_ms: int = 0
    """How long the request has been in the mesh already; keeps its place after a retry."""
    wait_ms: int = 0
    """How long to wait for room; 0 answers at once."""
    ticket: str = ""
    """Names the reservation while it waits: a Release of it takes it out of the line. Whether it
    still was in the line, the answer to the reservation says."""
    sources: tuple[PageSource, ...] = ()
    """Who may have prompt pages that this worker lacks, best first."""
    deadline_ms: int
    """Milliseconds from receipt after which the decode worker starts to drain the lease."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decode to router, and on to prefill: where one writer may put the missing pages."""

    lease_id: str
    generation: int
    instance: str
    """Instance of the decode worker."""
    cached_pages: int
    """Leading prompt pages that the decode worker holds already; they are not sent."""
    num_pages: int
    """Pages that the prompt needs in all (the last may be partial)."""
    forks: tuple[str, ...] = ()
    """Lease ids of the further answers (n - 1), of the same generation; each is streamed and
    released on its own. Their pages come from this lease, so prefill does not see them."""
    transports: tuple[tuple[str, str], ...]
    """(name, address) of each transport the receiver listens on, best first."""
    page_format: PageFormat


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to prefill: compute a prompt, push its pages, return the first token."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    tenant: str = ""
    sampling: SamplingParams
    output_offset: int = 0
    """Output tokens already in token_ids (after a failover); keeps seeded choices in step."""
    n: int = 1
    """First tokens wanted: of the answers sample_index, sample_index + 1, ..."""
    sample_index: int = 0
    priority: int = 0
    waited_ms: int = 0
    """As in ReserveRequest."""
    eos_token_ids: tuple[int, ...] = ()
    sources: tuple[PageSource, ...] = ()
    """Who may have prompt pages that this worker lacks, best first."""
    lease: Lease
    deadline_ms: int


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prefill to router: the first token of each answer and what the prompt cost."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token where they were asked for."""
    cached_tokens: int
    """Prompt tokens whose latents came from the prefill worker's prefix cache."""
    computed_tokens: int
    pushed_pages: int
    queue_ms: float = 0.0
    compute_ms: float = 0.0


class Fin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prefill to decode, over the transport, after the last page (also after no page at all)."""

    lease_id: str
    generation: int
    request_id: str
    num_writes: int
    """(page, layer) writes made under this generation."""
    first_tokens: tuple[int, ...]
    """One for each answer, in the order of the lease and its forks."""
    last_hidden: bytes = b""
    """Hidden state of the last prompt position before the final norm, raw bytes in the model's
    dtype; input of the first MTP draft. Empty where MTP is off."""


class StreamRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to decode: generate from a lease; the first token came from prefill."""

    lease_id: str
    generation: int
    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    """The prompt (and, after a failover, what was generated before)."""
    first_token: int
    sampling: SamplingParams
    """``max_tokens`` counts the first token too."""
    output_offset: int = 0
    sample_index: int = 0
    """Which of the request's answers this is."""
    eos_token_ids: tuple[int, ...] = ()
    tenant: str = ""


class TokenChunk(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tokens", gc=False
):
    """Decode to router: tokens of one sequence, of one step or, where the router was behind, of
    several that follow each other."""

    attempt: int
    position: int
    """Output position of the first token here; the first token of prefill has position 0."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop token that ended the sequence; it is not among token_ids."""
    drafted: int = 0
    accepted: int = 0
    """Draft tokens verified and accepted so far."""
    transfer_ms: float = 0.0
    step_ms: float = 0.0
    """Of all the steps together."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to decode: the request is over; free what the lease holds. Idempotent."""

    lease_id: str
    """Or the ticket of a reservation that may still wait."""
    reason: str


class Empty(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """No content."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pages of one worker by state; they add up to ``total``."""

    total: int
    free: int
    reserved: int
    used: int
    cached: int
    quarantined: int


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an expert-parallel group."""

    rank: int
    size: int
    """Ranks of the group when all are there."""
    members: tuple[int, ...]
    """Those that compute together now."""
    steps: int
    """Taken part in so far, also with nothing of its own to compute."""
    repeated: int
    """Of them, ended by the loss of a rank and computed again."""
    sent_bytes: int
    """To other ranks."""
    plan: int = 0
    """The placement of experts in use: 0 the first one, others by number."""
    virtual: bool = False
    """All ranks of the group are in this one process; ``rank`` is the first one."""
    heads: tuple[int, ...] = ()
    """Ranks that share the attention heads of this worker's rows now; empty: it has them all."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker answers about itself."""

    worker_id: str
    instance: str
    role: Role
    state: Literal["starting", "ready", "draining"]
    page_format: PageFormat
    pool: PoolStatus
    queued: int
    running: int
    leases: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    cancelled: int = 0
    preempted: int = 0
    """Sequences that had to give their pages up for a while."""
    parked: int = 0
    """Sequences whose pages are set aside now, waiting for room."""
    drafted: int = 0
    accepted: int = 0
    """Draft tokens verified, and of those accepted."""
    step_ms: float = 0.0
    """Moving average of a step's duration."""
    step_limit: int = 0
    """The most that one step computes: tokens (prefill) or sequences (decode). 0: not said."""
    moved_in: int = 0
    """Running answers taken over from other decode workers."""
    moved_out: int = 0
    """Running answers handed over to other decode workers."""
    pulled_pages: int = 0
    """Cached pages read from other workers, and validated."""
    transports: tuple[str, ...] = ()
    """For pages: prefill, those of its open connections; decode, those it offers, best first."""
    ranks: RankStatus | None = None
    """None where the worker computes alone, as one rank."""
    problems: tuple[str, ...] = ()
    """What check_integrity found; empty when all is well."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker registers in Redis."""

    worker_id: str
    instance: str
    role: Role
    address: str
    """host:port of its internal gRPC server."""
    page_format: PageFormat
    model: str
    vocab_size: int
    max_context: int
    capacity_pages: int
    metrics_port: int = 0
    """Of the Prometheus endpoint at the address' host; 0: none."""
    protocol: int = PROTOCOL_VERSION
