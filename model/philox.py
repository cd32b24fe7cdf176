"""Random numbers that are a function of their place: Philox4x64-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3; rounds and
constants are those of numpy.random.Philox, which starts at the block after its counter.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def uniform(seed: int, position: int, index: int = 0) -> float:
    """A float64 in [0, 1) that depends on ``seed``, ``position`` and ``index`` alone.

    ``seed`` (64 bits) is the key; the counter is ``position + (index << 64)``, so that no two
    answers of a request share a number.
    """
    counter = position + (index << 64) + 1
    a, b, c, d = (counter >> shift & _WORD for shift in (0, 64, 128, 192))
    key, other = seed, 0
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 64) ^ b ^ key, right & _WORD, (left >> 64) ^ d ^ other, left & _WORD
        key, other = key + _KEY_STEPS[0] & _WORD, other + _KEY_STEPS[1] & _WORD
    return (a >> 11) * 2.0**-53
