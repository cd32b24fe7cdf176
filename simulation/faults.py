"""What befalls a simulated mesh, and how it is healed."""

from __future__ import annotations

from pdmesh.simulation.loop import Process
from pdmesh.simulation.router import SimRouter
from pdmesh.simulation.scenario import FaultSpec, Scenario
from pdmesh.simulation.workers import SimWorker, Surroundings, start_worker
from pdmesh.wire.errors import PdmeshError

_ROUTER_AWAY_S = 0.5


class Processes:
    """The processes that run now, and what is done to them."""

    def __init__(self, around: Surroundings, scenario: Scenario) -> None:
        self.around = around
        self.scenario = scenario
        self.loop = around.network.loop
        self.workers: dict[str, SimWorker] = {}
        self.all_workers: list[SimWorker] = []
        self.routers: list[SimRouter] = []
        self.healed = False
        for name in scenario.workers:
            self.start(name)
        self.start_router()

    # ---- starting and ending --------------------------------------------------------------

    @property
    def router(self) -> SimRouter:
        """The router now, or the last one."""
        return self.routers[-1]

    def start(self, name: str) -> None:
        """Starts a worker unless one of its name runs."""
        known = self.workers.get(name)
        if known is not None and known.process.alive:
            return
        self.around.network.trace("start", worker=name)
        self.workers[name] = start_worker(self.around, name)
        self.all_workers.append(self.workers[name])

    def start_router(self) -> None:
        """Starts a router unless one runs."""
        if self.routers and self.router.process.alive:
            return
        process = Process("router")
        self.around.network.join(process)
        build = SimRouter
        self.routers.append(process.context.run(build, self.around, process, self.scenario.seed))

    def live(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.process.alive]

    # ---- faults ---------------------------------------------------------------------------

    def befall(self, fault: FaultSpec) -> None:
        """One fault, now."""
        if self.healed:
            return
        self.around.network.trace(
            "fault", kind=fault.kind, target=fault.target, other=fault.other, s=fault.seconds
        )
        getattr(self, f"_{fault.kind}")(fault)

    def _kill(self, fault: FaultSpec) -> None:
        self.loop.kill(self.workers[fault.target].process)
        self.loop.call_later(fault.seconds, self.start, fault.target)

    def _pause(self, fault: FaultSpec) -> None:
        process = self.workers[fault.target].process
        self.loop.pause(process)
        self.loop.call_later(fault.seconds, self.loop.resume, process)

    def _cut(self, fault: FaultSpec) -> None:
        self.around.network.cut(fault.target, fault.other, "the connection was reset")

    def _partition(self, fault: FaultSpec) -> None:
        self.around.network.partition(fault.target, fault.other, fault.seconds)

    def _slow(self, fault: FaultSpec) -> None:
        pair = self.around.network.pair_by_name(fault.target, fault.other)
        pair.factor = fault.factor
        self.loop.call_later(fault.seconds, setattr, pair, "factor", 1.0)

    def _store_down(self, fault: FaultSpec) -> None:
        self.around.store.down_until = self.loop.time() + fault.seconds

    def _store_wiped(self, fault: FaultSpec) -> None:
        self.around.store.wipe()

    def _store_wrong(self, fault: FaultSpec) -> None:
        self.around.store.confuse()

    def _router_restart(self, fault: FaultSpec) -> None:
        self.loop.kill(self.router.process)
        self.loop.call_later(_ROUTER_AWAY_S, self.start_router)

    def _drain(self, fault: FaultSpec) -> None:
        worker = self.workers[fault.target]
        if not worker.process.alive or worker.life.state != "ready":
            return
        emptying = worker.process.context.copy().run(worker.drain.begin, "told to")

        def over(_: object) -> None:
            self.loop.kill(worker.process)
            self.loop.call_later(fault.seconds, self.start, fault.target)

        emptying.add_done_callback(over)

    def keep_moving(self) -> None:
        """Moves some running answer now and then."""
        if self.scenario.move_every and not self.healed:
            self.move_one()
            self.loop.call_later(self.scenario.move_every, self.keep_moving)

    def _migrate(self, fault: FaultSpec) -> None:
        self.move_one()

    def move_one(self) -> None:
        """Moves a running answer, if there is one and a worker for it."""
        router = self.router
        running = [a for a in router.moves.answers() if a.phase == "running"]
        if not router.process.alive or not running:
            return
        answer = self.around.network.rng.choice(running)
        try:
            router.process.context.copy().run(router.moves.start, answer, "")
        except PdmeshError as error:
            self.around.network.trace("no_move", reason=error.message)

    def heal(self) -> None:
        """Ends every fault; what is dead or drains is started anew."""
        self.healed = True
        self.around.network.heal()
        self.around.store.down_until = 0.0
        troubles = self.around.troubles
        troubles.flip = troubles.cut = troubles.stall = 0.0
        for worker in self.workers.values():
            if worker.process.alive and worker.process.paused:
                self.loop.resume(worker.process)
            if worker.life.state == "draining":
                self.loop.kill(worker.process)
        for name in self.scenario.workers:
            self.start(name)
        self.start_router()
