"""Pages of a simulated process that note who touches what nobody holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pdmesh.kvcache.pool import PageState
from pdmesh.kvcache.store import LatentStore

if TYPE_CHECKING:
    from pdmesh.kvcache.manager import KvManager

_HELD = (PageState.USED, PageState.QUARANTINED)


class GuardedStore(LatentStore):
    """A store that knows the books: only pages that somebody holds may be read or written.

    Attributes:
        books: of the process; none until they are there.
        problems: what was touched without right, one sentence each.
    """

    books: KvManager | None = None

    def __init__(self, num_pages: int, num_layers: int, page_size: int, width: int) -> None:
        super().__init__(num_pages, num_layers, page_size, width, torch.float32)
        self.problems: list[str] = []

    def touch(self, pages: Sequence[int], who: str) -> None:
        """``who`` reads or writes ``pages`` now."""
        if self.books is None:
            return
        states = self.books._pool._state
        for page in pages:
            if states[page] not in _HELD:
                self.problems.append(f"{who} touches page {page}, which is {states[page].value}")

    def write_block(
        self, page_ids: Sequence[int], layer: int, layers: int, pieces: Sequence[memoryview]
    ) -> None:
        self.touch(page_ids, "a transfer")
        super().write_block(page_ids, layer, layers, pieces)

    def put_page(self, page: int, values: torch.Tensor) -> None:
        self.touch([page], "what was set aside")
        super().put_page(page, values)

    def copy_page(self, source: int, target: int) -> None:
        self.touch([source, target], "a copy")
        super().copy_page(source, target)
