"""Rotary position embedding with YaRN scaling.

Su et al. 2021 (arXiv:2104.09864); Peng et al. 2023, YaRN (arXiv:2309.00071), with the two separate
corrections of DeepSeek-V2/V3: a factor on cos and sin, and a factor on the softmax scale.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """The fields of a yarn `rope_scaling`; factor and lengths in tokens."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_factor(yarn: Yarn | None) -> float:
    """What cos and sin are multiplied by: mscale over mscale_all_dim, so 1 where both are equal."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(head_dim: int, yarn: Yarn | None) -> float:
    """head_dim^-0.5, times the square of yarn's mscale_all_dim term."""
    scale = 1.0 / math.sqrt(head_dim)
    if yarn is None:
        return scale
    mscale = yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return scale * mscale * mscale


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Angle per position of each pair: [dim / 2] float32 on the CPU."""
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if yarn is None:
        return 1.0 / powers
    low, high = _ramp_bounds(dim, theta, yarn)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return 1.0 / (yarn.factor * powers) * (1.0 - keep) + 1.0 / powers * keep


def _ramp_bounds(dim: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """The pair indices between which yarn goes over from extrapolation to interpolation."""

    def pair_of(rotations: float) -> float:
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


@dataclass(frozen=True)
class RopeTable:
    """cos and sin [max_position, dim] float32, laid out for `apply_rope`.

    `sin` carries the sign: an output element is x * cos + partner(x) * sin.
    """

    cos: Tensor
    sin: Tensor
    interleave: bool

    @staticmethod
    def build(
        inv_freq: Tensor, max_position: int, factor: float, interleave: bool = True
    ) -> "RopeTable":
        """Tables for positions 0..max_position - 1, both multiplied by `factor`."""
        positions = torch.arange(max_position, dtype=torch.float32, device=inv_freq.device)
        angles = positions[:, None] * inv_freq[None, :]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if interleave:
            cos = cos.repeat_interleave(2, dim=-1)
            sin = torch.stack([-sin, sin], dim=-1).flatten(1)
        else:
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return RopeTable(cos, sin, interleave)

    def to(self, device: torch.device) -> "RopeTable":
        """The same tables on `device`."""
        return RopeTable(self.cos.to(device), self.sin.to(device), self.interleave)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """Rotate x [..., dim] by rows of a RopeTable that broadcast against it; x's dtype comes back.

    Interleaved pairs are (0, 1), (2, 3), ...; otherwise pairs are (i, i + dim / 2). The layout of
    the output is that of the input. Computed in float32, every operation rounded by itself.
    """
    values = x.float()
    if interleave:
        half = values.shape[-1] // 2
        partner = values.reshape(*values.shape[:-1], half, 2).flip(-1).flatten(-2)
    else:
        partner = values.roll(values.shape[-1] // 2, dims=-1)
    return (values * cos + partner * sin).to(x.dtype)
