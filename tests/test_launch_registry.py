"""pdmesh registry: what it shows, what it finds, and how it ends."""

import asyncio
import json
import threading

import pytest
from store_rig import Churn, record

from pdmesh.launch.cli import main
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.host import Binding, bind
from pdmesh.registry.keys import Keys
from pdmesh.registry.publisher import WorkerLease
from pdmesh.wire.messages import Empty
from pdmesh.wire.rpc import Method, add_service, server_options

MESH = "m"


class Running:
    """A store and a worker with pages, in a thread of their own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.do(self._start())

    def do(self, body):
        return asyncio.run_coroutine_threadsafe(body, self.loop).result(60)

    async def _start(self) -> None:
        import grpc

        self.server = grpc.aio.server(options=server_options(1 << 20))
        address = bind(self.server, Binding("127.0.0.1", 0))
        self.churn = Churn(1)
        self.lease = self.churn.lease = WorkerLease(
            self.url, MESH, record("decode-0", "i", address), snapshot=self.churn.snapshot
        )

        async def digests(_: Empty):
            return self.lease.digests()

        add_service(self.server, "decode", [Method("Digests", Empty, unary=digests)])
        await self.server.start()
        await self.lease.start()
        await self.lease.ready()
        for _ in range(20):
            self.churn.step()
        while not self.lease.settled:
            await asyncio.sleep(0.01)

    async def command(self, *command) -> object:
        return await self.lease._store.execute(*command)

    async def _stop(self) -> None:
        await self.lease.close()
        await self.server.stop(0)

    def close(self) -> None:
        self.do(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def running():
    server = EmbeddedStore()
    running = Running(server.start())
    yield running
    running.close()
    server.stop()


def run(running: Running, *arguments: str) -> int:
    return main(["registry", *arguments, "--redis", running.url, "--mesh", MESH])


def test_inspect_shows_workers_and_their_pages(running, capsys):
    assert run(running, "inspect") == 0
    shown = capsys.readouterr().out
    assert "mesh m: 16 partitions" in shown
    line = next(line for line in shown.splitlines() if line.startswith("decode-0"))
    assert line.split()[1:3] == ["ready", "0"]
    assert int(line.split()[4]) == len(running.churn.snapshot())


def test_check_of_a_store_that_is_right_ends_with_0(running, capsys):
    assert run(running, "check") == 0
    assert "equal" in capsys.readouterr().out
    assert run(running, "check", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["workers"][0]["pages"] == found["workers"][0]["pages_in_store"] > 0


def test_check_of_a_store_that_is_wrong_ends_with_1_and_names_the_partition(running, capsys):
    keys = Keys(MESH)
    number = next(
        n
        for n in range(16)
        if running.do(running.command("EXISTS", keys.partition(n)[0]))
        and running.do(running.command("EXISTS", keys.partition(n)[2]))
    )
    running.do(running.command("DEL", keys.partition(number)[0]))
    assert run(running, "check", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (worker,) = found["workers"]
    assert worker["problems"] == [f"partition {number}: the store has no records of this epoch"]
    assert run(running, "check") == 1
    assert f"partition {number}" in capsys.readouterr().out


def test_gc_removes_the_records_of_the_dead_and_no_others(running, capsys):
    async def strangers() -> int:
        churn = Churn(7)
        lease = churn.lease = WorkerLease(
            running.url, MESH, record("decode-9"), snapshot=churn.snapshot
        )
        await lease.start()
        for _ in range(20):
            churn.step()
        while not lease.settled:
            await asyncio.sleep(0.01)
        await lease.stop()
        await lease._store.call("deregister", "decode-9", lease.epoch)
        await lease._store.close()
        return len(churn.snapshot())

    left = running.do(strangers())
    assert run(running, "inspect", "--json") == 0
    assert sum(s["pages"] for s in json.loads(capsys.readouterr().out)["strays"]) == left
    assert run(running, "check") == 1
    capsys.readouterr()
    assert run(running, "gc", "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == left
    assert run(running, "check") == 0
    assert run(running, "gc") == 0
    assert "0 dead records removed" in capsys.readouterr().out


def test_a_store_that_does_not_answer_ends_with_2(capsys):
    assert main(["registry", "check", "--redis", "redis://:word@127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "word" not in said


def test_wrong_usage_ends_with_2(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["registry", "destroy"])
    assert raised.value.code == 2
    assert main(["registry", "check", "--redis", "foo://x"]) == 2
