"""Identities that cross a process boundary."""

from __future__ import annotations

import secrets

PAGE_SIZE = 64
"""Tokens per page, everywhere in a mesh unless its topology file says otherwise."""


def new_instance() -> str:
    """A random 64-bit id of one process run, 16 hex digits; never reused after a restart."""
    return secrets.token_hex(8)


def new_request_id() -> str:
    """A random 96-bit id of one client request, 24 hex digits."""
    return secrets.token_hex(12)
