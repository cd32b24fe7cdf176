"""Page identity: a chained, keyed BLAKE2b hash over tagged, length-prefixed fields.

Two pages have the same hash only if the model, its weights, the page format, the tenant, the
adapter and every token up to the end of the page are the same. The key is a secret of the mesh, so
nobody outside can compute or guess what is cached (compare GHSA-rm76-4mrf-v9r8). The first 16
bytes of BLAKE2b are used: 128 bits (RFC 7693).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

PageHash = bytes
Precision = Literal["plain", "fp8"]
Arithmetic = Literal["fast", "exact"]
_HASH_BYTES = 16
SEGMENT_PAGES = 16
"""Pages of a chain that are kept together in the registry: see ``OwnedPage``."""


class OwnedPage(NamedTuple):
    """A page with what says where it is registered.

    A chain is cut into segments of ``SEGMENT_PAGES`` pages. The hash of a segment's first page, its
    *anchor*, picks the partition of the registry that holds all of the segment.
    """

    page_hash: PageHash
    anchor: PageHash


class PageFormat(msgspec.Struct, frozen=True):
    """What must be equal for two workers to exchange pages."""

    model: str
    weights: str
    """Fingerprint of the configuration and the weights."""
    dtype: str
    page_size: int
    num_layers: int
    """Layers in a page, the MTP layer included where MTP is on."""
    mtp_layers: int
    latent_width: int
    """Values per token and layer: latent rank + rotary dimensions."""
    layout: int = 1
    """How values lie in a page. 1: as computed. 2: packed, with one scale for all FP8 values of a
    latent, written four times."""
    arithmetic: Arithmetic = "fast"
    """"fast": prompts in MHA form, generated tokens in absorbed form. "exact": all in absorbed
    form, so that latents do not depend on which worker computed them, or why."""
    precision: Precision = "plain"
    """"plain": matrices are multiplied in `dtype`. "fp8": in FP8, rows quantised on the way."""
    packed: bool = False
    """A latent is bytes: FP8 values, scales, then rotated ones in bfloat16 (see `layout`);
    `latent_width` counts the bytes."""

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.page_size * self.latent_width * (1 if self.packed else size)

    def fingerprint(self) -> bytes:
        """A 32-byte digest that differs when any field differs."""
        fields = [str(getattr(self, name)).encode() for name in self.__struct_fields__]
        return blake2b(_framed(b"pdmesh/pageformat/1", *fields), digest_size=32).digest()

    def difference(self, other: PageFormat) -> str | None:
        """A sentence fragment naming the first field that differs, or None."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine!r} here and {theirs!r} there"
        return None


def _framed(*fields: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def root_hash(key: bytes, fingerprint: bytes, tenant: str = "", adapter: str = "") -> PageHash:
    """The parent of a sequence's first page.

    Each label is length-prefixed and has a fixed place, so no two label sets collide
    (vllm-project/vllm#44701).
    """
    fields = _framed(b"root", fingerprint, b"tenant", tenant.encode(), b"adapter", adapter.encode())
    return blake2b(fields, key=key, digest_size=_HASH_BYTES).digest()


def child_hash(key: bytes, parent: PageHash, tokens: Sequence[int]) -> PageHash:
    """The hash of one full page that follows ``parent``; ``tokens`` are its token ids."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(b"page" + parent + packed, key=key, digest_size=_HASH_BYTES).digest()


def page_hashes(
    key: bytes, root: PageHash, tokens: Sequence[int], page_size: int
) -> list[PageHash]:
    """Hashes of the full pages of ``tokens``, in order; a last partial page has none."""
    hashes: list[PageHash] = []
    parent = root
    count = len(tokens) // page_size * page_size
    packed = struct.pack(f"<{count}I", *tokens[:count])
    width = 4 * page_size
    keyed = blake2b(key=key, digest_size=_HASH_BYTES)
    for start in range(0, len(packed), width):
        page = keyed.copy()  # the key is taken in once
        page.update(b"page" + parent + packed[start : start + width])
        parent = page.digest()
        hashes.append(parent)
    return hashes


def placed(hashes: Sequence[PageHash]) -> list[OwnedPage]:
    """The pages of a chain, from its first page on, with their anchors."""
    return [OwnedPage(h, hashes[i - i % SEGMENT_PAGES]) for i, h in enumerate(hashes)]
