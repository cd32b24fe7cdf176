"""A mesh that is told to end, ends: also where a client library swallows the cancellation."""

import asyncio
import contextlib
import signal

import pytest

from pdmesh.launch.up import _Session


class Stubborn:
    """A supervisor whose ``busy`` phase takes no notice of the first cancellation."""

    address = "127.0.0.1:7080"

    def __init__(self, busy: str) -> None:
        self.busy = busy
        self.reached = asyncio.Event()
        self.under_way: set[str] = set()
        self.stopped_during: set[str] | None = None

    async def start(self) -> None:
        await self._phase("start", ends=self.busy != "start")

    async def watch(self) -> None:
        await self._phase("watch", ends=False)

    async def stop(self) -> None:
        self.stopped_during = set(self.under_way)

    def kill(self) -> None: ...

    async def _phase(self, name: str, ends: bool) -> None:
        self.under_way.add(name)
        try:
            if name == self.busy:
                self.reached.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            if not ends:
                await asyncio.Event().wait()
        finally:
            self.under_way.discard(name)


@pytest.mark.parametrize("busy", ["start", "watch"])
async def test_a_signal_ends_a_mesh_whose_first_cancellation_is_swallowed(busy):
    supervisor = Stubborn(busy)
    session = _Session(supervisor, ask=False, prompt=None)
    running = asyncio.ensure_future(session.run())
    await supervisor.reached.wait()
    session._on_signal(signal.SIGINT)()
    assert await asyncio.wait_for(running, 30) == 0
    assert supervisor.stopped_during == set(), "processes are ended while something starts them"
