"""Messages of a running answer that moves from one decode worker (source) to another (target).

1. Router to source: ``MigrateRequest`` (handoff m of this answer, and the target).
2. Source to target: ``ChecksumsRequest`` (``fast`` arithmetic only: which of the pages that the
   target has cached are the same bits), then ``AdoptRequest``; the target promises every page that
   the answer can still need, by count: ``Adoption``.
3. Source to target, once a round: ``RoundRequest`` gets a ``Lease`` for an ordinary push of pages.
4. Source to target: ``CapsuleMessage``; ``Ready`` comes when all rounds have arrived.
5. Source to router, in the answer's stream: ``CommitAsked`` (or ``AbortAsked``).
6. Router to target: ``ContinueRequest``, which opens the answer's new stream; router to source:
   ``DecideRequest``. The target's lease is released by the router as any other.

Every step is idempotent by (lease, handoff). A handoff is named by a number that the router raises.
"""

from __future__ import annotations

import msgspec

from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import StreamRequest, TokenChunk, WorkerRecord

HANDOFF_ABORTED = "the handoff was aborted"
"""Reason of a Release by the source: a target that generates already takes no notice of it."""


class MigrateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to source: move this answer. Answered at once; the stream tells how it went."""

    lease_id: str
    """Of the answer, at the source."""
    generation: int
    handoff: int
    target: WorkerRecord
    acknowledged: int
    """Output positions (counted over the whole answer) that the router has."""


class DecideRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to source: what became of a handoff."""

    lease_id: str
    handoff: int
    committed: bool


class CommitAsked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="commit"):
    """Source to router, in the stream: the target is ready to go on with the next attempt."""

    attempt: int
    handoff: int
    lease_id: str
    """At the target."""
    generation: int
    tail: TokenChunk
    """Every token that the router has not acknowledged; may be without tokens."""


class AbortAsked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Source to router, in the stream: this handoff will not do."""

    handoff: int
    reason: str
    lease_id: str = ""
    """At the target, if it has promised any."""


StreamItem = TokenChunk | CommitAsked | AbortAsked
"""What comes in an answer's stream."""


class ChecksumsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Anyone to a worker: what do your cached pages of this prefix hold?"""

    hashes: tuple[bytes, ...]


class PageChecksums(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """CRC-32 of the leading pages that are cached, all layers of a page together."""

    checksums: tuple[int, ...]
    stamps: tuple[tuple[int, int], ...]
    """(page id, how often it had been taken): tells later whether it is still the same page."""


class AdoptRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source to target: promise pages for all that an answer can still need."""

    handoff_id: str
    """Unique: the source's lease id and the handoff's number."""
    source: str
    """Instance of the source."""
    request_id: str
    page_format: PageFormat
    hashes: tuple[bytes, ...]
    """Of leading full pages that the target may use if it has them."""
    stamps: tuple[tuple[int, int], ...] = ()
    """With them only if they are these very pages; empty: any page of that hash will do."""
    num_tokens: int
    """Prompt and output so far."""
    max_tokens: int
    """That may still be generated."""
    priority: int = 0
    waited_ms: int = 0
    deadline_ms: int


class Adoption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Target to source: the pages are promised."""

    lease_id: str
    generation: int
    instance: str
    have_pages: int
    """Leading pages that are here already."""
    transports: tuple[tuple[str, str], ...] = ()
    """Where pages will go, best first, so that the source can connect while the answer goes on."""


class RoundRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source to target: these pages come next. Answered with a ``Lease`` of their own, whose
    ``cached_pages`` is the first page and ``num_pages`` the end."""

    lease_id: str
    """Of the adoption."""
    index: int
    first_page: int
    num_pages: int


class CapsuleMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source to target: everything besides pages that the answer needs to go on."""

    lease_id: str
    """Of the adoption."""
    request: StreamRequest
    """The stream as it was opened at its first decode worker; ``attempt`` will be another."""
    output: tuple[int, ...]
    """Every token after ``request.token_ids``, the first token of prefill included; the last one
    has no latent yet."""
    computed: int
    """Positions with latents in the pages."""
    complete_pages: int
    """Leading pages that are full and complete in every layer, the MTP layer included."""
    num_pages: int
    num_rounds: int
    pending_hidden: bytes = b""
    """[k, hidden], raw bytes in the model's dtype: hidden states before the final norm whose MTP
    latents are not computed yet. Empty where MTP is off."""
    drafted: int = 0
    accepted: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Target to source: pages and capsule up to this number of tokens are here."""

    num_tokens: int


class ContinueRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Router to target: generate as ``attempt`` from here. Answered by the answer's stream, whose
    first item has no tokens and says that it is active."""

    lease_id: str
    generation: int
    attempt: int
    position: int
    """Output position (counted over the whole answer) of the next token."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To a worker: take nothing new. Idempotent; answered with its status. Decode: routers move
    the running answers away. The process goes on until it is told to end."""

    reason: str = ""
