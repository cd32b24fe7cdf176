"""``pdmesh serve``: one process of a mesh, as ``pdmesh up`` starts it or by hand on any host."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import gc
import os
import secrets
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from pdmesh.launch.checks import check_host, check_model, check_together
from pdmesh.launch.holding import hold
from pdmesh.launch.join import check_joined, joined, offered_weights
from pdmesh.launch.mode import with_mode
from pdmesh.launch.processes import REDIS_VARIABLE, physical
from pdmesh.launch.ranks import check_hosts, check_rank, parse_addresses
from pdmesh.launch.topology import Topology, WorkersSection, cores, load_topology
from pdmesh.registry.address import check_url
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import setup_logs
from pdmesh.wire.secret import read_secret


def serve(arguments: argparse.Namespace) -> int:
    """Runs one process until SIGTERM or Ctrl-C."""
    # Python's last collection of what torch has made takes seconds, and frees nothing that counts.
    atexit.register(gc.freeze)
    role = arguments.role
    if role == "weights":
        _hold(arguments)
        return 0
    topology = _settings(arguments)
    _check(topology, role)
    name = arguments.id or f"{role}-{socket.gethostname()}-{secrets.token_hex(2)}"
    setup_logs(name, topology.mesh.log_level)
    if role == "router":
        _run(_router(topology, arguments.admin_port, arguments.admin_file))
    elif role == "prefill":
        _run(_prefill(topology, name, arguments))
    else:
        _run(_decode(topology, name, arguments))
    return 0


def _settings(arguments: argparse.Namespace) -> Topology:
    """The topology file, overridden by what the command line says."""
    a = arguments
    topology = load_topology(a.topology)
    if a.join is None:
        variable = os.environ.get(REDIS_VARIABLE) or None
        topology = topology.changed("mesh", f"the variable {REDIS_VARIABLE}", redis=variable)
        return _overridden(topology, a)
    if a.role == "router":
        raise ConfigError("--join is for prefill and decode workers; leave it out for a router")
    topology = joined(topology, a.join, a.role, a.secret_file, a.model)
    overridden = _overridden(topology, a)
    check_joined(topology, overridden)
    return overridden


def _overridden(topology: Topology, arguments: argparse.Namespace) -> Topology:
    a = arguments
    topology = topology.changed("mesh", "--redis", redis=a.redis or None)
    if not topology.mesh.redis:
        raise ConfigError("no store given; add --redis URL (the one that all processes share)")
    topology = topology.changed("mesh", "--mesh", name=a.mesh)
    topology = topology.changed("mesh", "--host", host=a.host)
    topology = topology.changed("mesh", "--secret-file", secret_file=a.secret_file)
    topology = topology.changed("mesh", "--lease-ttl", lease_ttl_s=a.lease_ttl)
    topology = _of_weights(topology, a)
    topology = topology.changed("model", "--model-name", name=a.model_name)
    topology = topology.changed(a.role, "--metrics-port", metrics_port=a.metrics_port)
    if a.role == "router":
        topology = topology.changed("mesh", "--port", port=a.port)
        topology = topology.changed("router", "--deadline", deadline_s=a.deadline)
        topology = topology.changed("router", "--max-attempts", max_attempts=a.max_attempts)
        topology = topology.changed("router", "--policy", policy=a.policy)
    else:
        topology = topology.changed(a.role, "--pages", pages=a.pages)
        topology = topology.changed(a.role, "--threads", threads=a.threads)
        topology = topology.changed("kvcache", "--eviction", eviction=a.eviction)
        hints = False if a.no_replica_hints else None
        topology = topology.changed("kvcache", "--no-replica-hints", replica_hints=hints)
        topology = topology.changed("mesh", "--drain-s", drain_s=a.drain_s)
        topology = topology.changed("mesh", "--transports", transports=a.transports)
    if a.role == "prefill":
        topology = topology.changed("prefill", "--chunk-tokens", chunk_tokens=a.chunk_tokens)
        topology = topology.changed("prefill", "--max-queue", max_queue=a.max_queue)
    if a.role == "decode":
        topology = topology.changed("decode", "--max-batch", max_batch=a.max_batch)
        topology = topology.changed("decode", "--draft-tokens", draft_tokens=a.draft_tokens)
        topology = topology.changed("decode", "--growth-tokens", growth_tokens=a.growth_tokens)
        topology = topology.changed("decode", "--park-mb", park_mb=a.park_mb)
        topology = topology.changed("decode", "--max-waiting", max_waiting=a.max_waiting)
    if a.role != "router":
        topology = topology.changed(a.role, "--ep-ranks", ep=_group_size(a))
        topology = topology.changed(a.role, "--tp", tp=a.tp)
        topology = topology.changed(
            a.role, "--redundant-experts", redundant_experts=a.redundant_experts
        )
        still = False if a.no_rebalance else None
        topology = topology.changed(a.role, "--no-rebalance", rebalance=still)
        rows = a.microbatch_rows
        topology = topology.changed(a.role, "--microbatch-rows", microbatch_rows=rows)
        virtual = a.virtual_ranks
        topology = topology.changed(a.role, "--virtual-ranks", virtual_ranks=virtual)
    if topology.mesh.secret_file is None:
        raise ConfigError("no secret given; add --secret-file FILE (the same on every host)")
    return topology


def _of_weights(topology: Topology, arguments: argparse.Namespace) -> Topology:
    """The topology, overridden by what a command line says of weights."""
    a = arguments
    topology = topology.changed("mesh", "--log-level", log_level=a.log_level)
    topology = topology.changed("model", "--model", path=a.model)
    topology = topology.changed("model", "--dtype", dtype=a.dtype)
    topology = topology.changed("model", "--no-mtp", mtp=False if a.no_mtp else None)
    return with_mode(topology, a)


def _hold(arguments: argparse.Namespace) -> None:
    """Holds weights for workers until SIGTERM or Ctrl-C."""
    topology = _of_weights(load_topology(arguments.topology), arguments)
    with topology.blamed("model", "path"):
        check_model(topology.model_path, weights=not topology.model.random_weights)
    check_together(topology)
    if arguments.weights_socket is None:
        raise ConfigError("weights are offered at a socket; add --weights-socket PATH")
    name = arguments.id or "weights"
    setup_logs(name, topology.mesh.log_level)
    device = _own_device(topology.model.device, ranks=False)
    hold(topology, name, arguments.weights_socket, device)


def _group_size(arguments: argparse.Namespace) -> int | None:
    """Ranks that are named; None if there are none."""
    ranks = parse_addresses(arguments.ep_ranks or "")
    check_rank(arguments.ep_rank, ranks)
    check_hosts(ranks, arguments.tp or 1)
    return len(ranks) or None


def _check(topology: Topology, role: str) -> None:
    """Raises ConfigError, with the file or flag, for what can be seen before anything starts."""
    mesh = topology.mesh
    assert mesh.secret_file is not None
    with topology.blamed("mesh", "redis"):
        check_url(mesh.redis)
    if role != "router":  # a router may listen on all addresses
        with topology.blamed("mesh", "host"):
            check_host(mesh.host)
    with topology.blamed("model", "path"):
        check_model(
            topology.model_path, weights=role != "router" and not topology.model.random_weights
        )
    check_together(topology)
    with topology.blamed("mesh", "secret_file"):
        read_secret(mesh.secret_file)


def _worker(
    topology: Topology, name: str, section: WorkersSection, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What both kinds of workers are told."""
    mesh, model = topology.mesh, topology.model
    ranks = parse_addresses(arguments.ep_ranks or "")
    held = _held(topology, arguments)  # before the device gets its name of this process alone
    return {
        "worker_id": name,
        "redis_url": mesh.redis,
        "mesh": mesh.name,
        "secret_file": mesh.secret_file,
        "model_path": topology.model_path,
        "model_name": topology.model_name,
        "random": topology.random,
        "tokenizer_path": topology.tokenizer_path,
        "host": mesh.host,
        "port": arguments.port or 0,
        "transfer_host": mesh.host,
        "transports": mesh.transports,
        "metrics_port": section.metrics_port,
        "dtype": model.dtype,
        "arithmetic": model.arithmetic,
        "page_size": model.page_size,
        "mtp": model.mtp,
        "lease_ttl_s": mesh.lease_ttl_s,
        "drain_s": mesh.drain_s,
        "step_timeout_s": mesh.step_timeout_s,
        "device": _own_device(model.device, bool(arguments.ep_ranks)),
        "precision": model.precision,
        "latents": model.latents,
        "memory_share": arguments.memory_share,
        "weights_from": arguments.weights_socket or held,
        "pages": section.pages,
        "eviction": topology.kvcache.eviction,
        "replica_hints": topology.kvcache.replica_hints,
        "threads": section.threads or cores(),
        "ep_ranks": ranks,
        "ep_rank": check_rank(arguments.ep_rank, ranks),
        "tp": section.tp,
        "redundant_experts": section.redundant_experts,
        "rebalance": section.rebalance,
        "microbatch_rows": section.microbatch_rows,
        "virtual_ranks": section.virtual_ranks,
    }


def _held(topology: Topology, arguments: argparse.Namespace) -> Path | None:
    """Where a mesh of this machine that is joined offers its weights on this worker's device."""
    if not arguments.join or arguments.ep_ranks:
        return None
    model = topology.model
    return offered_weights(arguments.join, physical(model.device), model.precision)


def _own_device(device: str, ranks: bool) -> str:
    """The device under the name that it has once it is the first that this process sees: every
    thread then computes there. Call it before anything looks for devices.

    `ranks`: the process shares experts, and so memory, with others on other devices: it sees all.
    """
    own = physical(device).partition(":")[2]
    kind, _, index = device.partition(":")
    if index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        others = (visible.split(",") if visible else _devices()) if ranks else []
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([own, *(n for n in others if n != own)])
    return kind


def _devices() -> list[str]:
    """The numbers of all GPUs of this host."""
    with contextlib.suppress(OSError):
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    return []


def _prefill(
    topology: Topology, name: str, arguments: argparse.Namespace
) -> Coroutine[Any, Any, None]:
    from pdmesh.prefill.config import PrefillConfig
    from pdmesh.prefill.server import serve_prefill

    section = topology.prefill
    return serve_prefill(
        PrefillConfig(
            chunk_tokens=section.chunk_tokens,
            max_queue=section.max_queue,
            **_worker(topology, name, section, arguments),
        )
    )


def _decode(
    topology: Topology, name: str, arguments: argparse.Namespace
) -> Coroutine[Any, Any, None]:
    from pdmesh.decode.config import DecodeConfig
    from pdmesh.decode.server import serve_decode

    section = topology.decode
    return serve_decode(
        DecodeConfig(
            max_batch=section.max_batch,
            draft_tokens=topology.draft_tokens,
            growth_tokens=section.growth_tokens,
            park_mb=section.park_mb,
            max_waiting=section.max_waiting,
            **_worker(topology, name, section, arguments),
        )
    )


def _router(
    topology: Topology, admin_port: int = 0, admin_file: Path | None = None
) -> Coroutine[Any, Any, None]:
    from pdmesh.router.config import RouterConfig
    from pdmesh.router.server import serve_router

    mesh = topology.mesh
    assert mesh.secret_file is not None
    return serve_router(
        RouterConfig(
            model_path=topology.model_path,
            model_name=topology.model_name,
            secret_file=mesh.secret_file,
            redis_url=mesh.redis,
            mesh=mesh.name,
            host=mesh.host,
            port=mesh.port,
            metrics_port=topology.router.metrics_port or None,
            default_timeout=topology.router.deadline_s,
            policy=topology.router.policy,
            max_attempts=topology.router.max_attempts,
            admin_port=admin_port,
            admin_file=admin_file,
            lease_ttl_s=mesh.lease_ttl_s,
            random=topology.random,
            tokenizer_path=topology.tokenizer_path,
        )
    )


def _run(program: Coroutine[Any, Any, None]) -> None:
    """Runs until the program ends; SIGTERM and SIGINT cancel it unless it handles them itself."""

    async def main() -> None:
        task = asyncio.ensure_future(program)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for number in (signal.SIGTERM, signal.SIGINT):  # it ends: told again, it ends no worse
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    asyncio.run(main())
