"""The page hashes of one prompt, computed once for each page format in the mesh."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.wire.hashes import PageFormat, PageHash, page_hashes, root_hash


class PromptHashes:
    """Hashes of a prompt's full pages; ``for_format`` remembers its answers."""

    def __init__(self, key: bytes, tenant: str, tokens: Sequence[int]) -> None:
        self._key = key
        self._tenant = tenant
        self._tokens = tokens
        self._known: dict[PageFormat, tuple[PageHash, ...]] = {}
        self.looked_up: dict[str, int] = {}
        """Leading pages that workers have by the store's word, by name; asked for where the
        router's own index is behind."""

    def for_format(self, page_format: PageFormat) -> tuple[PageHash, ...]:
        """Hashes of the full pages, in order, for workers of one page format."""
        hashes = self._known.get(page_format)
        if hashes is None:
            root = root_hash(self._key, page_format.fingerprint(), self._tenant)
            hashes = tuple(page_hashes(self._key, root, self._tokens, page_format.page_size))
            self._known[page_format] = hashes
        return hashes
