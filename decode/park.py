"""Host memory for the pages of sequences that had to give theirs up.

A page is kept bit for bit, every layer. Pages that are complete, and therefore never change, are
known by their stamp (see ``KvManager.stamps``), so what several sequences share is kept once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.kvcache.manager import Stamp
from pdmesh.kvcache.store import LatentStore


@dataclass(frozen=True, eq=False)
class Parked:
    """Copies of a sequence's pages, in order.

    Attributes:
        stamps: of the leading complete pages.
        keys: under which each page is kept.
        pages: copies, each [num_layers, page_size, width] on the CPU.
        fresh: (page, copy) still to be made by ``ParkingLot.fill``.
    """

    stamps: tuple[Stamp, ...]
    keys: tuple[Hashable, ...]
    pages: tuple[Tensor, ...]
    fresh: tuple[tuple[int, Tensor], ...]


class ParkingLot:
    """Copies of pages, bounded in bytes.

    ``claim`` and ``drop`` only keep books; ``fill`` and ``restore`` move the bytes and may run on
    another thread, in the order of the claims, while no step runs.
    """

    def __init__(self, store: LatentStore, capacity_bytes: int) -> None:
        self._store = store
        self._capacity = capacity_bytes
        self._kept: dict[Hashable, tuple[Tensor, int]] = {}

    @property
    def used_bytes(self) -> int:
        return len(self._kept) * self._store.page_bytes

    def claim(self, pages: Sequence[int], stamps: Sequence[Stamp]) -> Parked | None:
        """A place for copies of ``pages``, the leading ones complete under ``stamps``.

        None, and nothing is claimed, where the memory does not suffice.
        """
        keys: list[Hashable] = [*stamps, *(object() for _ in pages[len(stamps) :])]
        lacking = [i for i, key in enumerate(keys) if key not in self._kept]
        if self.used_bytes + len(lacking) * self._store.page_bytes > self._capacity:
            return None
        latents = self._store.tensor
        fresh = [(pages[i], torch.empty(latents.shape[1:], dtype=latents.dtype)) for i in lacking]
        for i, (_, copy) in zip(lacking, fresh, strict=True):
            self._kept[keys[i]] = (copy, 0)
        for key in keys:
            copy, holders = self._kept[key]
            self._kept[key] = (copy, holders + 1)
        copies = tuple(self._kept[key][0] for key in keys)
        return Parked(tuple(stamps), tuple(keys), copies, tuple(fresh))

    def fill(self, claims: Sequence[Parked]) -> None:
        """Copies the pages of new claims out of the store."""
        for parked in claims:
            for page, copy in parked.fresh:
                self._store.take_page(page, copy)

    def restore(self, parked: Parked, first: int, pages: Sequence[int]) -> None:
        """Copies the pages from ``first`` on back into the store, to ``pages``."""
        for copy, page in zip(parked.pages[first:], pages, strict=True):
            self._store.put_page(page, copy)

    def drop(self, parked: Parked) -> None:
        """Forgets a claim; what others share stays."""
        for key in parked.keys:
            copy, holders = self._kept[key]
            if holders == 1:
                del self._kept[key]
            else:
                self._kept[key] = (copy, holders - 1)
