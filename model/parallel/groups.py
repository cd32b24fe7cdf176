"""Who computes what: EP = DP x TP ranks, their groups, and the attention heads of each.

Every rank holds some routed experts. Its data-parallel (DP) group of TP ranks has a batch of its
own and one copy of attention between them: each has some of the heads, and the latents of all
tokens, because a latent belongs to every head.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.wire.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands: its number, its DP group, its place in that group, its host."""

    rank: int
    dp: int
    tp: int
    host: int


@dataclass(frozen=True)
class Groups:
    """`ep` ranks in DP groups of `tp` consecutive ones, on hosts of `ranks_per_host`.

    Raises:
        ConfigError: TP does not divide EP, or a TP group would span two hosts.
    """

    ep: int = 1
    tp: int = 1
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        if min(self.ep, self.tp, self.ranks_per_host) < 1:
            raise ConfigError(
                f"EP {self.ep}, TP {self.tp} and {self.ranks_per_host} ranks a host must all be at "
                "least 1"
            )
        if self.ep % self.tp:
            raise ConfigError(f"TP {self.tp} does not divide EP {self.ep}: EP = DP x TP")
        for dp in range(self.dp):
            first, last = dp * self.tp, (dp + 1) * self.tp - 1
            if first // self.ranks_per_host != last // self.ranks_per_host:
                raise ConfigError(
                    f"ranks {first} to {last} would be one TP group on two hosts of "
                    f"{self.ranks_per_host} ranks: TP {self.tp} must stay within a host"
                )

    @property
    def dp(self) -> int:
        """DP groups, each with a batch of its own."""
        return self.ep // self.tp

    @property
    def hosts(self) -> int:
        """Hosts that the ranks take; the last one may be partly used."""
        return -(-self.ep // self.ranks_per_host)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        if not 0 <= rank < self.ep:
            raise ValueError(f"there is no rank {rank} among {self.ep}")
        return Coordinates(rank, rank // self.tp, rank % self.tp, rank // self.ranks_per_host)

    def tp_group(self, dp: int) -> range:
        """The ranks of DP group `dp`."""
        if not 0 <= dp < self.dp:
            raise ValueError(f"there is no DP group {dp} among {self.dp}")
        return range(dp * self.tp, (dp + 1) * self.tp)

    def heads(self, tp: int, num_heads: int) -> range:
        """The attention heads of the TP rank `tp`.

        Raises:
            ConfigError: TP does not divide the heads.
        """
        if num_heads % self.tp:
            raise ConfigError(f"TP {self.tp} does not divide {num_heads} attention heads")
        share = num_heads // self.tp
        return range(tp * share, (tp + 1) * share)


def share(count: int, parts: int, index: int) -> range:
    """The index-th of `parts` runs of 0..count-1 whose lengths differ by one at most."""
    return range(count * index // parts, count * (index + 1) // parts)
