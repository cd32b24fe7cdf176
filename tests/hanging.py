"""``pdmesh`` with decode workers: once the file $PDMESH_HANG is there, a next step never ends."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path

VARIABLE = "PDMESH_HANG"


def serve() -> None:
    """Prepares this process to be a worker that may hang, and to end soon after it does."""
    import pdmesh.decode.server as server
    from pdmesh.decode.runner import DecodeRunner
    from pdmesh.registry.watchdog import end_process

    step, file = DecodeRunner._step, Path(os.environ[VARIABLE])

    def may_hang(self, sequences):
        if file.exists():
            file.unlink()
            threading.Event().wait()
        return step(self, sequences)

    DecodeRunner._step = may_hang
    server.watched = partial(server.watched, give_up=partial(end_process, 1.0), every_s=0.1)


if __name__ == "__main__":
    from pdmesh.launch.cli import main

    if sys.argv[1] == "up":
        import pdmesh.launch.processes as processes

        processes.command = lambda *arguments: [sys.executable, "-P", __file__, *arguments]
    elif "decode" in sys.argv:
        serve()
    sys.exit(main(sys.argv[1:]))
