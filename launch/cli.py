"""The command line ``pdmesh``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from pdmesh.launch.arguments import EXIT_WRONG_INPUT, parser
from pdmesh.wire.errors import ConfigError, PdmeshError

_EXIT_FAILED = 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        from pdmesh.launch.up import up

        return up(arguments)
    if arguments.command == "serve":
        from pdmesh.launch.serve import serve

        return serve(arguments)
    if arguments.command == "chat":
        return _chat(arguments)
    if arguments.command == "status":
        return _status(arguments)
    if arguments.command in ("scale", "restart", "drain"):
        from pdmesh.launch.operate import operate

        return operate(arguments)
    if arguments.command == "registry":
        from pdmesh.launch.registry import registry

        return registry(arguments)
    if arguments.command == "verify":
        from pdmesh.launch.verify.command import run

        return run(arguments)
    if arguments.command in ("answers", "migrate"):
        from pdmesh.launch.answers import answers, migrate

        return (answers if arguments.command == "answers" else migrate)(arguments)
    if arguments.command == "explain":
        from pdmesh.launch.explain import explain

        return explain(arguments)
    if arguments.command == "simulate":
        from pdmesh.simulation.command import run as simulate

        return simulate(arguments)
    if arguments.command == "doctor":
        from pdmesh.launch.doctor import doctor

        return doctor(arguments)
    print(_version())
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from pdmesh.launch.chat import ChatOptions, chat
    from pdmesh.launch.runtime import find_mesh
    from pdmesh.launch.settings import check_number, check_text

    for flag in ("prompt", "system", "model"):
        check_text(getattr(arguments, flag), f"--{flag}")
    check_number(arguments.seed, "--seed", 0, 2**64 - 1)
    check_number(arguments.max_tokens, "--max-tokens", 1, 1_000_000)
    check_number(arguments.timeout, "--timeout", 0.001, 1_000_000)
    check_number(arguments.input_timeout, "--input-timeout", 0, 1_000_000)

    address = arguments.address or find_mesh(arguments.mesh).address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"the address {address!r} is not HOST:PORT")
    options = ChatOptions(
        address=address,
        system=arguments.system,
        model=arguments.model,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        timeout_s=arguments.timeout,
        show_timing=arguments.show_timing,
        input_timeout_s=arguments.input_timeout,
    )
    return chat(options, arguments.prompt)


def _status(arguments: argparse.Namespace) -> int:
    from pdmesh.launch.runtime import find_mesh
    from pdmesh.launch.status import Besides, as_json, as_table, collect

    besides, not_ready = Besides(), dict[str, str]()
    if arguments.redis:
        name, url = arguments.mesh or "default", arguments.redis
    else:
        info = find_mesh(arguments.mesh)
        name, url, not_ready = info.name, info.redis_url, info.not_ready
        besides = Besides(info.addresses, info.router_metrics, info.holders)
    lines = asyncio.run(collect(url, name, not_ready))
    print((as_json if arguments.json else as_table)(name, besides, lines))
    return 0


def _version() -> str:
    from pdmesh.wire.messages import PROTOCOL_VERSION

    try:
        version = metadata.version("pdmesh")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"pdmesh {version}, protocol {PROTOCOL_VERSION}, Python {python}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 2 for wrong input, or 1 for what else failed."""
    parent = os.environ.pop("PDMESH_PARENT", None)
    if parent is not None:
        from pdmesh.registry.guard import die_with_parent

        die_with_parent(int(parent))
    try:
        return _run(parser().parse_args(argv))
    except ConfigError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except PdmeshError as error:
        print(f"pdmesh: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
