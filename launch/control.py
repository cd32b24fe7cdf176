"""The supervisor's socket: a unix socket that its owner alone can open."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import grpc

from pdmesh.launch.changes import Changes
from pdmesh.wire.control import RestartRequest, ScaleRequest
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, Method, add_service, server_options

SERVICE = "supervisor"
_LONGEST_PATH = 100
"""A unix socket's path has at most 107 bytes."""


class ControlServer:
    """Serves ``Scale`` and ``Restart``.

    Args:
        wanted: path of the socket, in a directory of mode 0700; one of its own is made in the
            directory for temporary files if that path is too long.
    """

    def __init__(self, changes: Changes, wanted: Path) -> None:
        self._changes = changes
        self._wanted = wanted
        self._folder: str | None = None
        self._server: grpc.aio.Server | None = None
        self.path = ""
        """Of the socket; empty until it listens."""

    async def start(self) -> None:
        """Listens."""
        path = self._wanted
        if len(bytes(path)) > _LONGEST_PATH:
            self._folder = tempfile.mkdtemp(prefix="pdmesh-")
            path = Path(self._folder) / "control.sock"
        self._server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
        add_service(
            self._server,
            SERVICE,
            [
                Method("Scale", ScaleRequest, stream=self._changes.scale),
                Method("Restart", RestartRequest, stream=self._changes.restart),
            ],
        )
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        path.chmod(0o600)
        self.path = str(path)

    async def close(self) -> None:
        """Stops listening, and removes the socket."""
        if self._server is not None:
            await self._server.stop(0.5)
            self._server = None
        with contextlib.suppress(OSError):
            self._wanted.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
