"""Pools whose workers share the routed experts: who belongs together, and where ranks listen."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pdmesh.launch.ports import claim_ports
from pdmesh.launch.topology import Topology
from pdmesh.wire.errors import ConfigError

FIRST_PORT = 21080
"""Where ranks listen: the first free ports from here on."""


@dataclass(frozen=True)
class RankPlace:
    """A worker's place in its group: its rank, and where each rank listens ("host:port")."""

    rank: int
    addresses: tuple[str, ...]

    @property
    def own(self) -> str:
        """Where this rank listens."""
        return self.addresses[self.rank]

    @property
    def arguments(self) -> tuple[str, ...]:
        """For ``pdmesh serve``."""
        return ("--ep-rank", str(self.rank), "--ep-ranks", ",".join(self.addresses))


def whole_groups(topology: Topology) -> Topology:
    """As many workers as make groups of ``ep``: one group where no number of workers is given.

    Raises:
        ConfigError: the number given is no multiple of ``ep``.
    """
    for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
        if section.ep == 1:
            continue
        if (role, "workers") not in topology.origins:
            topology = topology.changed(role, f"[{role}] ep", workers=section.ep)
        elif section.workers % section.ep:
            with topology.blamed(role, "workers"):
                raise ConfigError(
                    f"{section.workers} {role} workers make no groups of {section.ep} that share "
                    f"the experts; ask for a multiple of {section.ep}"
                )
    return topology


@contextlib.contextmanager
def rank_places(topology: Topology) -> Iterator[dict[str, RankPlace]]:
    """Of each worker in a group, by name. Until the block ends nobody else is given the ports.

    They are below those that the system gives to outgoing connections, one of which might have
    taken a port before the rank listens there.

    Raises:
        ConfigError: there are not so many ports.
    """
    found: dict[str, RankPlace] = {}
    taken: set[int] = set()
    host = topology.mesh.host
    with contextlib.ExitStack() as claimed:
        for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
            if section.ep == 1:
                continue
            claim = claim_ports(host, FIRST_PORT, section.workers, taken)
            ports = claimed.enter_context(claim)
            taken.update(ports)
            for first in range(0, section.workers, section.ep):
                found |= _group(role, first, host, ports[first : first + section.ep])
        yield found


@contextlib.contextmanager
def more_places(
    topology: Topology, role: str, index: int, taken: Collection[str]
) -> Iterator[dict[str, RankPlace]]:
    """Of the workers of one more group, the one that worker `index` of a role is in.

    Args:
        taken: "host:port" of the ranks that there are.

    Raises:
        ConfigError: there are not so many ports.
    """
    size, host = group_sizes(topology)[role], topology.mesh.host
    used = {int(address.rpartition(":")[2]) for address in taken}
    with claim_ports(host, FIRST_PORT, size, used) as ports:
        yield _group(role, index // size * size, host, ports)


def _group(role: str, first: int, host: str, ports: Sequence[int]) -> dict[str, RankPlace]:
    addresses = tuple(f"{host}:{port}" for port in ports)
    return {f"{role}-{first + rank}": RankPlace(rank, addresses) for rank in range(len(ports))}


def group_sizes(topology: Topology) -> dict[str, int]:
    """Workers that share the experts, for the roles whose workers do."""
    found = {"prefill": topology.prefill.ep, "decode": topology.decode.ep}
    return {role: size for role, size in found.items() if size > 1}


def parse_addresses(text: str) -> tuple[str, ...]:
    """ "HOST:PORT,HOST:PORT" as its parts.

    Raises:
        ConfigError: one of them is none.
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in parts:
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--ep-ranks names {part!r}; it must be HOST:PORT,HOST:PORT,...")
    return parts


def check_hosts(addresses: Sequence[str], tp: int) -> None:
    """The ranks of a TP group, `tp` consecutive ones, are on one host.

    Raises:
        ConfigError: those of one are not.
    """
    for first in range(0, len(addresses), tp):
        hosts = [address.rpartition(":")[0] for address in addresses[first : first + tp]]
        if len(set(hosts)) > 1:
            raise ConfigError(
                f"ranks {first} to {first + len(hosts) - 1} are to share attention heads and are "
                f"on several hosts: {', '.join(dict.fromkeys(hosts))}; ranks that --tp groups must "
                "be on one host"
            )


def check_rank(rank: int | None, addresses: Sequence[str]) -> int:
    """The rank given for these addresses.

    Raises:
        ConfigError: one is given without the other, or there is no such rank.
    """
    if not addresses:
        if rank is not None:
            raise ConfigError("--ep-rank needs --ep-ranks: the HOST:PORT of each rank, in order")
        return 0
    if rank is None or not 0 <= rank < len(addresses):
        raise ConfigError(
            f"--ep-ranks names {len(addresses)} ranks; say which this is with --ep-rank "
            f"0 to {len(addresses) - 1}"
        )
    return rank
