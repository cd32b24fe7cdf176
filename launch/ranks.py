"""Pools whose workers share the routed experts: who belongs together, and where ranks listen."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.launch.topology import Topology
from pdmesh.wire.errors import ConfigError


@dataclass(frozen=True)
class RankPlace:
    """A worker's place in its group: its rank, and where each rank listens ("host:port")."""

    rank: int
    addresses: tuple[str, ...]

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


def rank_places(topology: Topology) -> dict[str, RankPlace]:
    """Of each worker in a group, by name; ports are free ones."""
    found: dict[str, RankPlace] = {}
    for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
        if section.ep == 1:
            continue
        ports = free_ports(topology.mesh.host, section.workers)
        for first in range(0, section.workers, section.ep):
            group = ports[first : first + section.ep]
            addresses = tuple(f"{topology.mesh.host}:{port}" for port in group)
            for rank in range(section.ep):
                found[f"{role}-{first + rank}"] = RankPlace(rank, addresses)
    return found


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on now.

    Raises:
        ConfigError: the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(family))
            try:
                probe.bind((host.strip("[]"), 0))
            except OSError as error:
                raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
            ports.append(int(probe.getsockname()[1]))
        return ports


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


def refuse_change(topology: Topology, roles: Sequence[str]) -> None:
    """Groups stay as they are.

    Raises:
        ConfigError: a pool that would change shares its experts.
    """
    for role in roles:
        section = topology.prefill if role == "prefill" else topology.decode
        if section.ep > 1:
            raise ConfigError(
                f"the {role} workers share their experts in groups of {section.ep} and stay as "
                "they are; start the mesh again with other numbers"
            )
