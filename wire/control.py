"""Messages to a supervisor (service ``supervisor``, a unix socket of its run directory), and of a
worker that joins a mesh (method ``JoinInfo`` of service ``router``, at the public address).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

from pdmesh.wire.hashes import Arithmetic
from pdmesh.wire.random_weights import RandomWeights


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many workers of a role there shall be; None: as many as there are."""

    prefill: int | None = None
    decode: int | None = None


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replace these workers, one after the other; none named: all of them."""

    workers: tuple[str, ...] = ()


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line about a change under way."""

    text: str


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What does a worker need to know to join? Answered only to who has the mesh's secret."""

    role: Literal["prefill", "decode"]
    nonce: bytes
    proof: bytes
    """``join_proof`` of the secret and the nonce."""


class JoinInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all workers of a mesh agree on, but the secret."""

    mesh: str
    redis_url: str
    model_name: str
    dtype: str
    arithmetic: Arithmetic
    page_size: int
    mtp: bool
    lease_ttl_s: float
    random: RandomWeights | None = None
    """Weights that the mesh makes instead of reading them."""
    model_path: str = ""
    """On the machine of the mesh; not told over the network."""
    secret_file: str = ""
    """As ``model_path``."""


def join_proof(secret: bytes, nonce: bytes) -> bytes:
    """32 bytes that only a holder of the secret can make for a nonce (HMAC-SHA256, RFC 2104)."""
    return hmac.digest(secret, b"pdmesh join" + nonce, hashlib.sha256)
