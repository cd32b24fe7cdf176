"""A mesh that is told to end, ends: also where a client library swallows the cancellation."""

import asyncio
import contextlib
import signal
from types import SimpleNamespace

import pytest

from pdmesh.launch.changes import Changes
from pdmesh.launch.up import _Session
from pdmesh.wire.control import ScaleRequest
from pdmesh.wire.errors import Unavailable

PATIENCE = 60


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
    assert await asyncio.wait_for(running, PATIENCE) == 0
    assert supervisor.stopped_during == set(), "processes are ended while something starts them"


class StubbornCrew:
    """A crew whose new worker never gets ready; the first cancellation is taken no notice of."""

    group_sizes = {}

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    def workers(self) -> dict:
        return {}

    def add(self, role: str, name: str, after: str) -> SimpleNamespace:
        return SimpleNamespace(spec=SimpleNamespace(name=f"{role}-0"))

    async def until_ready(self, child) -> None:
        self.reached.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()


async def test_a_change_whose_first_cancellation_is_swallowed_is_given_up_too():
    crew = StubbornCrew()
    changes = Changes(crew, lambda: None)
    told = []

    async def ask() -> None:
        async for progress in changes.scale(ScaleRequest(decode=1)):
            told.append(progress.text)

    asking = asyncio.ensure_future(ask())
    await asyncio.wait_for(crew.reached.wait(), PATIENCE)
    await asyncio.wait_for(changes.close(), PATIENCE)
    with pytest.raises(Unavailable, match="the mesh is stopping"):
        await asyncio.wait_for(asking, PATIENCE)
    assert told == ["scaling to decode=1", "decode-0 starting"]
