"""One seed, one run: the mesh, its clients and its faults, and whether all went well."""

from __future__ import annotations

import asyncio
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdmesh.simulation.contents import Contents
from pdmesh.simulation.determined import Trace, determined
from pdmesh.simulation.faults import Processes
from pdmesh.simulation.loop import Deadlock, TooManyEvents, VirtualLoop
from pdmesh.simulation.network import Network
from pdmesh.simulation.router import Record, expected_answers
from pdmesh.simulation.scenario import ClientSpec, Scenario, draw_scenario
from pdmesh.simulation.store import SimStore
from pdmesh.simulation.transport import Troubles
from pdmesh.simulation.workers import Surroundings
from pdmesh.wire.messages import Role
from pdmesh.wire.sampling import SamplingParams

_LOOK_S = 0.25
"""Between two looks at the books, in virtual seconds."""
_REST_S = 100.0
"""By then all that a request held is given back: its deadline, and an idle lease's time."""
_RECOVER_S = 60.0
"""By then a healed mesh serves again."""
_LATE_S = 5.0
_AMPLE_S = 25.0
"""A request with so much time is served in time where nothing goes wrong."""
REQUESTS = 10
"""Of a run, unless told otherwise."""
ROLES: tuple[Role, ...] = ("prefill", "decode")

_FORGOTTEN = re.compile(r" lease=(\w+) .*no router came for the lease")
_NOT_TAKEN_OVER = re.compile(r" not_taken_over .*lease (\w+) is over")


class Wrong(Exception):
    """An invariant does not hold; the message says which, one sentence a line."""


@dataclass(frozen=True)
class Outcome:
    """How a run went. ``problems`` is empty when all is well."""

    seed: int
    problems: tuple[str, ...]
    trace: tuple[str, ...]
    endings: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    events: int = 0
    requests: int = REQUESTS

    @property
    def summary(self) -> str:
        """One line."""
        how = ", ".join(f"{count} {name}" for name, count in sorted(self.endings.items()))
        verdict = "ok" if not self.problems else "FAILED"
        return f"seed {self.seed}: {verdict}; {self.seconds:.1f} s, {self.events} events; {how}"

    @property
    def again(self) -> str:
        """How to repeat it."""
        number = "" if self.requests == REQUESTS else f" --requests {self.requests}"
        return f"again: pdmesh simulate --seed {self.seed}{number} --trace"


def simulate(seed: int, requests: int = REQUESTS, scenario: Scenario | None = None) -> Outcome:
    """Runs a seed. The same seed gives the same trace, to the byte, on the same version."""
    scenario = scenario or draw_scenario(seed, requests)
    rng = random.Random(f"run {seed}")
    loop = VirtualLoop(rng)  # type: ignore[abstract]
    trace = Trace(loop)
    with determined(loop, rng, trace):
        world = World(scenario, loop, rng, trace)
        problems: list[str] = []
        try:
            loop.run_until_complete(world.run())
        except Wrong as wrong:
            problems = str(wrong).splitlines()
        except (Deadlock, TooManyEvents) as error:
            problems = [str(error), *world.state()]
        except Exception:  # noqa: BLE001 - the run itself broke: that is a finding too
            problems = traceback.format_exc().splitlines()
        endings = Counter(record.ended or "not over" for record in world.records)
        outcome = Outcome(
            seed,
            tuple(problems),
            tuple(trace.lines),
            dict(endings),
            loop.time(),
            loop.events,
            requests,
        )
        loop.abandon()
    return outcome


class World:
    """A run's parts. ``run`` raises Wrong."""

    def __init__(
        self, scenario: Scenario, loop: VirtualLoop, rng: random.Random, trace: Trace
    ) -> None:
        self.scenario = scenario
        self.loop = loop
        self.trace = trace
        troubles = Troubles(scenario.flip, scenario.cut, scenario.stall)
        network = Network(loop, rng, trace)
        self.around = Surroundings(scenario.mesh, network, SimStore(loop, rng), troubles)
        self.records: list[Record] = []
        self.contents = Contents()
        self.processes: Processes

    async def run(self) -> None:
        """The whole run."""
        self.processes = Processes(self.around, self.scenario)
        await self._until(self._seen, 5.0, "a router that knows its workers")
        start = self.loop.time()
        for client in self.scenario.clients:
            self.loop.call_at(start + client.at, self._begin, client)
        for fault in self.scenario.faults:
            self.loop.call_at(start + fault.at, self.processes.befall, fault)
        self.loop.call_at(start, self.processes.keep_moving)
        await self._until(lambda: len(self.records) == len(self.scenario.clients), 60.0, "clients")
        longest = max((client.timeout for client in self.scenario.clients), default=0.0)
        await self._until(self._all_over, longest + _LATE_S, "the end of all requests")
        self._judge()
        self.processes.heal()
        await self._until(lambda: not self.left(), _REST_S, "rest")
        await self._probe()
        await self._until(lambda: not self.left(), _REST_S, "rest after the probe")
        self._judge()

    # ---- clients --------------------------------------------------------------------------

    def _begin(self, client: ClientSpec) -> None:
        too_big = self.scenario.mesh.never_fits(client)
        record = Record(client, expected_answers(client), too_big=too_big)
        self.records.append(record)
        router = self.processes.router
        if router.process.alive:
            router.begin(record)
        else:
            record.ended, record.message = "router lost", "connection refused"

    def _seen(self) -> bool:
        view = self.processes.router.view
        known = [record for role in ROLES for record in view.ready(role)]
        return len(known) == len(self.scenario.workers)

    def _all_over(self) -> bool:
        return all(record.ended for record in self.records)

    async def _probe(self) -> None:
        """A healed mesh serves."""
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        deadline = self.loop.time() + _RECOVER_S
        prompt = tuple(range(1, 20))
        number = 0
        while True:
            client = ClientSpec(f"probe{number}", 0.0, prompt, sampling, 1, 0, 20.0)
            self._begin(client)
            record = self.records[-1]
            await self._until(lambda: bool(record.ended), 30.0, "the probe")  # noqa: B023
            self._judge()
            if record.ended == "finished":
                return
            if self.loop.time() > deadline:
                raise Wrong(f"the mesh does not recover: {record.ended} {record.message}")
            number += 1
            await asyncio.sleep(1.0)

    # ---- checks ---------------------------------------------------------------------------

    async def _until(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits, and looks at the books meanwhile. Raises Wrong when it takes too long."""
        deadline = self.loop.time() + seconds
        while not reached():
            self._look()
            if self.loop.time() > deadline:
                raise Wrong("\n".join([f"{what} did not come in {seconds:g} s", *self.state()]))
            await asyncio.sleep(_LOOK_S)

    def _look(self) -> None:
        """What has to hold at any moment."""
        problems = [*self.loop.faults, *self.around.network.problems]
        for worker in self.processes.live():
            problems += [f"{worker.process}: {text}" for text in worker.problems()]
            problems += self.contents.check(worker)
            if worker.work.done():
                problems.append(f"{worker.process}: its loop ended")
        problems += [text for record in self.records for text in record.problems()]
        if problems:
            raise Wrong("\n".join(problems))

    def _judge(self) -> None:
        """What has to hold of requests that are over."""
        self._look()
        if not self.scenario.calm:
            return
        for record in self.records:
            allowed = {"finished", "cancelled", "Overloaded"}
            if record.spec.timeout < _AMPLE_S:
                allowed.add("DeadlineExceeded")
            if record.too_big:
                allowed.add("InvalidRequest")
            if record.ended not in allowed:
                raise Wrong(f"{record.spec.name} ended with {record.ended}: {record.message}")
        # Behind a slow client a router may come too late for a moved answer, and says so.
        late = {lease for line in self.trace.lines for lease in _NOT_TAKEN_OVER.findall(line)}
        lost = [
            line
            for line in self.trace.lines
            if (forgotten := _FORGOTTEN.search(line)) and forgotten[1] not in late
        ]
        if lost:
            raise Wrong("a lease was not released:\n" + "\n".join(lost))

    def left(self) -> list[str]:
        """What the live processes still hold, in words."""
        found = [text for worker in self.processes.live() for text in worker.left()]
        return found + self.processes.router.left()

    def state(self) -> list[str]:
        """For a report of what hangs."""
        paused = [f"{w.process} is paused" for w in self.processes.live() if w.process.paused]
        return [*self.left(), *paused]


def without_faults(scenario: Scenario) -> Scenario:
    """The same requests in a calm mesh."""
    return replace(scenario, faults=(), flip=0.0, cut=0.0, stall=0.0)
