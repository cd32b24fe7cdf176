"""The public port of a mesh, and who on this machine has spoken for it."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Collection, Iterator

from pdmesh.wire.errors import ConfigError

DEFAULT_PORT = 7080


@contextlib.contextmanager
def claim_port(host: str, asked: int) -> Iterator[int]:
    """``asked`` if it is free; without one 7080 or the next port that is free.

    A router takes seconds to listen; until the block ends no other ``pdmesh up`` of this machine
    chooses the same port by itself.

    Raises:
        ConfigError: the port asked for is taken, or the host is not this machine's.
    """
    reason = ""
    for port in [asked] if asked else range(DEFAULT_PORT, DEFAULT_PORT + 1000):
        reason = refusal(host, port)
        if reason:
            continue
        with _spoken_for(port) as mine:
            if mine or asked:
                yield port
                return
        reason = "another mesh is starting there"
    which = f"port {asked}" if asked else f"any port from {DEFAULT_PORT} on"
    fix = "; name another, or leave it out for a free one" if asked else ""
    raise ConfigError(f"cannot listen on {which} of {host}: {reason}{fix}")


@contextlib.contextmanager
def claim_ports(host: str, first: int, count: int, taken: Collection[int]) -> Iterator[list[int]]:
    """The first ``count`` ports from ``first`` on that are free and not in ``taken``.

    They are spoken for until the block ends, as with ``claim_port``.

    Raises:
        ConfigError: there are not so many.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as claimed:
        for port in range(first, min(first + 1000, 65536)):
            if len(ports) == count:
                break
            if port in taken or refusal(host, port):
                continue
            if claimed.enter_context(_spoken_for(port)):
                ports.append(port)
        if len(ports) < count:
            raise ConfigError(
                f"{len(ports)} ports from {first} on are free on {host}, {count} are needed; "
                "give another port to start from"
            )
        yield ports


def refusal(host: str, port: int) -> str:
    """Why a port cannot be listened on; empty if it can. Port 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen()
        except OSError as error:
            return error.strerror or str(error)
        except (ValueError, TypeError):  # a label too long, or a zero byte
            return "that is no host name"
    return ""


@contextlib.contextmanager
def _spoken_for(port: int) -> Iterator[bool]:
    """Holds the machine-wide claim of a port. False if another process holds it.

    On Linux an abstract socket: it is of the same network namespace as the port, and gone with
    the process. Elsewhere there is no claim, and always True.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        mine = True
        if sys.platform.startswith("linux"):
            try:
                claim.bind(f"\0pdmesh-port-{port}")
            except OSError:
                mine = False
        yield mine
