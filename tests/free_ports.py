"""Ports for servers that a test starts, at which they may be started again."""

import contextlib
import os
import random
import socket
from collections import deque

RANGE = (12_000, 21_000)
"""Below the ports of outgoing connections, one of which might take a port before its server does.
Servers of a cluster take another port besides, 10,000 higher."""

_SHARES = 4
_given: deque[int] = deque(maxlen=64)


def free_port() -> int:
    """One that nobody listens on now, and that was not given lately.

    Tests that run side by side, and the processes that they start, have ports of their own: a port
    is given before its server listens.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    size = (RANGE[1] - RANGE[0]) // _SHARES
    first = RANGE[0] + number * size
    while True:
        port = random.randrange(first, first + size)
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.append(port)
            return port
