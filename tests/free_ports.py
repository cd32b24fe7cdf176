"""Ports for servers that a test starts, at which they may be started again."""

import contextlib
import random
import socket

RANGE = (12_000, 21_000)
"""Below the ports of outgoing connections, one of which might take a port before its server does.
Servers of a cluster take another port besides, 10,000 higher."""


def free_port() -> int:
    """One that nobody listens on now."""
    while True:
        port = random.randrange(*RANGE)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
