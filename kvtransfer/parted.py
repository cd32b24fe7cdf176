"""The receiving side of a transfer that several sender ranks share: a lease a part, one outcome."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.reshard import Part
from pdmesh.wire.errors import InternalError, LeaseGone
from pdmesh.wire.messages import Fin


class PartedReceiver:
    """Receives parted transfers at one rank, by a ``TransferReceiver`` of that rank.

    Every sender of a part is answered, refused and waited for by its own lease id, as any sender
    is; this class only joins the outcomes. Each ``expect`` ends in ``cancel``, as there.

    Args:
        receiver: its ``on_drained`` is taken over; what concerns no part goes to the one it had.
        on_drained: called with a transfer id when the quarantine that ``cancel`` spoke of is over.
    """

    def __init__(
        self, receiver: TransferReceiver, on_drained: Callable[[str], None] | None = None
    ) -> None:
        self._receiver = receiver
        self._on_drained = on_drained
        self._others = receiver.on_drained
        receiver.on_drained = self._part_drained
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._draining: dict[str, set[str]] = {}
        self._transfer_of: dict[str, str] = {}

    def expect(
        self,
        transfer_id: str,
        generation: int,
        parts: Sequence[Part],
        page_ids: Mapping[int, int],
        num_layers: int,
    ) -> None:
        """Lets the sender of each part write.

        Args:
            parts: those of this rank.
            page_ids: physical page of each prompt page of the parts.

        Raises:
            InternalError: as ``TransferReceiver.expect``; then no part is expected.
        """
        with self._lock:
            if transfer_id in self._parts or transfer_id in self._draining:
                raise InternalError(f"transfer {transfer_id} is expected already")
        done: list[str] = []
        try:
            for part in parts:
                lease_id = part.lease_id(transfer_id)
                self._receiver.expect(
                    lease_id,
                    generation,
                    [page_ids[page] for page in part.pages],
                    part.first_page,
                    num_layers,
                    request_id=transfer_id,
                    stride=part.stride,
                )
                done.append(lease_id)
        except InternalError:
            for lease_id in done:
                self._receiver.cancel(lease_id)
            raise
        with self._lock:
            self._parts[transfer_id] = tuple(parts)

    async def wait(self, transfer_id: str, timeout: float) -> tuple[Fin, ...]:
        """The FIN of every part, once all pages are in place.

        Raises:
            TransferFailed: as ``TransferReceiver.wait``, of the first part that fails.
            LeaseGone: no such transfer is expected.
        """
        ids = [part.lease_id(transfer_id) for part in self._known(transfer_id)]
        waits = [asyncio.ensure_future(self._receiver.wait(one, timeout)) for one in ids]
        try:
            return tuple(await asyncio.gather(*waits))
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def cancel(self, transfer_id: str) -> bool:
        """Stops every part and forgets the transfer. Idempotent.

        Returns:
            True when no write can land any more; else ``on_drained`` is called once none can.
        """
        with self._lock:
            parts = self._parts.pop(transfer_id, ())
            ids = {part.lease_id(transfer_id) for part in parts}
            if not ids:
                return transfer_id not in self._draining
            self._draining[transfer_id] = set(ids)
            self._transfer_of.update(dict.fromkeys(ids, transfer_id))
        over = [lease_id for lease_id in ids if self._receiver.cancel(lease_id)]
        ended = [self._ended(lease_id) for lease_id in over]
        return any(ended)

    def salvage(self, transfer_id: str, parts: Sequence[Part], first_page: int) -> int:
        """Leading prompt pages from ``first_page`` on that are complete in a failed transfer.

        Raises:
            InternalError: a write may still land in a part.
        """
        kept: set[int] = set()
        for part in parts:
            kept.update(part.pages[: self._receiver.salvage(part.lease_id(transfer_id))])
        count = 0
        while first_page + count in kept:
            count += 1
        return count

    def _known(self, transfer_id: str) -> tuple[Part, ...]:
        with self._lock:
            if transfer_id not in self._parts:
                raise LeaseGone(f"transfer {transfer_id} is not expected here")
            return self._parts[transfer_id]

    def _ended(self, lease_id: str) -> bool:
        """Notes that a cancelled part has ended; whether its transfer has, with it."""
        with self._lock:
            transfer_id = self._transfer_of.pop(lease_id)
            left = self._draining[transfer_id]
            left.discard(lease_id)
            if left:
                return False
            del self._draining[transfer_id]
            return True

    def _part_drained(self, lease_id: str) -> None:
        with self._lock:
            transfer_id = self._transfer_of.get(lease_id)
        if transfer_id is None:
            if self._others is not None:
                self._others(lease_id)
        elif self._ended(lease_id) and self._on_drained is not None:
            self._on_drained(transfer_id)
