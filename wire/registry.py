"""What workers say about their entries in the registry."""

from __future__ import annotations

import msgspec


class IndexDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own count of its pages, partition by partition; the answer of ``Digests``."""

    slot: int
    epoch: int
    settled: bool
    """Whether the store has confirmed every change; if not, differences are to be expected."""
    counts: tuple[int, ...]
    xors: tuple[int, ...]
    """Exclusive or of the pages' 7-byte marks."""
