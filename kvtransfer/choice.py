"""Which transports a worker offers and uses, by name. Imports no transport, so it costs nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from pdmesh.wire.errors import ConfigError

TRANSPORTS = ("cuda_ipc", "shm", "tcp", "nixl")
DEFAULT_TRANSPORTS = ("cuda_ipc", "shm", "tcp")
"""Each is left out where it cannot be: pages are on a CUDA device or not, hosts are one or two."""
NIXL_PACKAGE = "nixl_cu13"


def missing_nixl() -> str | None:
    """Why nixl cannot be used here, in a sentence; None if it can."""
    if importlib.util.find_spec(NIXL_PACKAGE) is None:
        return "the package nixl-cu13 is not installed (pip install pdmesh[nixl])"
    return None


def check_transports(names: Sequence[str]) -> None:
    """Whether workers can be told to use these, best first.

    Raises:
        ConfigError: there is none, one twice, one unknown, or one whose package is missing.
    """
    if not names:
        raise ConfigError(f"no transport is left; name at least one of {', '.join(TRANSPORTS)}")
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(
                f"there is no transport {name!r}; allowed are {', '.join(TRANSPORTS)}, best first"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"a transport is named twice in {', '.join(names)}; name each once")
    if "nixl" in names and (reason := missing_nixl()):
        raise ConfigError(f"nixl cannot be used: {reason}; install it, or leave nixl out")
