"""The key of the page hashes, shared by all workers of a mesh and by nobody else."""

from __future__ import annotations

from pathlib import Path

from pdmesh.wire.errors import ConfigError


def read_secret(path: Path) -> bytes:
    """The mesh's page-hash key, 16 to 64 bytes.

    Raises:
        ConfigError: the file is missing, unreadable or of another length.
    """
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the secret file {path}: {error.strerror}") from error
    if not 16 <= len(key) <= 64:
        raise ConfigError(f"the secret file {path} holds {len(key)} bytes; 16 to 64 are needed")
    return key
