"""What the source of a migration is told, and what it has done: its events and effects."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.kvtransfer.protocol.migration import Capsule


@dataclass(frozen=True, slots=True)
class MigrateAsked:
    handoff: int
    target: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """A decode step's new tokens, and the pages that are full after it."""

    tokens: tuple[int, ...]
    full_pages: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """After ``StopDecoding``: no step is under way and none will start."""

    computed: int
    num_pages: int
    pending_hidden: bytes = b""


@dataclass(frozen=True, slots=True)
class ChunkAcknowledged:
    """The gateway has all output positions below ``position``."""

    position: int


@dataclass(frozen=True, slots=True)
class TargetGranted:
    """The target has promised the pages, and has the first ``have_pages`` of them already."""

    handoff: int
    have_pages: int


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """The target refused, gave up, or was lost; or a round of pages failed."""

    handoff: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundDone:
    """The target has acknowledged every write of a round."""

    handoff: int
    index: int


@dataclass(frozen=True, slots=True)
class TargetReady:
    handoff: int
    position: int


@dataclass(frozen=True, slots=True)
class Committed:
    handoff: int


@dataclass(frozen=True, slots=True)
class Aborted:
    handoff: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The gateway takes tokens of ``attempt`` only."""

    attempt: int


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The stream to the gateway is gone, and with it everybody who wants the tokens."""


@dataclass(frozen=True, slots=True)
class Reminded:
    """An answer is overdue."""


Event = (
    MigrateAsked
    | Stepped
    | Stopped
    | ChunkAcknowledged
    | TargetGranted
    | TargetFailed
    | RoundDone
    | TargetReady
    | Committed
    | Aborted
    | Fenced
    | GatewayLost
    | Reminded
)


@dataclass(frozen=True, slots=True)
class PostReserve:
    """Ask the target for every page the answer can still need, by count."""

    handoff: int
    target: str


@dataclass(frozen=True, slots=True)
class StartRound:
    """Copy these pages as one transfer."""

    handoff: int
    index: int
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class StopDecoding:
    """Start no further step of this answer; ``Stopped`` follows."""


@dataclass(frozen=True, slots=True)
class PostCapsule:
    handoff: int
    capsule: Capsule


@dataclass(frozen=True, slots=True)
class PostCommit:
    """To the gateway: hand attempt ``attempt`` over, with the tokens from ``position`` on."""

    attempt: int
    handoff: int
    target: str
    position: int
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PostAbort:
    """To the gateway: this handoff is not wanted."""

    handoff: int


@dataclass(frozen=True, slots=True)
class AbortTarget:
    """Abort the rounds under way and tell the target."""

    handoff: int


@dataclass(frozen=True, slots=True)
class PostTokens:
    attempt: int
    position: int
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """Steps may run again."""


@dataclass(frozen=True, slots=True)
class Free:
    """The answer is over here; give the pages back when no transfer reads them."""


Effect = (
    PostReserve
    | StartRound
    | StopDecoding
    | PostCapsule
    | PostCommit
    | PostAbort
    | AbortTarget
    | PostTokens
    | Resume
    | Free
)
