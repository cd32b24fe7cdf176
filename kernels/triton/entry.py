"""What the catalogue has of each kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A kernel and one way to launch it.

    Attributes:
        module: within this package.
        kernel: its name there.
        types: what the arguments are, in their order and separated by blanks: "*bf16", "i32",
            "fp32", ...; a "!" behind says that it is divisible by 16, as torch's pointers are and
            sizes often.
        constants: the constexpr arguments by name, which come after the others.
        options: num_warps, num_stages, enable_fp_fusion.
        variant: tells entries apart that differ in their types alone.
    """

    module: str
    kernel: str
    types: str
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        """Module, kernel, constants and variant, as a test names it."""
        words = [*self.constants.values(), *([self.variant] if self.variant else [])]
        values = "-".join(str(word) for word in words)
        return f"{self.module}.{self.kernel}[{values}]"
