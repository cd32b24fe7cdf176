"""Changing a running mesh: real processes of ``pdmesh``, workers without a model."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch_up import FAKES, Meshes, alive, ready_workers, standing, until

from pdmesh.launch.runtime import RunDir

__all__ = ["standing"]  # a fixture

ONE_DECODE = ("--decode", "1")


@pytest.fixture
def meshes(tmp_path):
    running = Meshes(tmp_path)
    yield running
    running.close()


def log_of(meshes, name: str) -> str:
    return (meshes.folder / "pdmesh" / "default" / "logs" / f"{name}.log").read_text()


def in_background(meshes, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-P", str(FAKES), *arguments],
        env=meshes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    meshes.started.append(process)
    return process


def test_scaling_up_and_down_starts_the_next_names_and_stops_the_last(meshes):
    meshes.ready()
    done = meshes.run("scale", "prefill=2", "decode=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "scaling to prefill=2 decode=3",
        "prefill-1 starting",
        "decode-2 starting",
    ]
    assert lines[-1] == "done: prefill=2 decode=3"
    five = {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    assert ready_workers(meshes.info()) == five
    share = next(w for w in log_of(meshes, "decode-0").split() if w.startswith("threads="))
    assert share in log_of(meshes, "decode-2")  # the same share as at the start
    before = meshes.info()["pids"]
    done = meshes.run("scale", "decode=1", "prefill=1")
    assert done.returncode == 0, done.stderr
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-0"}
    gone = {"prefill-1", "decode-1", "decode-2"}
    assert not [name for name in gone if alive(before[name])]
    until(lambda: set(meshes.info()["pids"]) == {"store", "router", "prefill-0", "decode-0"}, "?")
    assert meshes.run("chat", "--prompt", "x").stdout == "x (1 messages)\n"


def test_a_worker_that_does_not_finish_is_ended_when_its_time_is_over(meshes):
    meshes.ready("--drain-s", "3", FAKE_BUSY="decode-1")
    pid = meshes.info()["pids"]["decode-1"]
    done = meshes.run("scale", "decode=1")
    assert "decode-1 draining: 3 answers left" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-2:] == ["decode-1 stopped", "done: prefill=1 decode=1"]
    assert "event=drain_cut" in log_of(meshes, "decode-1")
    assert not alive(pid)


def test_one_change_at_a_time_and_a_change_outlives_the_command_that_asked_for_it(meshes):
    meshes.ready("--drain-s", "600", FAKE_BUSY="decode-1")
    pid = meshes.info()["pids"]["decode-1"]
    first = in_background(meshes, "scale", "decode=1")
    until(lambda: "event=draining" in log_of(meshes, "decode-1"), "it never drains")
    second = meshes.run("scale", "decode=3")
    assert second.returncode == 1
    assert second.stderr == (
        "pdmesh: another change is under way (scaling to decode=1); try again when it is over\n"
    )
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=180)
    assert first.returncode == 130
    assert "the change goes on in the mesh: see pdmesh status" in out
    assert alive(pid)
    (meshes.folder / "idle").touch()
    until(lambda: not alive(pid), "the change was given up")
    until(lambda: "decode-1" not in meshes.info()["pids"], "still in mesh.json")


def test_a_new_worker_that_cannot_start_is_one_sentence_and_all_is_as_before(meshes):
    up = meshes.ready(FAKE_REFUSE="decode-3")
    before = meshes.info()["pids"]
    done = meshes.run("scale", "decode=4")
    assert done.returncode == 1
    assert "decode-3 cannot start; it said last: pdmesh: config.json: scoring_func" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    until(lambda: ready_workers(meshes.info()) == {"prefill-0", "decode-0", "decode-1"}, "more")
    until(lambda: meshes.info()["pids"] == before, "not as before")
    assert up.poll() is None
    assert meshes.run("scale", "decode=3").stdout.splitlines()[-1] == "done: prefill=1 decode=3"


def test_a_rolling_restart_replaces_every_worker_and_never_has_fewer(meshes):
    meshes.ready()
    before = meshes.info()["pids"]
    done = meshes.run("restart")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    replaced = [line for line in lines if " is replaced by " in line]
    assert [line.split()[0] for line in replaced] == ["prefill-0", "decode-0", "decode-1"]
    for old, new in ((line.split()[0], line.split()[-1]) for line in replaced):
        ready = next(i for i, line in enumerate(lines) if line.startswith(f"{new} ready at "))
        assert ready < lines.index(f"{old} draining", ready)
    workers = ready_workers(meshes.info())
    assert sorted(name.split("-")[0] for name in workers) == ["decode", "decode", "prefill"]
    after = until(lambda: (p := meshes.info()["pids"]) and workers <= set(p) and p, "no pids")
    assert not {after[name] for name in workers} & set(before.values())
    assert not [n for n in ("prefill-0", "decode-0", "decode-1") if alive(before[n])]
    assert (after["router"], after["store"]) == (before["router"], before["store"])


def test_one_worker_alone_can_be_restarted(meshes):
    meshes.ready(*ONE_DECODE)
    done = meshes.run("restart", "decode-0")
    assert "decode-0 is replaced by decode-1" in done.stdout
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-1"}
    # and its successor, under the number that is free again
    assert "decode-1 is replaced by decode-0" in meshes.run("restart", "decode-1").stdout


def test_workers_that_share_their_experts_come_and_go_by_whole_groups(meshes):
    meshes.ready("--decode-ep", "2")
    wrong = meshes.run("scale", "decode=3")
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "pdmesh: decode=3: 3 workers make no groups of 2 that share the experts; "
        "ask for a multiple of 2\n"
    )
    done = meshes.run("scale", "decode=4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:3] == ["decode-2 starting", "decode-3 starting"]
    four = {f"decode-{n}" for n in range(4)}
    assert ready_workers(meshes.info()) == four | {"prefill-0"}
    places = {name: place(meshes.info()["pids"][name]) for name in four}
    assert [places[f"decode-{n}"][0] for n in range(4)] == ["0", "1", "0", "1"]
    assert places["decode-2"][1] == places["decode-3"][1] != places["decode-0"][1]
    lines = meshes.run("scale", "decode=2").stdout.splitlines()
    assert {"decode-2 stopped", "decode-3 stopped"} <= set(lines)
    assert lines[-1] == "done: prefill=1 decode=2"


def place(pid):
    """The rank of a worker's process, and where the ranks of its group listen."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return tuple(words[words.index(flag) + 1] for flag in ("--ep-rank", "--ep-ranks"))


def test_a_restart_renews_the_ranks_of_a_group_one_after_the_other_in_their_places(meshes):
    meshes.ready("--decode-ep", "2")
    before = meshes.info()["pids"]
    was = [place(before[f"decode-{n}"]) for n in range(2)]
    done = meshes.run("restart", "decode-1", "decode-0")
    assert done.returncode == 0, done.stderr
    lines = [
        line.partition(" ready at")[0].partition(", and")[0] for line in done.stdout.split("\n")
    ]
    assert lines[1:-2] == [
        f"decode-{n} {what}"
        for n in range(2)
        for what in ("draining", "stopped", "starting", "is renewed")
    ]
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-0", "decode-1"}
    after = meshes.info()["pids"]
    assert [place(after[f"decode-{n}"]) for n in range(2)] == was
    assert not {after["decode-0"], after["decode-1"]} & set(before.values())
    assert after["prefill-0"] == before["prefill-0"]


@pytest.mark.full
def test_a_rank_that_does_not_come_back_is_named_and_can_be_restarted_later(meshes):
    meshes.ready("--decode-ep", "2", FAKE_REFUSE_LATER="decode-1")
    refuse = meshes.folder / "refuse"
    refuse.touch()
    done = meshes.run("restart", "decode-1")
    assert done.returncode == 1
    assert "decode-1 cannot start; it said last: pdmesh: config.json" in done.stderr
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-0"}
    refuse.unlink()
    assert meshes.run("restart", "decode-1").returncode == 0
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-0", "decode-1"}


def test_a_worker_with_a_metrics_endpoint_gets_a_port_of_its_own_when_it_is_added(meshes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
    path = meshes.folder / "mesh.toml"
    path.write_text(f"[decode]\nmetrics_port = {first}")
    meshes.ready("--topology", str(path))
    meshes.run("scale", "decode=3")
    workers = json.loads(meshes.run("status", "--json").stdout)["workers"]
    ports = [w["metrics"].rpartition(":")[2] for w in workers if w["role"] == "decode"]
    assert len(set(ports)) == 3
    assert all(ports)


def test_a_worker_that_drains_is_shown_and_can_be_taken_back(meshes):
    meshes.ready(FAKE_BUSY="decode-1")
    draining = in_background(meshes, "drain", "decode-1")
    assert draining.stdout.readline() == "draining: 3 answers left\n"
    until(lambda: ready_workers(meshes.info()) == {"prefill-0", "decode-0"}, "still ready")
    rows = meshes.run("status").stdout.splitlines()[2:]
    assert [row.split()[:2] for row in rows][1] == ["decode-1", "draining"]
    draining.send_signal(signal.SIGINT)
    assert "the worker goes on draining" in draining.stdout.read()
    assert draining.wait(180) == 130
    done = meshes.run("drain", "decode-1", "--undo")
    assert done.stdout == "decode-1 takes new requests again\n"
    assert ready_workers(meshes.info()) == {"prefill-0", "decode-0", "decode-1"}


def test_a_worker_that_is_drained_stays_until_it_is_told_to_end(meshes):
    meshes.ready(*ONE_DECODE)
    pid = meshes.info()["pids"]["decode-0"]
    done = meshes.run("drain", "decode-0")
    assert done.stdout.splitlines() == [
        "no other decode worker is ready: new requests fail until one is",
        "decode-0 is empty and takes nothing new; it stays up until it is told to end"
        " (take it back: pdmesh drain decode-0 --undo)",
    ]
    assert alive(pid)


def test_the_answers_of_a_mesh_are_shown_and_moved(standing):
    until(lambda: standing.info()["router_admin"], "no address")
    lines = standing.run("answers").stdout.splitlines()
    assert lines[0].split() == ["request", "answer", "worker", "phase", "prompt", "tokens", "moved"]
    assert lines[1].split() == ["4f1c0d", "0", "decode-0", "running", "12", "7", "1"]
    found = json.loads(standing.run("answers", "--json").stdout)["answers"]
    assert [answer["request_id"] for answer in found] == ["4f1c0d", "4fffff"]
    moved = standing.run("migrate", "4f1", "--index", "0", "--to", "decode-1")
    assert (moved.returncode, moved.stdout.splitlines()[-1]) == (
        0,
        "answer 0: decode-0 -> decode-1, moved; paused for 12 ms",
    )
    both = standing.run("migrate", "4fffff")
    assert both.returncode == 1
    last = both.stdout.splitlines()[-1]
    assert last.endswith("not moved, it goes on where it is: decode-1 has no room")
    several = standing.run("migrate", "4f")
    assert several.returncode == 2
    assert "several requests begin with '4f': 4f1c0d, 4fffff; say more" in several.stderr
    unknown = standing.run("migrate", "abc")
    assert unknown.returncode == 2
    assert "no request 'abc' is being answered; running now: 4f1c0d, 4fffff" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("scale", "prefill=0"), "prefill=0: a mesh needs at least 1 prefill worker; ask for 1"),
        (("restart", "decode-7"), "no worker 'decode-7' in this mesh; there are: prefill-0, deco"),
        (("restart", "router"), "no worker 'router' in this mesh; there are: prefill-0, decode-0"),
        (("drain", "decode-7"), "no worker 'decode-7' in this mesh; there are: prefill-0, decode"),
    ],
)
def test_wrong_input_to_a_running_mesh_is_one_sentence_and_exit_code_2(
    standing, arguments, sentence
):
    done = standing.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def join(meshes, *arguments: str) -> subprocess.Popen:
    return in_background(meshes, "serve", *arguments)


def test_a_worker_joins_a_mesh_of_this_machine_by_its_name(meshes):
    meshes.ready(*ONE_DECODE)
    worker = join(meshes, "decode", "--join", "default", "--id", "decode-guest")
    until(lambda: "decode-guest" in ready_workers(meshes.info()), "it does not join")
    assert "decode-guest" in meshes.run("restart", "decode-guest").stderr  # not ours to restart
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    assert "decode-guest" not in ready_workers(meshes.info())


def test_a_worker_joins_by_the_routers_address_and_needs_the_secret(meshes):
    meshes.ready(*ONE_DECODE)
    info = meshes.info()
    secret = RunDir(meshes.folder / "pdmesh" / "default").path / "secret.key"
    wrong = meshes.folder / "wrong.key"
    wrong.write_bytes(os.urandom(32))
    without = meshes.run("serve", "prefill", "--join", info["address"])
    assert (without.returncode, without.stdout) == (2, "")
    assert "no secret given; copy the secret.key of the mesh's run directory" in without.stderr
    foreign = ("--join", info["address"], "--secret-file", str(wrong))
    refused = meshes.run("serve", "prefill", *foreign)
    assert refused.returncode == 2
    assert "the secret file is not this mesh's; copy its secret.key" in refused.stderr
    ours = ("--join", info["address"], "--secret-file", str(secret))
    other = meshes.run("serve", "prefill", *ours, "--page-size", "32")
    assert other.returncode == 2
    assert "--page-size makes page_size 32, but the mesh to join has 64; leave" in other.stderr
    worker = join(meshes, "prefill", *ours, "--id", "prefill-guest")
    until(lambda: "prefill-guest" in ready_workers(info), "it does not join")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0


def test_joining_what_is_not_there_is_one_sentence(meshes):
    secret = meshes.folder / "key"
    secret.write_bytes(b"k" * 32)
    nobody = meshes.run("serve", "decode", "--join", "127.0.0.1:1", "--secret-file", str(secret))
    assert nobody.returncode == 2
    assert "cannot join the mesh at 127.0.0.1:1: " in nobody.stderr
    unnamed = meshes.run("serve", "decode", "--join", "kitchen")
    assert unnamed.returncode == 2
    assert "no mesh named 'kitchen' is running on this machine" in unnamed.stderr
    router = meshes.run("serve", "router", "--join", "kitchen")
    assert "--join is for prefill and decode workers" in router.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_killing_up_in_the_middle_of_a_change_leaves_no_process(meshes):
    up = meshes.ready("--drain-s", "600", FAKE_BUSY="decode-1")
    meshes.run("scale", "decode=3")
    change = in_background(meshes, "restart", "decode-1")
    until(lambda: "event=draining" in log_of(meshes, "decode-1"), "it never drains")
    pids = until(lambda: len(p := meshes.info()["pids"]) == 7 and p, "a replacement")
    up.kill()
    up.wait()
    for name, pid in pids.items():
        until(lambda pid=pid: not alive(pid), f"{name} outlives the supervisor")
    assert change.wait(180) == 1
    out, _ = change.communicate()
    assert "pdmesh: " in out.splitlines()[-1]
