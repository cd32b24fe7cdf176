"""Which rank sends which page to which rank, when a prompt's latents are on several of each side.

A latent page is the same on every rank of an attention-parallel group, so any sender rank may send
any page and each page goes over the network once: page j goes from sender rank (j + r) mod TP_p to
receiver rank j mod TP_d, counted over the ranks that live, r drawn from the transfer's id. Both
sides compute the plan from what both know; nobody has to be told that it gets nothing. Each pair of
ranks that has pages is a part: a lease of its own, with its own id, opening, count, FIN and drain,
so that every rank is told of its own part by its own id. When a rank is lost, the plan of a new
generation is computed with the survivors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm

from pdmesh.wire.errors import InternalError


@dataclass(frozen=True, slots=True)
class Part:
    """What one sender rank sends to one receiver rank: an even-spaced run of prompt pages."""

    sender: int
    receiver: int
    first_page: int
    num_pages: int
    stride: int

    @property
    def pages(self) -> range:
        """Prompt page indices."""
        return range(self.first_page, self.first_page + self.num_pages * self.stride, self.stride)

    def lease_id(self, transfer_id: str) -> str:
        """The id of this part's own lease."""
        return f"{transfer_id}/{self.sender}-{self.receiver}"


def plan(
    transfer_id: str,
    first_page: int,
    num_pages: int,
    senders: Sequence[int],
    receivers: Sequence[int],
) -> tuple[Part, ...]:
    """The parts of a transfer of prompt pages ``first_page`` to ``num_pages - 1``.

    A pair of ranks has one part at most (the pages of a pair are one class modulo the least common
    multiple of the numbers of ranks). A receiver rank that gets no page has a part without pages:
    it has to learn of the end by a FIN too.

    Args:
        senders: ranks that live and hold the pages, in rising order; so for ``receivers``.

    Raises:
        InternalError: a side has no rank, or a rank twice.
    """
    for ranks in (senders, receivers):
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise InternalError(f"no plan for ranks {list(senders)} to {list(receivers)}")
    turn = int.from_bytes(blake2b(transfer_id.encode(), digest_size=4).digest(), "little")
    stride = lcm(len(senders), len(receivers))
    parts: list[Part] = []
    for start in range(first_page, min(first_page + stride, num_pages)):
        sender = senders[(start + turn) % len(senders)]
        receiver = receivers[start % len(receivers)]
        parts.append(Part(sender, receiver, start, len(range(start, num_pages, stride)), stride))
    told = {part.receiver for part in parts}
    for receiver in receivers:
        if receiver not in told:
            parts.append(Part(senders[turn % len(senders)], receiver, first_page, 0, stride))
    return tuple(sorted(parts, key=lambda part: (part.receiver, part.sender)))


def parts_to(parts: Sequence[Part], receiver: int) -> tuple[Part, ...]:
    """The parts that a receiver rank gets."""
    return tuple(part for part in parts if part.receiver == receiver)


def parts_from(parts: Sequence[Part], sender: int) -> tuple[Part, ...]:
    """The parts that a sender rank sends."""
    return tuple(part for part in parts if part.sender == sender)
