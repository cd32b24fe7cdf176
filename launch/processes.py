"""The processes of a mesh: their command lines, environments, and one running process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdmesh.launch.ranks import RankPlace
from pdmesh.launch.restart import Death
from pdmesh.launch.topology import (
    AUTO_DRAFTS,
    AUTO_PAGES,
    Topology,
    WorkersSection,
    cores,
)
from pdmesh.prefill.config import AUTO_CHUNK
from pdmesh.wire.errors import ConfigError

PARENT_VARIABLE = "PDMESH_PARENT"
REDIS_VARIABLE = "PDMESH_REDIS"
WorkerRole = Literal["prefill", "decode"]
Role = Literal["router", "prefill", "decode", "weights"]
_DRAINING = re.compile(r'event=draining .*left="([^"]+)"')
_FOLLOWING = "event=following"
_TENSORS = re.compile(r"^loading .*tensors=(\d+/\d+)")


@dataclass(frozen=True)
class Spec:
    """How to start one process."""

    name: str
    role: Role
    arguments: tuple[str, ...]
    threads: int
    follows: bool = False
    """Only computes with another worker: it has no request, and no place in the registry."""
    needs: str = ""
    """Name of the process that has to be ready before this one starts."""
    socket: Path | None = None
    """Where it offers weights."""


def threads_per_worker(topology: Topology, asked: int) -> int:
    """``asked``, or if 0 an even share of the cores."""
    workers = topology.prefill.workers + topology.decode.workers
    return asked or max(1, cores() // workers)


def router_name(index: int) -> str:
    """Of the first router, the second, and so on: router, router-1, ..."""
    return f"router-{index}" if index else "router"


def router_spec(
    topology: Topology, name: str, port: int, secret: Path, admin_file: Path, metrics_port: int
) -> Spec:
    """How to start a router; it writes the address of its admin service to ``admin_file``.

    ``metrics_port`` 0: no metrics endpoint.
    """
    router = topology.router
    return Spec(
        name,
        "router",
        (
            *("--id", name, "--port", str(port), "--deadline", str(router.deadline_s)),
            *("--max-attempts", str(router.max_attempts), "--policy", router.policy),
            *("--metrics-port", str(metrics_port), "--admin-file", str(admin_file)),
            *("--device", topology.model.device.split(",")[0]),
            *_shared_arguments(topology, secret),
        ),
        1,
    )


def worker_spec(
    topology: Topology,
    role: WorkerRole,
    name: str,
    secret: Path,
    metrics_port: int,
    place: RankPlace | None = None,
    holder: Spec | None = None,
) -> Spec:
    """How to start a worker: with its share of the cores as they are split among the workers that
    ``topology`` names, however many there are by now. ``metrics_port`` 0: no metrics endpoint.
    ``place``: among the ranks that share the experts, if they do. ``holder``: of its weights.
    """
    section = topology.prefill if role == "prefill" else topology.decode
    threads = threads_per_worker(topology, section.threads)
    own = _prefill_arguments(topology) if role == "prefill" else _decode_arguments(topology)
    sizes = ("--pages", *_pages(topology, role, name, section.pages), "--threads", str(threads))
    moving = ("--transports", ",".join(topology.mesh.transports))
    ending = ("--drain-s", str(topology.mesh.drain_s), "--metrics-port", str(metrics_port))
    hints = () if topology.kvcache.replica_hints else ("--no-replica-hints",)
    caching = ("--eviction", topology.kvcache.eviction, *hints)
    shared = _shared_arguments(topology, secret)
    ranks = () if place is None else place.arguments + _expert_arguments(section)
    if section.virtual_ranks > 1:
        ranks = (*ranks, "--virtual-ranks", str(section.virtual_ranks))
    placed: tuple[str, ...] = ("--device", device_of(topology, name))
    if holder is not None:
        placed = (*placed, "--weights-socket", str(holder.socket))
    arguments = ("--id", name, *sizes, *own, *ranks, *caching, *moving, *ending, *placed, *shared)
    follows = place is not None and place.rank % section.tp != 0
    needs = "" if holder is None else holder.name
    return Spec(name, role, arguments, threads, follows, needs)


def holder_specs(topology: Topology, folder: Path) -> dict[str, Spec]:
    """How to start the processes that hold weights, by device; none where workers load their own.

    ``folder`` is where their sockets will be.
    """
    if not topology.model.share_weights:
        return {}
    devices = list(dict.fromkeys(topology.model.device.split(",")))
    found = {}
    for index, device in enumerate(devices):
        name = f"weights-{index}" if len(devices) > 1 else "weights"
        socket = folder / f"{name}.sock"
        where = ("--id", name, "--weights-socket", str(socket), "--device", device)
        arguments = (*where, *_weights_arguments(topology))
        found[device] = Spec(name, "weights", arguments, cores(), socket=socket)
    return found


def device_of(topology: Topology, name: str) -> str:
    """The device of a worker: those of each role take the devices of the mesh in turn."""
    devices = topology.model.device.split(",")
    return devices[int(name.rpartition("-")[2]) % len(devices) if len(devices) > 1 else 0]


def physical(device: str) -> str:
    """A device under the name that every process of this host has for it, whatever it sees.

    Raises:
        ConfigError: this process does not see it, or it is several.
    """
    if "," in device:
        raise ConfigError(f"a worker computes on one device, not on {device}")
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    if names is not None and int(index or 0) >= len(names):
        raise ConfigError(f"there is no {device}: CUDA_VISIBLE_DEVICES names {visible}")
    return f"{kind}:{int(index or 0) if names is None else names[int(index or 0)]}"


def _pages(topology: Topology, role: WorkerRole, name: str, pages: int) -> tuple[str, ...]:
    """Pages, and on a device an even share of its memory among the workers that are on it."""
    device = device_of(topology, name)
    if device == "cpu":
        return ("auto" if pages == AUTO_PAGES else str(pages),)
    told = (role, "pages") in topology.origins and pages != AUTO_PAGES
    counts = (("prefill", topology.prefill.workers), ("decode", topology.decode.workers))
    names = [f"{which}-{index}" for which, count in counts for index in range(count)]
    workers = sum(device_of(topology, other) == device for other in names)
    return (str(pages) if told else "auto", "--memory-share", f"{1 / max(1, workers):.4f}")


def _expert_arguments(section: WorkersSection) -> tuple[str, ...]:
    still = () if section.rebalance else ("--no-rebalance",)
    heads = ("--tp", str(section.tp)) if section.tp > 1 else ()
    overlap = ("--microbatch-rows", str(section.microbatch_rows))
    return ("--redundant-experts", str(section.redundant_experts), *heads, *overlap, *still)


def _prefill_arguments(topology: Topology) -> tuple[str, ...]:
    section = topology.prefill
    chunk = section.chunk_tokens
    return (
        *("--chunk-tokens", "auto" if chunk == AUTO_CHUNK else str(chunk)),
        *("--max-queue", str(section.max_queue)),
    )


def _decode_arguments(topology: Topology) -> tuple[str, ...]:
    section, drafts = topology.decode, topology.draft_tokens
    asked = ("decode", "draft_tokens") in topology.origins
    words = "auto" if drafts == AUTO_DRAFTS else str(drafts)
    return (
        *("--max-batch", str(section.max_batch)),
        *(("--draft-tokens", words) if asked else ()),
        *("--growth-tokens", str(section.growth_tokens), "--park-mb", str(section.park_mb)),
        *("--max-waiting", str(section.max_waiting)),
    )


def _weights_arguments(topology: Topology) -> tuple[str, ...]:
    """What a process needs to know of the weights."""
    mtp = () if topology.model.mtp else ("--no-mtp",)
    made = topology.random
    random: tuple[str, ...] = ()
    if made is not None:
        random = ("--random-weights", "--weights-seed", str(made.seed))
        random += ("--layers", str(made.layers), "--experts", str(made.experts))
    return (
        *("--model", str(topology.model_path), *random, "--dtype", topology.model.dtype, *mtp),
        *("--precision", topology.model.precision, "--log-level", topology.mesh.log_level),
    )


def _shared_arguments(topology: Topology, secret: Path) -> tuple[str, ...]:
    return (
        *("--mesh", topology.mesh.name, "--host", topology.mesh.host),
        *("--secret-file", str(secret), "--model-name", topology.model_name),
        *_weights_arguments(topology),
        *("--arithmetic", topology.model.arithmetic),
        *("--page-size", str(topology.model.page_size)),
        *("--latents", topology.model.latents),
        *("--step-timeout", str(topology.mesh.step_timeout_s)),
        *("--lease-ttl", str(topology.mesh.lease_ttl_s)),
    )


def command(*arguments: str) -> list[str]:
    """The command line of ``pdmesh`` in a new process of this Python."""
    return [sys.executable, "-P", "-m", "pdmesh.launch.cli", *arguments]


def environment(redis_url: str, threads: int) -> dict[str, str]:
    """A child's environment: where the store is, its threads, and whose child it is."""
    variables = dict(os.environ)
    variables[PARENT_VARIABLE] = str(os.getpid())
    variables[REDIS_VARIABLE] = redis_url
    variables["PYTHONUNBUFFERED"] = "1"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        variables[name] = str(threads)
    roots = [path for path in sys.path if path and (Path(path) / "pdmesh").is_dir()]
    known = variables.get("PYTHONPATH", "").split(os.pathsep)
    added = [os.path.abspath(path) for path in roots if path not in known]
    variables["PYTHONPATH"] = os.pathsep.join(part for part in (*added, *known) if part)
    return variables


@dataclass
class Child:
    """One process of the mesh, over its restarts."""

    spec: Spec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    ready: bool = False
    proven: bool = False
    """Was ready once: its settings are right."""
    replaced: str = ""
    """Instance that registered under this name before; the new one differs."""
    address: str = ""
    deaths: list[Death] = field(default_factory=list)
    start_at: float = 0.0
    """When to start (again)."""
    given_up: bool = False
    late: bool = False
    """Was added to a mesh that ran already: if it cannot start, that does not end the mesh."""
    leaving: bool = False
    """Is stopped on purpose: it is not started again."""
    log_offset: int = 0

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self, redis_url: str, now: float) -> None:
        """Starts the process in a session of its own. Call it from the main thread."""
        self.ready = False
        self.started = now
        with self.log.open("ab") as sink:
            self.log_offset = sink.tell()
            self.process = subprocess.Popen(
                command("serve", self.spec.role, *self.spec.arguments),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(redis_url, self.spec.threads),
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if the process lives."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def last_words(self) -> str:
        """The last line the present or last process logged."""
        try:
            lines = self._last_lines()
        except OSError:
            return "it wrote no log"
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")

    def left(self) -> str:
        """What a draining process still has to do, as it logged last; empty if it said nothing."""
        with contextlib.suppress(OSError):
            for line in reversed(self._last_lines()):
                if found := _DRAINING.search(line):
                    return found[1]
        return ""

    @property
    def following(self) -> bool:
        """Whether a process that only computes with another has said that it does."""
        with contextlib.suppress(OSError):
            return any(_FOLLOWING in line for line in self._last_lines())
        return False

    def _last_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(self.log_offset, self.log.stat().st_size - 65_536))
            return file.read().decode(errors="replace").splitlines()

    def progress(self) -> str:
        """How far the process is, by the last event it logged."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._last_lines()
        events = [line.rpartition("event=")[2] for line in lines if line.strip()]
        if not events:
            return "starting: loads its Python packages"
        if read := _TENSORS.search(events[-1]):
            return f"loading {read[1]} tensors"
        if self.spec.role == "router" and any(said.startswith("ready ") for said in events):
            return "waits for workers"
        return f"starting: {events[-1].strip()[:160]}"
