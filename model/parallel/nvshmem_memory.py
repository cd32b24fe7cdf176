"""How the memory of an exchange is cut up, and how its kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """How kernels are launched.

    Attributes:
        programs: of a kernel that walks over rows; 0: sixteen a multiprocessor.
        part: values of a row that one item takes.
        warps: of such a program.
        scan: choices that a program looks at in one go to find an expert's.
        whole: rows are spread to their experts as a whole, by twice the warps.
    """

    programs: int = 0
    part: int = 1024
    warps: int = 2
    scan: int = 4096
    whole: bool = False


@dataclass(frozen=True)
class Region:
    """Bytes of the block: where they begin, and how many."""

    offset: int
    nbytes: int


class Arena:
    """A block of symmetric memory, cut into regions of 128-byte multiples."""

    def __init__(self) -> None:
        self.nbytes = 0

    def region(self, nbytes: int) -> Region:
        """The next `nbytes`."""
        found = Region(self.nbytes, nbytes)
        self.nbytes += -(-nbytes // 128) * 128
        return found


def power(value: int) -> int:
    """The least power of two that is no less than `value`."""
    return 1 << max(value - 1, 0).bit_length()
