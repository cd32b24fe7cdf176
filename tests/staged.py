"""``pdmesh`` whose workers stand still at named places until a test lets them go on.

``up`` starts a mesh of such workers. They restart at once, as often as they die, at the same port.
The files of ``$PDMESH_STAGE/<worker>/`` are the stage directions; ``Stage`` writes them:

    <Method>.before   hold a call of this method before its handler (streams: before the first item)
    <Method>.after    hold it when the handler is done, before its answer
    Stream.commit     hold an answer's stream before it asks the router to commit a move
    Stream.at         hold it before the first item at or after this output position (the text)
    Step.at           hold all steps once a sequence has so many tokens (the text): at decode its
                      prompt's and those generated, at prefill those computed. No answer ends
                      meanwhile, and the worker goes on talking
    Step.pace         a step takes so many seconds (the text) more
    wire              the next lease goes through a proxy: "flip 5000", "cut 5000", "hold 5000":
                      at that byte towards the receiver

A held place says so in ``<place>.reached`` and goes on when its file is gone.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

VARIABLE, IDLE, SILENCE = "PDMESH_STAGE", "PDMESH_STAGE_IDLE_S", "PDMESH_STAGE_SILENCE_S"
SILENCE_S = 1.5
"""After which a staged router gives a worker up, unless ``SILENCE`` says another time."""
IDLE_S = 3.0
"""After which a staged decode worker drains a lease that nobody uses, unless ``IDLE`` says another
time."""


class Stage:
    """Stage directions, as a test gives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hold(self, workers, place: str, text: str = "") -> None:
        """Every one of ``workers`` stands still at the place, if it comes there."""
        for worker in workers:
            (self.folder / worker).mkdir(exist_ok=True)
            (self.folder / worker / place).write_text(text)

    def let(self, workers, place: str) -> None:
        """These go on from the place, and are not held there again."""
        for worker in workers:
            for name in (place, f"{place}.reached"):
                (self.folder / worker / name).unlink(missing_ok=True)

    async def reached(self, place: str, number: int = 1, timeout: float = 120) -> list[str]:
        """The workers that stand still at the place, once there are so many."""
        async with asyncio.timeout(timeout):
            while len(found := list(self.folder.glob(f"*/{place}.reached"))) < number:
                await asyncio.sleep(0.01)
        return sorted(path.parent.name for path in found)

    def release(self) -> None:
        """Everything goes on, and nothing is held from now on."""
        for path in self.folder.glob("*/*"):
            path.unlink(missing_ok=True)


class Actor:
    """A worker that reads the directions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _marks(self, place: str) -> tuple[Path, Path]:
        return self._folder / place, self._folder / f"{place}.reached"

    async def at(self, place: str) -> None:
        held, reached = self._marks(place)
        if held.exists():
            reached.touch()
            while held.exists():
                await asyncio.sleep(0.01)

    async def _cut(self, item):
        """A stream's item in one piece, or in two, the second of which begins where it is held."""
        held, _ = self._marks("Stream.at")
        try:
            place = int(held.read_text()) - item.position
        except (OSError, ValueError, AttributeError):
            yield item
            return
        if 0 < place < len(item.token_ids):
            yield replace_fields(
                item,
                token_ids=item.token_ids[:place],
                logprobs=item.logprobs[:place],
                finish=None,
                stop_token=None,
            )
            item = replace_fields(
                item,
                position=item.position + place,
                token_ids=item.token_ids[place:],
                logprobs=item.logprobs[place:],
            )
            place = 0
        if place <= 0:
            await self.at("Stream.at")
        yield item

    def before_step(self, lengths: list[int]) -> None:
        """On the thread of the engine."""
        held, reached = self._marks("Step.at")
        if max(lengths) >= self._number("Step.at"):
            reached.touch()
            while held.exists():
                time.sleep(0.01)
        pace = self._number("Step.pace")
        time.sleep(pace if pace < math.inf else 0.0)

    def _number(self, place: str) -> float:
        """What a direction says; infinite where there is none."""
        try:
            return float((self._folder / place).read_text())
        except (OSError, ValueError):
            return math.inf

    def _proxied(self, lease):
        """The lease, by way of a proxy if the directions say so."""
        from kvtransfer_rig import Proxy

        held, reached = self._marks("wire")
        try:
            what, where = held.read_text().split()
            held.unlink()
        except (OSError, ValueError):
            return lease
        held = self._folder / "wire.held"
        held.touch()

        def change(offset, data):
            if offset <= int(where) < offset + len(data):
                reached.touch()
                if what == "flip":
                    data[int(where) - offset] ^= 1
                if what == "cut":
                    proxy.cut()
                while what == "hold" and held.exists():
                    time.sleep(0.01)
            return data

        proxy = Proxy(change)
        address = dict(lease.transports)["tcp"]
        return replace_fields(lease, transports=(("tcp", proxy.route(address)),))

    def _unary(self, name, handler):
        async def call(request):
            await self.at(f"{name}.before")
            answer = await handler(request)
            await self.at(f"{name}.after")
            return self._proxied(answer) if name in ("Reserve", "AdoptRound") else answer

        return call

    def _stream(self, name, handler):
        from pdmesh.wire.handoff import CommitAsked

        async def call(request):
            await self.at(f"{name}.before")
            items = handler(request)
            try:
                async for item in items:
                    if isinstance(item, CommitAsked):
                        await self.at("Stream.commit")
                    async for part in self._cut(item):
                        yield part
            finally:
                await items.aclose()

        return call

    def staged(self, method):
        """The method as it is acted."""
        if method.unary is not None and method.name != "Status":
            return replace(method, unary=self._unary(method.name, method.unary))
        if method.stream is not None:
            return replace(method, stream=self._stream(method.name, method.stream))
        return method


def serve(arguments: list[str]) -> None:
    """Prepares this process to be a router or worker of a staged mesh."""
    import pdmesh.decode.config as decode_config
    import pdmesh.router.config as router_config

    if "router" in arguments:
        import lying_index

        lying_index.in_this_process()
        router_config.RouterConfig = functools.partial(
            router_config.RouterConfig,
            silence_s=float(os.environ.get(SILENCE, SILENCE_S)),
        )
        return
    import pdmesh.decode.server as decode
    import pdmesh.prefill.server as prefill
    from pdmesh.decode.runner import DecodeRunner
    from pdmesh.prefill.runner import PrefillRunner

    decode_config.DecodeConfig = functools.partial(
        decode_config.DecodeConfig, lease_idle_s=float(os.environ.get(IDLE, IDLE_S))
    )
    folder = Path(os.environ[VARIABLE]) / arguments[arguments.index("--id") + 1]
    folder.mkdir(exist_ok=True)
    actor, host = Actor(folder), decode.host_worker

    def host_staged(binding, methods, *rest, **named):
        return host(binding, [actor.staged(method) for method in methods], *rest, **named)

    decode.host_worker = prefill.host_worker = host_staged
    acted(actor, DecodeRunner, lambda sequence: len(sequence.tokens))
    acted(actor, PrefillRunner, lambda prompt: prompt.start)


def acted(actor: Actor, runner: type, length) -> None:
    """Every step of a runner waits for the directions."""
    step = runner._step

    def staged_step(self, rows):
        actor.before_step([length(row) for row in rows])
        return step(self, rows)

    runner._step = staged_step


def up() -> None:
    """Prepares this process to start a staged mesh."""
    from free_ports import free_port

    import pdmesh.launch.crew as crew
    import pdmesh.launch.processes as processes

    spec_of, ports = crew.worker_spec, {}

    def worker_spec(topology, role, name, *rest):
        spec = spec_of(topology, role, name, *rest)
        port = ports.get(name) or ports.setdefault(name, free_port())
        return replace(spec, arguments=("--port", str(port), *spec.arguments))

    crew.worker_spec = worker_spec
    crew.restart_delay = lambda deaths, now: 0.0
    processes.command = lambda *arguments: [sys.executable, "-P", __file__, *arguments]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from pdmesh.launch.cli import main

    if sys.argv[1] == "up":
        up()
    else:
        serve(sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
