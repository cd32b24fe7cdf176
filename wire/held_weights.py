"""What a process that holds a model's weights tells those that map them: which, and where."""

from __future__ import annotations

import msgspec


class HeldModel(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights, in which form: workers for which all of it is the same may share them."""

    weights: str
    """Fingerprint of the checkpoint, or of the random weights."""
    precision: str
    """"plain" or "fp8"."""
    dtype: str
    """Of what is not in FP8."""
    mtp: bool
    """Whether the MTP layer is among them."""
    device: str
    """"cpu", or the name of a GPU that is the same in every process of the host."""


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and its place."""

    name: str
    dtype: str
    """As torch writes it, without its "torch."."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    region: int
    """Number of the region that it lies in."""
    offset: int
    """Of its first element in that region, bytes."""


class HeldRegion(msgspec.Struct, frozen=True, array_like=True):
    """Memory that can be mapped as a whole."""

    handle: bytes
    """What the device's driver calls it; empty: it is the file that comes along."""
    size: int
    """Bytes from its begin on that hold weights."""


class HeldWeights(msgspec.Struct, frozen=True, kw_only=True):
    """All of it: what is told."""

    model: HeldModel
    tensors: tuple[HeldTensor, ...]
    regions: tuple[HeldRegion, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.size for region in self.regions)
