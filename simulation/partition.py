"""One partition of the store as a plain model: what ``registry/pages.lua`` does, without a server.

The simulation runs on it, and property tests compare the functions with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdmesh.registry.layout import (
    Hit,
    PageEvent,
    Row,
    joined,
    pack_event,
    pack_hits,
    pack_row,
    unpack_group,
    xor_of,
)

_TAGS = 65_535


class PartitionModel:
    """Rows, records and events of one partition.

    Attributes:
        records: bucket -> mark -> slot -> tag, in the order in which they were written.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.records: dict[int, dict[bytes, dict[int, int]]] = {}
        self.events: list[tuple[str, PageEvent]] = []

    def call(self, name: str, buckets: Sequence[int], args: Sequence[Any]) -> Any:
        """One function, with the answer it gives."""
        if name in ("publish", "evict"):
            return self._change(name == "publish", [int(a) for a in args[:3]], args[3:])
        others: dict[str, Callable[[], Any]] = {
            "fence": lambda: self._fence(int(args[0]), int(args[1])),
            "lookup": lambda: self._lookup(args[0]),
            "copies": lambda: self._copies(args),
            "position": self._position,
            "dump": lambda: self._dump(buckets),
            "sweep": lambda: self._sweep(buckets),
            "digest": lambda: pack_row(row) if (row := self.rows.get(int(args[0]))) else b"",
        }
        return others[name]()

    def owned(self, slot: int) -> set[bytes]:
        """Marks of the slot's live records."""
        row = self.rows.get(slot)
        return {
            mark
            for pages in self.records.values()
            for mark, owners in pages.items()
            if row is not None and owners.get(slot) == row.tag
        }

    def _change(self, publish: bool, head: list[int], groups: Sequence[bytes]) -> list[bytes]:
        slot, epoch, seq = head
        row = self.rows.get(slot)
        if row is None:
            return [b"UNREGISTERED"]
        if epoch != row.epoch:
            return [b"FENCED" if epoch < row.epoch else b"FUTURE", str(row.epoch).encode()]
        if seq != row.seq + 1:
            return [b"DUP" if seq <= row.seq else b"GAP", str(row.seq).encode()]
        told: list[bytes] = []
        changed: list[bytes] = []
        for group in groups:
            bucket, marks = unpack_group(group)
            told += marks
            pages = self.records.setdefault(bucket, {})
            for mark in marks:
                live = pages.get(mark, {}).get(slot) == row.tag
                if live != publish:
                    changed.append(mark)
                if publish:
                    pages.setdefault(mark, {})[slot] = row.tag
                elif mark in pages:
                    pages[mark].pop(slot, None)
                    if not pages[mark]:
                        del pages[mark]
            if not pages:
                del self.records[bucket]
        held = row.pages + (len(changed) if publish else -len(changed))
        self.rows[slot] = Row(epoch, row.tag, seq, held, row.xor ^ xor_of(changed))
        self._tell(PageEvent("publish" if publish else "evict", slot, epoch, seq, joined(told)))
        return [b"OK"]

    def _fence(self, slot: int, epoch: int) -> list[bytes]:
        row = self.rows.get(slot)
        if row is not None and epoch <= row.epoch:
            return [b"SAME"] if epoch == row.epoch else [b"FENCED", str(row.epoch).encode()]
        tag = (row.tag if row is not None else 0) % _TAGS + 1
        self.rows[slot] = Row(epoch, tag, 0, 0, 0)
        self._tell(PageEvent("fence", slot, epoch, 0, b""))
        return [b"OK"]

    def _lookup(self, group: bytes) -> bytes:
        bucket, marks = unpack_group(group)
        pages = self.records.get(bucket, {})
        hits: list[Hit] = []
        for slot, tag in pages.get(marks[0], {}).items():
            row = self.rows.get(slot)
            if row is not None and row.tag == tag:
                owns = [pages.get(mark, {}).get(slot) == tag for mark in marks]
                hits.append(Hit(slot, row.epoch, [*owns, False].index(False)))
        return pack_hits(hits)

    def _copies(self, groups: Sequence[bytes]) -> bytes:
        counts: list[int] = []
        for group in groups:
            bucket, marks = unpack_group(group)
            pages = self.records.get(bucket, {})
            counts += [
                sum(slot in self.rows and self.rows[slot].tag == tag for slot, tag in owners)
                for owners in (pages.get(mark, {}).items() for mark in marks)
            ]
        return bytes(min(count, 255) for count in counts)

    def _position(self) -> list[Any]:
        size = max(self.records, default=-1) // 8 + 1
        bitmap = bytearray(size)
        for bucket in self.records:
            bitmap[bucket // 8] |= 128 >> bucket % 8
        last = self.events[-1][0] if self.events else "0-0"
        rows = [part for s, row in self.rows.items() for part in (str(s).encode(), pack_row(row))]
        return [last.encode(), rows, bytes(bitmap)]

    def _dump(self, buckets: Sequence[int]) -> list[Any]:
        found: dict[int, list[bytes]] = {}
        for bucket in buckets:
            for mark, owners in self.records.get(bucket, {}).items():
                for slot, tag in owners.items():
                    if slot in self.rows and self.rows[slot].tag == tag:
                        found.setdefault(slot, []).append(mark)
        return [part for slot, marks in found.items() for part in (slot, joined(marks))]

    def _sweep(self, buckets: Sequence[int]) -> int:
        removed = 0
        for bucket in buckets:
            pages = self.records.get(bucket, {})
            for mark, owners in list(pages.items()):
                for slot, tag in list(owners.items()):
                    if slot not in self.rows or self.rows[slot].tag != tag:
                        del owners[slot]
                        removed += 1
                if not owners:
                    del pages[mark]
            if not pages:
                self.records.pop(bucket, None)
        return removed

    def _tell(self, event: PageEvent) -> None:
        number = int(self.events[-1][0].partition("-")[2]) + 1 if self.events else 1
        self.events.append((f"1-{number}", event))

    def after(self, cursor: str, most: int) -> list[tuple[str, dict[bytes, bytes]]]:
        """Events behind an id, as the store gives them."""
        seen = int(cursor.partition("-")[2])
        first = int(self.events[0][0].partition("-")[2]) if self.events else 1
        events = self.events[max(0, seen - first + 1) :][:most]
        return [(entry_id, {b"b": pack_event(event)}) for entry_id, event in events]
