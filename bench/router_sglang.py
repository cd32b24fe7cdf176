"""SGLang's router (``sglang-router``) between workers that only stream, and a client.

As in ``router_mesh``, workers and client are processes of their own, and so is the router.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError

from router_http import client, serve
from router_load import Load, Streamed

_START_S = 120


def importable(directory: Path | None) -> bool:
    """Whether the package is there, in ``directory`` or installed."""
    if directory is not None:
        sys.path.append(str(directory))
    try:
        return importlib.util.find_spec("sglang_router.sglang_router_rs") is not None
    except ImportError:
        return False


def _route(
    directory: Path | None, port: int, metrics: int, prefill: list[str], decode: list[str]
) -> None:
    """A process: the router, with its own defaults."""
    if directory is not None:
        sys.path.append(str(directory))
    arguments = importlib.import_module("sglang_router.router_args").RouterArgs
    router = importlib.import_module("sglang_router.router").Router
    if prefill:
        pools = {
            "pd_disaggregation": True,
            "prefill_urls": [(url, 8998) for url in prefill],
            "decode_urls": decode,
        }
    else:
        pools = {"worker_urls": decode}
    router.from_args(
        arguments(
            host="127.0.0.1",
            port=port,
            prometheus_port=metrics,
            policy="cache_aware",
            log_level="error",
            worker_startup_check_interval=1,
            shutdown_grace_period_secs=1,
            **pools,
        )
    ).start()


def free_ports(count: int) -> list[int]:
    """That nobody listens at now."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all its threads, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_ready(port: int, workers: int, process: multiprocessing.process.BaseProcess) -> None:
    address = f"http://127.0.0.1:{port}/readiness"
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.is_alive():
        with contextlib.suppress(URLError, OSError), urllib.request.urlopen(address) as answer:
            if json.load(answer).get("healthy_workers") == workers:
                return
        time.sleep(0.1)
    raise SystemExit("sglang-router does not become ready")


def measure(
    loads: Sequence[Load], directory: Path | None, prefill: int, decode: int, warm_up: int = 8
) -> list[Streamed]:
    """Runs loads of one pace, one after another, through SGLang's router.

    Args:
        loads: of the client.
        directory: where the package is, if not installed.
        prefill: workers of this role; 0: all workers are alike.
        decode: workers that stream.
        warm_up: answers of the same length that are not counted, before each load.

    Raises:
        SystemExit: an answer was cut short, or the router does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    mine, clients = spawn.Pipe()
    port, metrics = free_ports(2)
    arguments = (theirs, prefill, decode, loads[0].step_ms)
    processes = [
        spawn.Process(target=serve, args=arguments, daemon=True),
        spawn.Process(target=client, args=(clients,), daemon=True),
    ]
    done = []
    try:
        for process in processes:
            process.start()
        theirs.close()  # so that the end of a process ends the measurement
        clients.close()
        urls = [f"http://127.0.0.1:{worker}" for worker in ours.recv()]
        pools = (urls[:prefill], urls[prefill:])
        router = spawn.Process(target=_route, args=(directory, port, metrics, *pools), daemon=True)
        processes.append(router)
        router.start()
        assert router.pid is not None
        _wait_ready(port, len(urls), router)
        for load in loads:
            mine.send((port, load.warm_up(warm_up)))
            mine.recv()
            wall, cpu = time.perf_counter(), cpu_seconds(router.pid)
            mine.send((port, load))
            tokens, messages, text = mine.recv()
            wall, cpu = time.perf_counter() - wall, cpu_seconds(router.pid) - cpu
            if tokens != load.streams * load.answers * load.tokens:
                raise SystemExit(f"{tokens} tokens came for {load}")
            done.append(Streamed(tokens, messages, wall, cpu, text=text))
    finally:
        for process in processes:
            process.terminate()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return done
