"""How one token is chosen: everything the sampler needs besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdmesh.model.penalties import Counts
from pdmesh.wire.sampling import SamplingParams

Mask = npt.NDArray[np.int32]
"""Bit ``t % 32`` of word ``t // 32`` says that a grammar allows token t."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One row to sample, made by ``SamplingState.choice``. Later steps do not change it."""

    params: SamplingParams
    position: int
    """Output position that the token will have."""
    index: int = 0
    """Which answer of the request: each has random numbers of its own."""
    counts: Counts | None = None
    """Tokens that penalties apply to; None where there is no penalty."""
    bias: Counts | None = None
    """Token ids and the value added to the logit of each; None where there is none."""
    forbidden: Sequence[int] = ()
    """Ids that ``min_tokens`` and ``bad_words`` rule out at this position."""
    mask: Mask | None = None
    """What the grammar allows; None where there is no grammar."""

    @property
    def shaped(self) -> bool:
        """Whether anything but temperature and truncation changes the distribution."""
        return not (
            self.counts is None and self.bias is None and self.mask is None and not self.forbidden
        )
