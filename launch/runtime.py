"""The runtime directory of a mesh: where its processes, and later commands, find each other.

``$XDG_RUNTIME_DIR/pdmesh/<name>`` or ``~/.cache/pdmesh/run/<name>``, readable by its owner alone:
``mesh.json`` (addresses), ``secret.key``, ``control.sock``, ``logs/``, and ``lock``, which
``pdmesh up`` holds as long as it lives; a directory whose lock is free belongs to a mesh that is
gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdmesh.wire.control import JoinInfo
from pdmesh.wire.errors import ConfigError, Unavailable


class HolderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds the weights of a device for the mesh's workers on it."""

    name: str
    device: str
    """See ``processes.physical``."""
    precision: str
    """As it was asked for."""
    socket: str
    """Path of the socket where it offers them."""
    state: str
    """``ready``, or as in ``MeshInfo.not_ready``."""


class MeshInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What ``mesh.json`` says about a running mesh."""

    name: str
    address: str
    """host:port of a router; of one that answers, if any does."""
    redis_url: str
    model: str
    supervisor_pid: int
    pids: dict[str, int]
    logs: str
    control: str = ""
    """Path of the supervisor's socket."""
    router_admin: str = ""
    """host:port of that router's admin service."""
    addresses: tuple[str, ...] = ()
    """host:port of every router."""
    router_admins: tuple[str, ...] = ()
    """host:port of every router's admin service."""
    router_metrics: tuple[str, ...] = ()
    """host:port of every router's Prometheus endpoint."""
    not_ready: dict[str, str] = {}
    """Workers that are not ready: starting, restarting or given up."""
    holders: tuple[HolderInfo, ...] = ()
    """Processes that hold weights, one a device, where workers share them."""
    join: JoinInfo | None = None
    """What a further worker on this machine needs."""


def run_root() -> Path:
    """The directory above all runtime directories of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "pdmesh"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdmesh" / "run"


@dataclass(frozen=True)
class RunDir:
    """One mesh's runtime directory."""

    path: Path

    @property
    def logs(self) -> Path:
        """One log file a process."""
        return self.path / "logs"

    @property
    def control(self) -> Path:
        """The supervisor's socket."""
        return self.path / "control.sock"

    def admin_file(self, router: str) -> Path:
        """Where a router writes the address of its admin service."""
        return self.path / f"{router}.admin"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def prepare(self) -> None:
        """Makes the directories, and empties the logs of the mesh before."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            left = (self.control, *self.path.glob("*.admin"), *self.path.glob("weights*.sock"))
            for old in (*self.logs.glob("*.log"), *left):
                old.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write the runtime directory {self.path}: {error.strerror}"
            ) from error

    def secret(self, path: Path | None) -> Path:
        """The file with the page-hash key, made with a random key if it is missing."""
        target = self.path / "secret.key" if path is None else path
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return target
        except OSError as error:
            raise ConfigError(
                f"cannot write the secret file {target}: {error.strerror}; give one in a folder "
                "that exists and can be written"
            ) from error
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        return target

    def write(self, info: MeshInfo) -> None:
        """Publishes ``mesh.json`` for its owner alone, whole or not at all."""
        part = self.path / "mesh.json.part"
        part.touch(mode=0o600)
        part.chmod(0o600)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(info)))
        part.replace(self.path / "mesh.json")

    def read(self) -> MeshInfo | None:
        """The running mesh's description; None if it is gone or still starting."""
        if not self.held():
            return None
        try:
            return msgspec.json.decode((self.path / "mesh.json").read_bytes(), type=MeshInfo)
        except (OSError, msgspec.DecodeError, json.JSONDecodeError):
            return None

    def forget(self) -> None:
        """Removes ``mesh.json``."""
        (self.path / "mesh.json").unlink(missing_ok=True)

    def held(self) -> bool:
        """Whether a ``pdmesh up`` holds the directory."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            return not _lock(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def hold(self) -> Iterator[bool]:
        """Holds the directory until the block, or the process, ends. False if another does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write the runtime directory {self.path}: {error.strerror}"
            ) from error
        try:
            yield _lock(descriptor)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def claim(name: str, explicit: bool) -> Iterator[tuple[str, RunDir]]:
    """Holds a runtime directory for a new mesh; yields (name, directory).

    If a running mesh has the name and it was not asked for, ``<name>-2`` and so on is taken.

    Raises:
        ConfigError: the name was asked for and is in use.
    """
    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}-{number}"
        folder = RunDir(run_root() / candidate)
        with folder.hold() as mine:
            if mine:
                yield candidate, folder
                return
        if explicit:
            raise ConfigError(f"a mesh named {name!r} is running already; give another name")
    raise ConfigError(f"999 meshes named {name!r} are running; stop some")


def find_mesh(name: str | None) -> MeshInfo:
    """The running mesh of that name; without a name the only one, or the one named ``default``.

    Raises:
        Unavailable: there is none, or none can be chosen.
    """
    root = run_root()
    names = [name] if name else sorted(p.name for p in root.glob("*") if p.is_dir())
    found = {n: info for n in names if (info := RunDir(root / n).read()) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        what = f"no mesh named {name!r}" if name else "no mesh"
        raise Unavailable(f"{what} is running on this machine; start one with: pdmesh up")
    if "default" in found:
        return found["default"]
    raise Unavailable(f"several meshes are running; choose one with --mesh: {', '.join(found)}")
