"""A run of GPU jobs within a budget: order, limits, what is skipped and why, what is left."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from child_path import python_path

from pdmesh.tools import gpu_host, gpu_suite
from pdmesh.tools.gpu_host import MARK, Host, last_words, shorten
from pdmesh.tools.gpu_jobs import Job
from pdmesh.tools.gpu_suite import Suite

ROOT = Path(__file__).resolve().parent.parent


class FakeHost(Host):
    """So many GPUs, whose memory is what the test says; processes are real."""

    def __init__(self, gpus=1, memory=(100,)):
        self.count, self.readings = gpus, list(memory)

    def gpus(self):
        return self.count

    def memory_mib(self):
        return [self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]]

    def state(self):
        return "GPU 0: 1980 MHz"

    def report(self):
        return {"gpus": ["H200"], "driver": "1", "python": "3", "packages": {"torch": "2"}}


def job(name, code="pass", kind="check", seconds=1, **more):
    return Job(name, ("{python}", "-P", "-c", code), kind, seconds, **more)


def run(tmp_path, *jobs, budget=100.0, host=None, **more):
    said = []
    suite = Suite(jobs, tmp_path / "out", budget, host or FakeHost(), say=said.append, **more)
    code = suite.run()
    results = {
        r["name"]: r for r in json.loads((tmp_path / "out/summary.json").read_text())["jobs"]
    }
    return code, results, said


def test_jobs_run_in_their_order_and_a_failure_stops_nothing(tmp_path):
    code, results, said = run(
        tmp_path, job("a", "print('all right')"), job("b", "raise SystemExit(3)"), job("c")
    )
    assert code == 1
    assert [(r["name"], r["status"], r["code"]) for r in results.values()] == [
        ("a", "passed", 0),
        ("b", "failed", 3),
        ("c", "passed", 0),
    ]
    assert results["a"]["last"] == "all right"
    assert said[-1] == "2 passed, 1 failed, 0 timed out, 0 skipped"
    assert any(line.startswith("[2/3] b: check, about 1 s") and "s left" in line for line in said)


def test_what_cannot_run_is_skipped_with_its_reason_and_is_no_failure(tmp_path):
    code, results, _ = run(
        tmp_path,
        job("many", gpus=8),
        job("library", needs=("no_such_module", "json")),
        job("input", reads=("layer/table.json",)),
        job("long", seconds=1000),
        job("short"),
    )
    assert code == 0
    assert {name: r["why"].split(",")[0] for name, r in results.items()} == {
        "many": "needs 8 GPUs",
        "library": "not installed: no_such_module",
        "input": "layer/table.json is not there",
        "long": "takes about 1000 s",
        "short": "",
    }
    assert results["short"]["status"] == "passed"


def test_a_job_reads_what_an_earlier_one_wrote(tmp_path):
    writer = job("layer", "import os; open(os.environ['OUT'] + '/x.json', 'w').write('[1]')")
    reader = Job(
        "project",
        (
            "{python}",
            "-P",
            "-c",
            "import sys; print(open(sys.argv[1]).read())",
            "{all}/layer/x.json",
        ),
        "check",
        1,
        reads=("layer/x.json",),
    )
    _, results, _ = run(tmp_path, writer, reader)
    assert results["project"]["last"] == "[1]"


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
subprocess.Popen([sys.executable, "-P", "-c", child])
time.sleep(99)
"""


def test_a_whole_group_is_ended_at_the_limit_and_the_next_job_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("pdmesh.tools.gpu_host.GRACE_S", 0.2)
    marks = []
    monkeypatch.setattr(
        FakeHost,
        "left_behind",
        lambda self, mark: marks.append(mark) or Host.left_behind(self, mark),
    )
    code, results, _ = run(tmp_path, job("hangs", STUBBORN, limit=3), job("next"))
    assert code == 1
    assert results["hangs"]["status"] == "timed out"
    assert results["hangs"]["notes"] == []
    assert not [left for mark in marks for left in Host().left_behind(mark)]
    assert results["next"]["status"] == "passed"


ORPHAN = """
import subprocess, sys
command = [sys.executable, "-P", "-c", "import time; time.sleep(99)  # orphan"]
subprocess.Popen(command, start_new_session=True)
"""


def test_a_process_in_a_session_of_its_own_is_found_named_and_ended(tmp_path):
    code, results, _ = run(tmp_path, job("leaves", ORPHAN))
    assert code == 0
    (note,) = results["leaves"]["notes"]
    assert note.startswith("left a process behind: ")
    assert "# orphan" in note
    pid = int(note.split(": ")[1].split()[0])
    until = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid):
    """Whether it runs: a process that ended may wait for its parent as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_memory_that_stays_taken_is_said(tmp_path):
    _, results, said = run(tmp_path, job("greedy"), host=FakeHost(memory=(100, 5100)))
    assert results["greedy"]["notes"] == ["GPU 0 still holds 5000 MiB"]
    assert "      GPU 0 still holds 5000 MiB" in said
    host = FakeHost(memory=(100, 5100, 130))
    assert run(tmp_path, job("slow driver"), host=host)[1]["slow driver"]["notes"] == []


MEETING = """
import os, pathlib, sys, time
began = time.monotonic()
here, me = pathlib.Path(sys.argv[1]), pathlib.Path(os.environ["OUT"]).name
here.mkdir(exist_ok=True)
(here / me).touch()
while len(sys.argv) > 2 and not (here / sys.argv[2]).exists():
    time.sleep(0.01)
time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
print(began, time.monotonic())
"""


def test_checks_run_beside_each_other_and_a_timing_alone(tmp_path):
    jobs = [
        Job(name, ("{python}", "-P", "-c", MEETING, str(tmp_path / "here"), *other), kind, 1)
        for name, kind, *other in (
            ("a", "check", "b", "1"),  # long enough for what must not begin beside it
            ("b", "check", "a"),
            ("t", "timing"),
            ("c", "check"),
            ("d", "check", "c"),
        )
    ]
    code, results, _ = run(tmp_path, *jobs, parallel=2)
    assert code == 0, results  # a and b wait for each other
    spans = {name: [float(word) for word in r["last"].split()] for name, r in results.items()}
    for other in "abcd":
        assert spans[other][1] <= spans["t"][0] or spans["t"][1] <= spans[other][0]


def test_a_timing_has_the_state_of_the_device_before_and_after(tmp_path):
    _, results, said = run(tmp_path, job("timed", kind="timing"), job("checked"))
    assert results["timed"]["before"] == results["timed"]["after"] == "GPU 0: 1980 MHz"
    assert results["checked"]["before"] == ""
    assert said.count("      GPU 0: 1980 MHz") == 2
    assert "GPU 0: 1980 MHz" in (tmp_path / "out/timed/log.txt").read_text()


def test_packed_there_are_two_files_at_any_time(tmp_path):
    inside = tmp_path / "seen.txt"
    code = f"import os; open({str(inside)!r}, 'w').write(repr(sorted(os.listdir(sys.argv[1]))))"
    second = Job(
        "b", ("{python}", "-P", "-c", f"import sys\n{code}", str(tmp_path / "out")), "check", 1
    )
    run(tmp_path, job("a", "print('hello')"), second, packed=True)
    assert inside.read_text() == "['gpu_suite.tar.gz', 'summary.json']"
    assert sorted(os.listdir(tmp_path / "out")) == ["gpu_suite.tar.gz", "summary.json"]
    with tarfile.open(tmp_path / "out/gpu_suite.tar.gz") as tar:
        assert b"hello" in tar.extractfile("a/log.txt").read()
        assert "b/log.txt" in tar.getnames()


def test_a_suite_that_is_told_to_end_ends_its_jobs_and_keeps_what_is_known(tmp_path):
    script = (
        "from pdmesh.tools import gpu_suite\n"
        "from pdmesh.tools.gpu_jobs import Job\n"
        "jobs = [Job('done', ('{python}', '-c', 'pass'), 'check', 1),"
        " Job('long', ('{python}', '-c', 'import time; print(1, flush=True); time.sleep(99)'),"
        " 'check', 1, limit=99)]\n"
        "jobs = [Job(j.name, j.command, j.kind, j.seconds, gpus=0, limit=j.limit) for j in jobs]\n"
        "raise SystemExit(gpu_suite.main(['--out', 'out', '--pack'], jobs))\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "long: check" in line:
            break
    process.terminate()
    assert process.wait(60) == 143
    process.stdout.close()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [r["status"] for r in summary["jobs"]] == ["passed"]
    with tarfile.open(tmp_path / "out/gpu_suite.tar.gz") as tar:
        assert {"done/log.txt", "long/log.txt"} <= set(tar.getnames())
    marked = [p for p in Path("/proc").glob("[0-9]*/environ") if MARK.encode() in _bytes(p)]
    assert not [p for p in marked if str(tmp_path).encode() in _bytes(p)]


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_job_with_a_budget_of_its_own_is_told_less_than_its_limit(tmp_path):
    asked = Job("node", ("{python}", "-c", "import sys; print(sys.argv[1])", "{left}"), "timing", 1)
    _, results, _ = run(tmp_path, asked, budget=60.0)
    assert results["node"]["last"] == str(int(asked.limit_s - gpu_suite.GIVEN_UP_S))


def test_only_devices_that_a_program_sees_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_host, "nvidia_smi", lambda *words: asked.append(words) or ["7", "9"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_host.Host().memory_mib() == [7, 9]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    gpu_host.Host().memory_mib()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_host.Host().memory_mib() == []
    assert ["--id=1,0" in words for words in asked] == [False, True]


def test_a_job_with_a_budget_of_its_own_begins_though_less_is_left_than_it_would_take(tmp_path):
    words = ("{python}", "-c", "import sys; print(sys.argv[1])")
    keeps = Job("keeps", (*words, "{left}"), "timing", 300)
    _, results, _ = run(tmp_path, keeps, Job("takes", words, "timing", 300), budget=150.0)
    assert results["keeps"]["status"] == "passed"
    assert results["takes"]["why"].startswith("takes about 300 s")


def test_jobs_are_chosen_by_name(capsys):
    jobs = [job("a"), job("b"), job("c")]
    assert [j.name for j in gpu_suite.select(jobs, "c,a")] == ["a", "c"]
    assert [j.name for j in gpu_suite.select(jobs, "", "b")] == ["b", "c"]
    assert gpu_suite.main(["--only", "d"], jobs) == 2
    assert "there is no job 'd': a, b, c" in capsys.readouterr().err


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("first\n" + "x\n" * 5000 + "the last word\n\n")
    shorten(log, 1000)
    text = log.read_text()
    assert len(text) < 1100
    assert text.startswith("first\n")
    assert last_words(log) == "the last word"


def test_the_time_left_is_said_and_counts_down(tmp_path):
    began = time.monotonic()
    _, _, said = run(tmp_path, job("a"), job("b"), budget=50)
    left = [float(line.split(" s left")[0].split()[-1]) for line in said if line.startswith("[")]
    assert left[0] >= left[1] >= 50 - gpu_suite.KEPT_S - (time.monotonic() - began) - 1
