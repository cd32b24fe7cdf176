"""``pdmesh up`` with real processes; the workers only register and the router echoes."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_path import python_path

from pdmesh.launch.ports import DEFAULT_PORT, claim_port, claim_ports
from pdmesh.launch.processes import Child, Spec
from pdmesh.registry.embedded import EmbeddedStore
from pdmesh.registry.store import Store, read_members
from pdmesh.wire.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
FAKES = Path(__file__).resolve().parent / "launch_fakes.py"
PROCESSES = {"store", "router", "prefill-0", "decode-0", "decode-1"}


def until(condition, what: str, tries: int = 12_000):
    """Asks again and again; only a failure takes long."""
    for _ in range(tries):
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(what)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def commands_that_name(folder: Path) -> list[str]:
    """Command lines of running processes that hold the folder's path."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if str(folder) in line else []
    return found


class Meshes:
    """Starts commands in a runtime directory of their own, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.seen: set[int] = set()
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "PYTHONPATH": python_path(),
        }

    def run(
        self, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-P", str(FAKES), *arguments],
            env={**self.environment, **variables},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def start(self, *arguments: str, stdin=subprocess.DEVNULL, **variables: str):
        log = self.folder / f"up-{len(self.started)}.log"
        with log.open("wb") as sink:
            up = subprocess.Popen(
                [sys.executable, "-P", str(FAKES), "up", *arguments],
                env={**self.environment, **variables},
                stdin=stdin,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        up.log = log
        self.started.append(up)
        return up

    def info(self, name: str = "default") -> dict:
        try:
            info = json.loads((self.folder / "pdmesh" / name / "mesh.json").read_text())
        except OSError:
            return {}
        self.seen.update(info["pids"].values())
        return info

    def ready(self, *arguments: str, name: str = "default", **variables: str) -> subprocess.Popen:
        up = self.start(*arguments, **variables)
        until(lambda: up.poll() is not None or self.info(name), "the mesh is never ready")
        assert up.poll() is None, up.log.read_text()
        return up

    def close(self) -> None:
        for up in self.started:
            if up.poll() is None:
                up.kill()
            up.wait()
            if up.stdout is not None:
                up.stdout.close()
        for pid in self.seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def meshes(tmp_path):
    running = Meshes(tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """A mesh for tests that leave it as it was."""
    running = Meshes(tmp_path_factory.mktemp("standing"))
    running.ready()
    yield running
    running.close()


def test_one_prompt_is_answered_and_nothing_stays_behind(meshes):
    done = meshes.run("up", "--chat", "--prompt", "one two")
    assert done.stdout == "one two (1 messages)\n"
    assert done.returncode == 0, done.stderr
    for name in PROCESSES:
        assert re.search(rf"{name} +ready in [\d.]+ s at 127\.0\.0\.1:\d+", done.stderr)
    assert "logs in" in done.stderr
    assert not meshes.info()
    assert not commands_that_name(meshes.folder)


def test_what_stands_on_standard_input_is_the_prompt(meshes):
    done = meshes.run("up", "--chat", stdin="three small words\n")
    assert done.stdout == "three small words (1 messages)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_chat_whose_standard_input_stays_open(meshes, number):
    reader, writer = os.pipe()
    with open(writer, "wb") as held, open(reader, "rb") as stdin:
        held.write(b"hi\n")
        held.flush()
        up = meshes.start("--chat", stdin=stdin)
        until(lambda: up.poll() is not None or meshes.info(), "the mesh is never ready")
        pids = meshes.info()["pids"]
        chat = until(lambda: [p for p in children(up.pid) if p not in pids.values()], "no chat")
        os.kill(pids["decode-0"], signal.SIGKILL)  # the mesh is watched all the same
        until(lambda: meshes.info()["pids"].get("decode-0") != pids["decode-0"], "no restart")
        assert alive(chat[0])  # still reading
        up.send_signal(number)
        assert up.wait(180) == 0
        assert not [pid for pid in (*meshes.seen, *chat) if alive(pid)]


def test_empty_standard_input_asks_the_default_question(meshes):
    done = meshes.run("up", "--chat")
    assert done.stdout == "Hello! Who are you? (1 messages)\n"
    assert "nothing on standard input" in done.stderr


def test_a_failing_answer_gives_its_exit_code_and_stops_the_mesh(meshes):
    done = meshes.run("up", "--prompt", "fail")
    assert done.returncode == 2
    assert "pdmesh: the prompt is bad" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_every_process(meshes, number):
    up = meshes.ready()
    pids = meshes.info()["pids"]
    assert set(pids) == PROCESSES
    up.send_signal(number)
    assert up.wait(180) == 0
    assert not [name for name, pid in pids.items() if alive(pid)]
    assert not meshes.info()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_killing_up_with_sigkill_ends_every_process(meshes):
    up = meshes.ready()
    pids = meshes.info()["pids"]
    up.kill()
    up.wait()
    for name, pid in pids.items():
        until(lambda pid=pid: not alive(pid), f"{name} outlives the supervisor")
    done = meshes.run("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no mesh is running" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_killing_up_while_the_processes_start_ends_them_too(meshes):
    up = meshes.start()
    pids = until(lambda: len(p := children(up.pid)) == 5 and p, "five children")
    up.kill()
    up.wait()
    for pid in pids:
        until(lambda pid=pid: not alive(pid), "a child outlives the supervisor")


@pytest.mark.parametrize("victim", sorted(PROCESSES))
def test_a_process_that_is_killed_is_started_again(standing, victim):
    before = standing.info()["pids"]
    os.kill(before[victim], signal.SIGKILL)
    after = until(
        lambda: (p := standing.info()["pids"]).get(victim, before[victim]) != before[victim] and p,
        "never started again",
    )
    assert {n: p for n, p in after.items() if n != victim} == {
        n: p for n, p in before.items() if n != victim
    }
    until(lambda: ready_workers(standing.info()) == PROCESSES - {"store", "router"}, "not ready")
    until(
        lambda: standing.run("chat", "--prompt", "x").stdout == "x (1 messages)\n", "no answer", 200
    )


def answers(meshes: Meshes) -> bool:
    return meshes.run("chat", "--prompt", "x").stdout == "x (1 messages)\n"


def ready_workers(info: dict) -> set[str]:
    async def ask() -> set[str]:
        members = await read_members(info["redis_url"], info["name"])
        return {m.record.worker_id for m in members if m.state == "ready"}

    try:
        return asyncio.run(ask())
    except Exception:  # noqa: BLE001 - the store may be the victim; asked again
        return set()


def test_wrong_settings_found_by_a_process_are_one_sentence_and_exit_code_2(meshes):
    done = meshes.run("up", "--prompt", "x", FAKE_REFUSE="decode-1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "pdmesh: config.json: scoring_func is 'tanh'; it must be sigmoid or softmax"
    )


def test_a_process_that_dies_again_and_again_ends_the_mesh_with_a_sentence(meshes):
    done = meshes.run("up", "--prompt", "x", FAKE_CRASH="prefill-0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("pdmesh: prefill-0 ended 5 times (exit code 1); it said last: Runtime")
    assert "prefill-0.log" in last


def test_a_mesh_goes_on_without_one_of_two_decode_workers(meshes):
    done = meshes.run("up", "--prompt", "still here", FAKE_CRASH="decode-1")
    assert done.returncode == 0
    assert "decode-1     given up: decode-1 ended 5 times" in done.stderr
    assert done.stdout == "still here (1 messages)\n"


def test_a_second_mesh_works_beside_the_first(meshes):
    meshes.ready()
    meshes.ready(name="default-2")
    first, second = meshes.info(), meshes.info("default-2")
    assert first["address"] != second["address"]
    for info in (first, second):
        done = meshes.run("chat", "--mesh", info["name"], "--prompt", "x")
        assert done.stdout == "x (1 messages)\n"


def test_a_port_that_is_taken_is_one_sentence_if_it_was_asked_for(meshes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = meshes.run("up", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_one_asked_for_the_next_free_port_is_taken():
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", DEFAULT_PORT)))
        first = stack.enter_context(claim_port("127.0.0.1", 0))
        second = stack.enter_context(claim_port("127.0.0.1", 0))  # the first is not bound yet
        assert DEFAULT_PORT < first < second
        assert stack.enter_context(claim_port("127.0.0.1", first)) == first  # asked for: allowed


def test_an_address_that_is_not_ours_is_one_sentence():
    with pytest.raises(ConfigError, match=r"cannot listen on port 7080 of 192\.0\.2\.1: "):
        claim_port("192.0.2.1", 7080).__enter__()


def test_routers_are_started_side_by_side_and_a_chat_uses_one_that_answers(meshes):
    meshes.ready("--routers", "3")
    info = meshes.info()
    assert len(set(info["addresses"])) == len(set(info["router_admins"])) == 3
    for address in info["addresses"]:
        assert meshes.run("chat", "--address", address, "--prompt", "x").stdout
    os.kill(info["pids"]["router"], signal.SIGKILL)
    until(
        lambda: meshes.run("chat", "--prompt", "x").stdout == "x (1 messages)\n", "no answer", 200
    )
    until(lambda: meshes.info()["pids"].get("router") not in (None, info["pids"]["router"]), "gone")
    assert sorted(meshes.info()["addresses"]) == sorted(info["addresses"])
    table = meshes.run("status").stdout.splitlines()
    assert table[0] == f"mesh default at {', '.join(sorted(info['addresses']))}: 3 workers"


def test_status_shows_every_worker(standing):
    table = standing.run("status").stdout.splitlines()
    assert table[0].endswith("3 workers")
    assert [line.split()[:2] for line in table[2:]] == [
        ["decode-0", "ready"],
        ["decode-1", "ready"],
        ["prefill-0", "ready"],
    ]
    assert table[2].split()[3:] == ["5/2/1/8", "-", "32", "seqs", *"0123", "4/5", "75%", "-"]
    assert table[4].split()[3:] == ["5/2/1/8", "-", "512", "tokens", "0", "1", *"-----"]
    whole = json.loads(standing.run("status", "--json").stdout)
    assert [worker["worker"] for worker in whole["workers"]] == [
        "decode-0",
        "decode-1",
        "prefill-0",
    ]
    assert whole["workers"][0]["status"]["pool"]["total"] == 8


def test_each_worker_gets_the_next_free_port_for_its_metrics_and_status_shows_it(meshes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        path = meshes.folder / "mesh.toml"
        path.write_text(f"[prefill]\nmetrics_port = {first}\n[decode]\nmetrics_port = {first}")
        meshes.ready("--topology", str(path))
        workers = json.loads(meshes.run("status", "--json").stdout)["workers"]
    endpoints = [worker["metrics"] for worker in workers]
    ports = [int(endpoint.removeprefix("127.0.0.1:")) for endpoint in endpoints]
    assert len(set(ports)) == 3
    assert first < min(ports) == ports[2]  # prefill first, then the decode workers
    assert ports[0] < ports[1]
    lines = meshes.run("status").stdout.splitlines()[2:]
    assert [line.split()[-1] for line in lines] == endpoints


def test_ports_spoken_for_by_another_mesh_are_passed_over():
    with claim_ports("127.0.0.1", 19300, 2, {19300}) as first:
        assert len(set(first)) == 2
        assert min(first) > 19300
        with claim_ports("127.0.0.1", 19300, 2, ()) as second:
            assert not set(first) & set(second)


def test_too_few_ports_are_one_sentence():
    with pytest.raises(ConfigError, match=r"[01] ports from 65535 on are free on 127\.0\.0\.1, 2"):
        claim_ports("127.0.0.1", 65535, 2, ()).__enter__()


def test_the_cores_are_shared_among_the_workers_unless_threads_are_asked_for(meshes):
    path = meshes.folder / "mesh.toml"
    path.write_text("[prefill]\nthreads = 3\n[decode]\nworkers = 1")
    meshes.ready("--topology", str(path))
    logs = meshes.folder / "pdmesh" / "default" / "logs"
    assert "threads=3" in (logs / "prefill-0.log").read_text()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"threads={share}" in (logs / "decode-0.log").read_text()


@pytest.fixture
def outside():
    store = EmbeddedStore()
    store.start()
    yield store
    store.stop()


def keys(url: str, mesh: str) -> list[bytes]:
    async def ask() -> list[bytes]:
        store = Store(url, mesh)
        try:
            return await store.execute("KEYS", f"pdmesh:{{{mesh}:*")
        finally:
            await store.close()

    return asyncio.run(ask())


def test_an_outside_store_is_used_and_left_without_a_workers_key(meshes, outside):
    done = meshes.run("up", "--redis", outside.url, "--prompt", "x")
    assert done.returncode == 0, done.stderr
    assert "store " not in done.stderr
    names = {key.decode().rpartition("}:")[2] for key in keys(outside.url, "default")}
    assert names <= {"events", "meta", "dead", "free", "dg", "ev", "bm"}


def test_a_store_that_does_not_answer_is_one_sentence_and_exit_code_2(meshes):
    done = meshes.run("up", "--redis", "redis://:word@127.0.0.1:1", "--prompt", "x")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "the store at redis://:***@127.0.0.1:1 does not answer" in last
    assert "word" not in done.stderr


def test_a_mesh_of_the_same_name_in_one_store_is_refused_by_name(meshes, outside, tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text("[mesh]\nlease_ttl_s = 0.5")
    meshes.ready("--redis", outside.url)
    elsewhere = {"XDG_RUNTIME_DIR": str(tmp_path / "elsewhere")}
    (tmp_path / "elsewhere").mkdir()
    done = meshes.run("up", "--redis", outside.url, "--topology", str(path), **elsewhere)
    assert done.returncode == 2
    assert "a mesh named 'default' lives in this store already" in done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, meshes: Meshes, *arguments: str) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-P", str(FAKES), *arguments]
            os.execvpe(command[0], command, {**meshes.environment, "TERM": "dumb"})
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, text: str, patience: float = 180) -> str:
        """What is shown up to ``text``."""
        deadline = time.monotonic() + patience
        while text not in self.shown:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.terminal], [], [], left)[0]:
                raise AssertionError(f"no {text!r} within {patience} s in: {self.shown}")
            try:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"no {text!r} in: {self.shown}") from error
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt(self, text: str) -> None:
        """Ctrl-C until ``text`` is shown.

        Python's line editor looks for signals before it waits for a key, so one that comes within
        the microseconds between, which only a program can hit, is seen with the next key.
        """
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.read_until(text, patience=2)
                return
        raise AssertionError(f"twenty Ctrl-C, and no {text!r} in: {self.shown}")

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self.terminal, 4096):
                pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_conversation_at_a_terminal(meshes):
    session = Terminal(meshes, "up", "--chat")
    session.read_until("you> ")
    pids = meshes.info()["pids"]
    session.type("one two\n")
    session.read_until("one two (1 messages)")
    session.read_until("you> ")
    session.type("three\n")
    session.read_until("three (3 messages)")  # the first question and its answer are kept
    session.read_until("you> ")
    session.type("fail\n")
    session.read_until("(the prompt is bad)")
    session.read_until("you> ")
    session.type("slow\n")
    session.read_until("slow (5 messages)")  # the failed one is not kept
    session.interrupt("(stopped)")
    session.read_until("you> ")
    session.type("/reset\n")
    session.read_until("(forgotten)")
    session.read_until("you> ")
    session.type("four\n")
    session.read_until("four (1 messages)")
    session.read_until("you> ")
    session.interrupt("stopping")
    assert session.exit_code() == 0
    assert not [name for name, pid in pids.items() if alive(pid)]


def test_timing_is_shown_when_asked_for(standing):
    done = standing.run("chat", "--show-timing", "--prompt", "x")
    assert done.stdout == "x (1 messages)\n"
    assert "[prompt 7 tokens, 3 cached; answer 2 tokens" in done.stderr


def test_a_loading_worker_is_shown_with_its_tensors(tmp_path):
    child = Child(Spec("prefill-0", "prefill", (), 1), tmp_path / "prefill-0.log")
    line = "time=t level=info process=prefill-0 event={}\n".format
    assert child.progress() == "starting: loads its Python packages"
    child.log.write_text(line("loading worker=prefill-0 checkpoint=/m"))
    assert child.progress() == "starting: loading worker=prefill-0 checkpoint=/m"
    with child.log.open("a") as log:
        log.write(line("loading worker=prefill-0 tensors=120/900"))
    assert child.progress() == "loading 120/900 tensors"


def test_a_router_that_is_ready_is_shown_to_wait_for_workers(tmp_path):
    child = Child(Spec("router", "router", (), 1), tmp_path / "router.log")
    line = "time=t level=info process=router event={}\n".format
    child.log.write_text(line("sampling_defaults temperature=0.0"))
    assert child.progress() == "starting: sampling_defaults temperature=0.0"
    with child.log.open("a") as log:
        log.write(line("ready address=127.0.0.1:7080") + line("registry_swept records=0"))
    assert child.progress() == "waits for workers"
