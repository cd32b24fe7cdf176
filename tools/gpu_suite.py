"""Runs the GPU tests and benchmarks within a budget of seconds, the most important first.

    python -P tools/gpu_suite.py --out out/gpu --budget-s 560
    python -P tools/gpu_suite.py --out out/gpu --pack --parallel 3 --only mla,gemm,small
    python -P tools/gpu_suite.py --list

Each job is a process group of its own, ended at its own limit; a failure stops nothing. A job that
is expected to take longer than what is left of the budget is skipped, and shorter ones behind it
run; one that keeps to a budget of its own needs little. With `--parallel` that many checks run at a
time; a timing always runs alone, with a line of clocks, power and memory before and after. Behind
every job the suite looks for processes that it left and for GPU memory that stays taken, says so,
and ends the processes.

Under --out: `summary.json`, rewritten after every job, and a folder a job with its log and files.
With `--pack` these folders are elsewhere and come as one `gpu_suite.tar.gz`, rewritten after every
job too, so that a host that stops everything at its own limit still hands over what is known. Exit
code 1 if a job failed or took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath")]

from pdmesh.tools.gpu_host import MARK, Host, end_group, last_words, shorten  # noqa: E402 - the path is set above
from pdmesh.tools.gpu_jobs import JOBS, Job  # noqa: E402

NO_MULTICAST = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
KEPT_S, GIVEN_UP_S, SAVED_S = 8.0, 25.0, 15.0
"""Seconds: of the budget, to end what still runs; that a job which keeps to a budget of its own is
given less than its limit; between two savings of what runs."""
HELD_MIB = 512
"""More than this beyond what was taken before the suite is said to be held."""
BAD = ("failed", "timed out")


@dataclass
class Result:
    """What became of a job."""

    name: str
    status: str
    seconds: float = 0.0
    code: int | None = None
    why: str = ""
    last: str = ""
    before: str = ""
    after: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Running:
    """A job's process group."""

    job: Job
    process: subprocess.Popen[bytes]
    mark: str
    log: IO[bytes]
    began: float
    until: float
    before: str = ""


def select(jobs: Sequence[Job], only: str = "", first: str = "") -> list[Job]:
    """The named jobs, or all from one on, in the order of the table.

    Raises:
        ValueError: a name that no job has.
    """
    names = [job.name for job in jobs]
    asked = [name for name in only.split(",") if name]
    for name in [*asked, *([first] if first else [])]:
        if name not in names:
            raise ValueError(f"there is no job {name!r}: {', '.join(names)}")
    begin = names.index(first) if first else 0
    return [job for job in jobs[begin:] if not asked or job.name in asked]


def why_not(job: Job, host: Host, gpus: int, left_s: float, folder: Path) -> str:
    """Why a job cannot begin, in a few words; empty if it can."""
    if job.gpus > gpus:
        return f"needs {job.gpus} GPUs, {gpus} visible"
    if missing := host.missing(job.needs):
        return f"not installed: {', '.join(missing)}"
    for path in job.reads:
        if not (folder / path).exists():
            return f"{path} is not there"
    if job.least_s > left_s:
        return f"takes about {job.least_s} s, {max(0.0, left_s):.0f} s left"
    return ""


class Suite:
    """A run of jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        out: Path,
        budget_s: float,
        host: Host,
        *,
        parallel: int = 1,
        packed: bool = False,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self.jobs, self.out, self.host, self.parallel = list(jobs), out, host, parallel
        self.say, self.until = say, time.monotonic() + budget_s
        self.archive = out / "gpu_suite.tar.gz" if packed else None
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_suite-")) if packed else out
        self.results: list[Result] = []
        self.running: list[Running] = []
        self.gpus = host.gpus()
        self.held = host.memory_mib()
        self.about: dict[str, Any] = {}
        self.saved, self.stopped = time.monotonic(), False

    def stop(self) -> None:
        """Ends it soon, as if its budget were over: what runs is ended, what is known is kept."""
        self.stopped = True

    def left_s(self) -> float:
        return self.until - KEPT_S - time.monotonic()

    def run(self) -> int:
        """All jobs; 1 if one failed."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.about = self.host.report()
        self.say(self._machine())
        self.save()
        try:
            for job in self.jobs:
                self._make_room(job)
                if self.stopped:
                    raise SystemExit(143)
                if why := why_not(job, self.host, self.gpus, self.left_s(), self.folder):
                    self._take(Result(job.name, "skipped", why=why))
                else:
                    self._begin(job)
            self._wait_for(lambda: not self.running)
        finally:
            for one in self.running:
                end_group(one.process)
                one.log.close()
                self.host.end(self.host.left_behind(one.mark))
            self.save()
            if self.archive is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
        counts = {s: sum(r.status == s for r in self.results) for s in ("passed", *BAD, "skipped")}
        self.say(", ".join(f"{count} {status}" for status, count in counts.items()))
        return int(any(result.status in BAD for result in self.results))

    def _machine(self) -> str:
        known = {name: version for name, version in self.about["packages"].items() if version}
        return (
            f"{self.gpus} GPUs ({', '.join(self.about['gpus']) or 'none'}), driver"
            f" {self.about['driver']}, Python {self.about['python']}, "
            + ", ".join(f"{name} {version}" for name, version in known.items())
        )

    def _make_room(self, job: Job) -> None:
        """Waits until a job may begin beside what runs: a timing begins alone."""
        alone = job.kind == "timing" or any(one.job.kind == "timing" for one in self.running)
        most = 0 if alone else self.parallel - 1
        self._wait_for(lambda: len(self.running) <= most)

    def _begin(self, job: Job) -> None:
        folder = self.folder / job.name
        folder.mkdir(parents=True, exist_ok=True)
        limit = min(float(job.limit_s), self.left_s())
        words = {"{python}": sys.executable, "{out}": str(folder), "{all}": str(self.folder)}
        words["{left}"] = str(int(limit - GIVEN_UP_S))
        command = list(job.command)
        for name, value in words.items():
            command = [word.replace(name, value) for word in command]
        mark = uuid.uuid4().hex
        path = os.pathsep.join(
            filter(None, [str(ROOT / ".pythonpath"), os.environ.get("PYTHONPATH")])
        )
        environment = {
            **NO_MULTICAST,
            **os.environ,
            **job.environment,
            "OUT": str(folder),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            MARK: mark,
        }
        number = len(self.results) + len(self.running) + 1
        self.say(
            f"[{number}/{len(self.jobs)}] {job.name}: {job.kind}, about {job.seconds} s, limit"
            f" {limit:.0f} s, {self.left_s():.0f} s left"
        )
        before = self.host.state() if job.kind == "timing" else ""
        log = (folder / "log.txt").open("wb")
        log.write(f"$ {shlex.join(command)}\n{before}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        now = time.monotonic()
        self.running.append(Running(job, process, mark, log, now, now + limit, before))

    def _wait_for(self, enough: Callable[[], bool]) -> None:
        while not enough():
            if self.stopped:
                raise SystemExit(143)
            for one in list(self.running):
                if one.process.poll() is not None:
                    self._ended(one, None)
                elif time.monotonic() > one.until:
                    end_group(one.process)
                    self._ended(one, f"ended after {time.monotonic() - one.began:.0f} s")
            if time.monotonic() > self.saved + SAVED_S:
                self.save()
            if not enough():
                time.sleep(0.1)

    def _ended(self, one: Running, cut: str | None) -> None:
        self.running.remove(one)
        took = time.monotonic() - one.began
        left = self.host.left_behind(one.mark)
        self.host.end(left)
        code = one.process.returncode
        status = "timed out" if cut else "failed" if code else "passed"
        result = Result(one.job.name, status, round(took, 1), code, cut or "")
        result.notes += [f"left a process behind: {x.pid} {x.command}" for x in left]
        result.before = one.before
        if one.job.kind == "timing":
            result.after = self.host.state()
        if not self.running:
            result.notes += self._held()
        log = Path(one.log.name)
        result.last = last_words(log)
        one.log.write(f"\n{status} after {took:.1f} s, code {code}\n{result.after}\n".encode())
        one.log.close()
        shorten(log)
        self._take(result)

    def _held(self) -> list[str]:
        """GPU memory that stays taken, after some seconds for the driver."""
        for attempt in range(6):
            now = self.host.memory_mib()
            more = [b - a for a, b in zip(self.held, now, strict=False)]
            if all(size <= HELD_MIB for size in more):
                return []
            if attempt < 5:
                time.sleep(0.5)
        return [f"GPU {i} still holds {size} MiB" for i, size in enumerate(more) if size > HELD_MIB]

    def _take(self, result: Result) -> None:
        self.results.append(result)
        words = [f"{result.name}: {result.status}"]
        words += [f"in {result.seconds} s"] if result.status != "skipped" else []
        words += [f"({result.why})"] if result.why else []
        words += [f"code {result.code}"] if result.status == "failed" else []
        self.say(f"    {' '.join(words)}  {result.last}; {self.left_s():.0f} s left")
        for line in (result.before, result.after, *result.notes):
            if line:
                self.say(f"      {line}")
        self.save()

    def save(self) -> None:
        """The summary, and the archive if there is one: whole or not at all."""
        self.saved = time.monotonic()
        found: dict[str, Any] = {"host": self.about, "jobs": [asdict(one) for one in self.results]}
        found["running"] = [one.job.name for one in self.running]
        part = self.out / ".summary.json"
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(self.out / "summary.json")
        if self.archive is None:
            return
        part = self.archive.with_name(".gpu_suite.tar.gz")
        with tarfile.open(part, "w:gz") as tar:
            for folder in sorted(self.folder.iterdir()):
                with contextlib.suppress(OSError):  # a file that a running job takes away
                    tar.add(folder, folder.name)
        part.replace(self.archive)


def _quoted(word: str) -> str:
    """As a shell takes it; words in braces stay as they are."""
    return word if re.fullmatch(r"[\w{}/.]+", word) else shlex.quote(word)


def table(jobs: Iterable[Job]) -> str:
    """A line a job: name, kind, seconds, GPUs, command."""
    lines = []
    for job in jobs:
        words = [*(f"{k}={v}" for k, v in job.environment.items()), *map(_quoted, job.command)]
        command = " ".join(words)
        lines.append(f"{job.name:14} {job.kind:6} {job.seconds:4} s  {job.gpus} GPU  {command}")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/gpu")))
    parser.add_argument("--budget-s", type=float, default=560.0, help="for everything (560)")
    parser.add_argument("--only", default="", metavar="A,B", help="these jobs alone")
    parser.add_argument("--from", dest="first", default="", metavar="NAME", help="begin with it")
    parser.add_argument("--parallel", type=int, default=1, help="checks that run at a time (1)")
    parser.add_argument("--pack", action="store_true", help="one archive in place of folders")
    parser.add_argument("--list", action="store_true", help="the jobs with their commands, and end")
    args = parser.parse_args(given)
    try:
        chosen = select(jobs, args.only, args.first)
        if args.parallel < 1:
            raise ValueError("--parallel takes 1 or more")
    except ValueError as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    if args.list:
        print(table(chosen))
        return 0
    suite = Suite(chosen, args.out, args.budget_s, Host(), parallel=args.parallel, packed=args.pack)
    signal.signal(signal.SIGTERM, lambda *_: suite.stop())
    return suite.run()


if __name__ == "__main__":
    raise SystemExit(main())
