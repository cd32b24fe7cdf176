"""What a worker that is started elsewhere has to know of the mesh that it joins."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from pdmesh.launch.ports import refusal
from pdmesh.launch.runtime import find_mesh
from pdmesh.launch.topology import SHIPPED_CONFIGS, Topology, shipped_model
from pdmesh.wire.control import JoinInfo, JoinRequest, join_proof
from pdmesh.wire.errors import ConfigError, PdmeshError, Unavailable
from pdmesh.wire.rpc import Client
from pdmesh.wire.secret import read_secret

SOURCE = "--join"
_TIMEOUT_S = 10.0
_FLAGS: Mapping[tuple[str, str], str] = {
    ("mesh", "name"): "--mesh",
    ("model", "name"): "--model-name",
    ("model", "dtype"): "--dtype",
    ("model", "arithmetic"): "--arithmetic",
    ("model", "page_size"): "--page-size",
    ("model", "mtp"): "--no-mtp",
    ("model", "random_weights"): "--random-weights",
    ("model", "weights_seed"): "--weights-seed",
    ("model", "layers"): "--layers",
    ("model", "experts"): "--experts",
}
"""What a worker cannot choose for itself, and the flag for it."""


def joined(
    topology: Topology,
    address: str,
    role: Literal["prefill", "decode"],
    secret_file: Path | None,
    model: Path | None,
) -> Topology:
    """The topology with all that the mesh at ``address`` says about itself.

    Args:
        address: ``host:port`` of its router, or the name of a mesh of this machine.
        secret_file: as given by hand; needed for an address.
        model: as given by hand; needed where the mesh serves another model than the shipped one.

    Raises:
        ConfigError: there is no such mesh, or it cannot be joined from here.
    """
    if ":" not in address:
        return _settled(topology, _of_this_machine(address))
    if secret_file is None:
        raise ConfigError(
            "no secret given; copy the secret.key of the mesh's run directory here and add "
            "--secret-file FILE"
        )
    info = asyncio.run(_asked(address, role, read_secret(secret_file)))
    _check_reachable(info, address)
    if model is None and info.random is not None:
        info = msgspec.structs.replace(info, model_path=_config_of(info.model_name))
    elif model is None and info.model_name != shipped_model().name:
        raise ConfigError(
            f"the mesh serves {info.model_name!r}, which is not the shipped model; add --model DIR "
            "with its checkpoint"
        )
    return _settled(topology, info, host=_own_host(address))


def _config_of(model_name: str) -> str:
    """The name of the shipped config that a mesh of random weights seems to have."""
    name = model_name.removesuffix("-random")
    if name not in SHIPPED_CONFIGS:
        raise ConfigError(
            f"the mesh serves random weights as {model_name!r}, for no shipped config; add "
            "--model DIR with its config.json"
        )
    return name


def check_joined(before: Topology, after: Topology) -> None:
    """Raises ConfigError if a flag contradicts what the mesh says."""
    for (section, key), flag in _FLAGS.items():
        wanted, given = (getattr(getattr(t, section), key) for t in (before, after))
        if wanted != given:
            raise ConfigError(
                f"{flag} makes {key} {given}, but the mesh to join has {wanted}; leave {flag} out"
            )


def _of_this_machine(name: str) -> JoinInfo:
    try:
        info = find_mesh(name).join
    except Unavailable as error:
        raise ConfigError(f"{error}; or give the HOST:PORT of a router to --join") from error
    if info is None:
        raise ConfigError(f"the mesh {name!r} was started by an older version; start it again")
    return info


def offered_weights(address: str, device: str, precision: str) -> Path | None:
    """The socket of the process that holds a mesh's weights on a device of this machine.

    Args:
        address: as ``--join`` has it; a mesh given by a router's address may be elsewhere, and
            nothing of it is known here.
        device: see ``processes.physical``.

    Returns:
        None where nobody holds them, or not in this precision.
    """
    if ":" in address:
        return None
    for holder in find_mesh(address).holders:
        if (holder.device, holder.precision, holder.state) == (device, precision, "ready"):
            return Path(holder.socket)
    return None


async def _asked(address: str, role: Literal["prefill", "decode"], secret: bytes) -> JoinInfo:
    client = Client(address, "router")
    nonce = secrets.token_bytes(16)
    request = JoinRequest(role=role, nonce=nonce, proof=join_proof(secret, nonce))
    try:
        return await client.unary("JoinInfo", request, JoinInfo, timeout=_TIMEOUT_S)
    except PdmeshError as error:
        raise ConfigError(f"cannot join the mesh at {address}: {error.message}") from error
    finally:
        await client.close()


def _check_reachable(info: JoinInfo, address: str) -> None:
    """A store that listens on its own machine alone cannot be reached from another."""
    url = urlsplit(info.redis_url)
    local = url.scheme == "unix" or _is_loopback(url.hostname or "127.0.0.1")
    if local and not _is_here(address.rpartition(":")[0]):
        raise ConfigError(
            f"the store of the mesh at {address} listens on its own machine alone, so no worker of "
            "another can join; start the mesh with --redis URL (a store that both reach) and --host"
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host.strip("[]") == "::1"


def _is_here(host: str) -> bool:
    return _is_loopback(host) or not refusal(host, 0)


def _own_host(address: str) -> str:
    """This machine's address on the way to a router; nothing is sent."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"the address {address!r} cannot be reached: {error}") from error


def _settled(topology: Topology, info: JoinInfo, host: str | None = None) -> Topology:
    values: dict[str, dict[str, Any]] = {
        "mesh": {
            "name": info.mesh,
            "redis": info.redis_url,
            "lease_ttl_s": info.lease_ttl_s,
            "host": host,
            "secret_file": info.secret_file or None,
        },
        "model": {
            "name": info.model_name,
            "dtype": info.dtype,
            "arithmetic": info.arithmetic,
            "page_size": info.page_size,
            "mtp": info.mtp,
            "path": info.model_path or None,
        },
    }
    if (random := info.random) is not None:
        values["model"] |= {"random_weights": True, "weights_seed": random.seed}
        values["model"] |= {"layers": random.layers, "experts": random.experts}
    for section, given in values.items():
        topology = topology.changed(section, SOURCE, **given)
    return topology
