"""A whole mesh on one device, end to end: router, prefill and decode worker, each a process.

    python -P bench/gpu_mesh.py                              full width, 8 layers, one GPU
    python -P bench/gpu_mesh.py --device cpu --config small  the same on a CPU, small and slow
    python -P bench/gpu_mesh.py --device cpu --config shipped

Starts ``pdmesh up`` with weights that the workers make on the device (``--random-weights``; the
shipped model has its own), sends ``--rounds`` times as many requests as are open at a time, and
prints for each number ``--at-once`` of them: tokens a second, time to the first token (TTFT), time
between tokens (ITL; what comes in one message shares its time), and the hand-off's exposed time:
from the first token to the arrival of the last page, also in layers of that prompt's own
computation. ``host`` is the part of the decode worker's steps outside of model and sampler. Prompts
are random token ids, so nothing is cached. One request before all others is not counted.

It ends within ``--budget-s``, starting and stopping included: a measurement that is not done by
then counts as far as it came and is marked, and what there is no time for is said. Results are
written to $OUT/gpu_mesh.json (or --json) after every measurement, and logs beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import grpc  # noqa: E402 - the path is set above
import meshes  # noqa: E402
from figures import as_json  # noqa: E402
from gpu_mesh_figures import HEADER, Point, row, summed, worth_it  # noqa: E402

from pdmesh.launch.processes import PARENT_VARIABLE, command  # noqa: E402
from pdmesh.launch.topology import SHIPPED_CONFIGS, shipped_config, shipped_model  # noqa: E402
from pdmesh.registry.store import read_members  # noqa: E402

PAGE = 64
STOP_S = 15.0
"""Kept back for the end of the mesh."""
SHIPPED = "shipped"


# ---- the mesh -----------------------------------------------------------------------------


@dataclass
class Running:
    """A ``pdmesh up`` and what it said."""

    process: subprocess.Popen[str]
    folder: Path
    began: float
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    info: dict[str, Any] = field(default_factory=dict)
    ready_s: float = 0.0

    def listen(self) -> None:
        """Repeats what the process says, until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            print(f"[{time.monotonic() - self.began:6.1f} s] {line.rstrip()}", file=sys.stderr)
            if "pdmesh: ready at" in line:
                self.ready.set()
        self.ready.set()

    def said(self, pattern: str) -> dict[str, str]:
        """By worker, the group of the last line of its log that has the pattern."""
        found = {}
        for log in sorted(self.folder.rglob("*.log")):
            for match in re.finditer(pattern, log.read_text(errors="replace")):
                found[log.stem] = match[1]
        return found


def flags(options: argparse.Namespace) -> list[str]:
    """Of ``pdmesh up``."""
    given = ["--device", options.device, "--decode", "1", "--prefill", "1", "--name", "gpu-mesh"]
    if options.config != SHIPPED:
        given += ["--random-weights", "--model", options.config]
        given += ["--layers", str(options.layers)] if options.layers else []
        given += ["--experts", str(options.experts)] if options.experts else []
    given += [] if options.mtp else ["--no-mtp"]
    for name in ("precision", "latents"):
        given += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    return given


def topology(options: argparse.Namespace) -> str:
    """What ``pdmesh up`` has no flag for."""
    each = -(-(options.prompt + options.output) // PAGE) + 1
    pages = f"pages = {max(256, 2 * max(options.at_once) * each)}\n"
    if options.device != "cpu":
        pages = ""
    chunk = f"chunk_tokens = {options.chunk}\n" if options.chunk else ""
    batch = f"max_batch = {max(options.at_once)}\nmetrics_port = 9300\n"
    level = f'[mesh]\nlog_level = "{options.log_level}"\n'
    return f"{level}[prefill]\n{pages}{chunk}[decode]\n{pages}{batch}"


@contextmanager
def running(options: argparse.Namespace, deadline: float) -> Iterator[Running]:
    """A mesh that answers.

    Raises:
        SystemExit: it does not come up in time; its logs are kept.
    """
    with tempfile.TemporaryDirectory(prefix="pdmesh-bench-") as name:
        folder = Path(name)
        (folder / "mesh.toml").write_text(topology(options))
        variables = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "XDG_RUNTIME_DIR": name}
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT / ".pythonpath"), os.environ.get("PYTHONPATH")])
        )
        process = subprocess.Popen(
            command("up", "--topology", str(folder / "mesh.toml"), *flags(options)),
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        mesh = Running(process, folder, time.monotonic())
        listener = threading.Thread(target=mesh.listen, daemon=True)
        listener.start()
        try:
            mesh.ready.wait(max(0.0, deadline - time.monotonic()))
            described = next(iter(folder.rglob("mesh.json")), None)
            if process.poll() is not None or described is None:
                raise SystemExit("the mesh did not come up; what it said is above")
            mesh.info = json.loads(described.read_text())
            mesh.ready_s = time.monotonic() - mesh.began
            yield mesh
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # and the kernel ends its children
                process.wait()
            listener.join(5)
            if process.stderr is not None:
                process.stderr.close()
            if out := os.environ.get("OUT"):
                for log in folder.rglob("*.log"):
                    shutil.copy(log, Path(out, f"gpu_mesh_{log.name}"))


def said(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


# ---- requests -----------------------------------------------------------------------------


class Client:
    """Asks a mesh, and counts what comes."""

    def __init__(self, mesh: Running, options: argparse.Namespace, layers: int) -> None:
        self._mesh, self._options, self._layers = mesh, options, layers
        self._random = random.Random(options.seed)
        self._metrics = ""

    def _prompt(self) -> list[int]:
        return self._random.choices(range(300, 4000), k=self._options.prompt)

    async def warm_up(self, deadline: float) -> None:
        """One short answer; and where the decode worker's metrics are."""
        members = await read_members(self._mesh.info["redis_url"], self._mesh.info["name"])
        for record in (member.record for member in members):
            if record.role == "decode" and record.metrics_port:
                self._metrics = f"{record.address.rpartition(':')[0]}:{record.metrics_port}"
        async with meshes.chat_stub(self._mesh.info["address"]) as stub:
            left = max(1.0, deadline - time.monotonic())
            try:
                await meshes.ask(stub, self._prompt(), left, max_tokens=4, ignore_eos=True)
            except grpc.aio.AioRpcError as error:
                raise SystemExit(f"the first request failed: {said(error)}") from error

    async def measure(self, at_once: int, deadline: float) -> Point:
        """All answers of one measurement, or as many as come until the deadline."""
        expected = at_once * self._options.rounds
        answers: list[meshes.Answer] = []
        errors: list[str] = []
        before, began = self._counters(), time.monotonic()

        async def one(stub: Any) -> None:
            for _ in range(self._options.rounds):
                answer, prompt = meshes.Answer(), self._prompt()
                answers.append(answer)
                wanted = {"max_tokens": self._options.output, "ignore_eos": True}
                try:
                    await meshes.ask(stub, prompt, 3600, into=answer, **wanted)
                except grpc.aio.AioRpcError as error:
                    errors.append(said(error))

        async def watch() -> None:
            while True:
                tokens = sum(len(answer.token_ids) for answer in answers)
                left, gone = deadline - time.monotonic(), time.monotonic() - began
                text = f"{at_once} at once: {tokens} of {expected * self._options.output} tokens"
                text += f", {gone:.0f} s, {left:.0f} s left"
                print(f"\r{text} \033[K", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)

        async with meshes.chat_stub(self._mesh.info["address"]) as stub:
            watching = asyncio.ensure_future(watch())
            asked = asyncio.gather(*(one(stub) for _ in range(at_once)))
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await asked
            except TimeoutError:
                pass
            finally:
                watching.cancel()
                print("\r\033[K", end="", file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        point = summed(at_once, answers, seconds, self._layers, expected, errors)
        return Point(**(asdict(point) | self._shares(before, self._counters())))

    def _counters(self) -> dict[str, float]:
        try:
            return meshes.scrape(self._metrics) if self._metrics else {}
        except OSError:
            return {}

    def _shares(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        def grown(name: str) -> float:
            return after.get(f"pdmesh_{name}", 0.0) - before.get(f"pdmesh_{name}", 0.0)

        steps, spent = grown("step_batch_size_count"), grown("step_duration_seconds_sum")
        if not steps or not spent:
            return {}
        host = grown("engine_overhead_seconds_sum") / spent
        return {"host": host, "batch": grown("step_batch_size_sum") / steps}


def layers_of(options: argparse.Namespace) -> int:
    """Layers of the main model."""
    known = shipped_model() if options.config == SHIPPED else shipped_config(options.config)
    config = json.loads((known / "config.json").read_text())
    return int(options.layers or config["num_hidden_layers"])


def gpu() -> str:
    """What nvidia-smi says of the devices; empty where there is none."""
    fields = "--query-gpu=name,memory.total,clocks.sm,clocks.mem,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", fields, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.parser(__doc__, "standard output, and to --json FILE")
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    configs = (*SHIPPED_CONFIGS, SHIPPED)
    add("--config", default=SHIPPED_CONFIGS[0], choices=configs, help="default: deepseek-v3")
    add("--layers", type=int, metavar="N", help="default: 8 of deepseek-v3, else all")
    add("--experts", type=int, metavar="N", help="routed experts of a layer (default: all)")
    add("--mtp", action="store_true", help="with the MTP layer, and a draft a step")
    add("--precision", help="plain or fp8 (default: fp8 on a GPU)")
    add("--latents", help="plain or fp8 (default: plain)")
    add("--at-once", type=int, nargs="+", metavar="N", help="open requests (default: 1 16 64)")
    add("--rounds", type=int, default=2, metavar="N", help="requests after another (default: 2)")
    add("--prompt", type=int, metavar="N", help="tokens (default: 2048 on a GPU, else 128)")
    add("--output", type=int, metavar="N", help="tokens (default: 128 on a GPU, else 32)")
    add("--chunk", type=int, default=0, metavar="N", help="of a step of prefill (default: auto)")
    add("--budget-s", type=float, default=480.0, metavar="S", help="for all of it (default: 480)")
    add("--seed", type=int, default=0, help="of the prompts")
    levels = ("DEBUG", "INFO")
    add("--log-level", default="INFO", choices=levels, help="DEBUG: with every step of a hand-off")
    add("--json", type=Path, metavar="FILE", help="default: $OUT/gpu_mesh.json")
    options = parser.parse_args(arguments)
    cpu = options.device == "cpu"
    if options.layers is None and options.config == SHIPPED_CONFIGS[0]:
        options.layers = 8
    options.at_once = sorted(options.at_once or ([1, 4] if cpu else [1, 16, 64]))
    options.prompt = options.prompt or (128 if cpu else 2048)
    options.output = options.output or (32 if cpu else 128)
    if min(*options.at_once, options.rounds, options.prompt, options.output) < 1:
        parser.error("--at-once, --rounds, --prompt and --output must be at least 1")
    if options.chunk < 0:
        parser.error("--chunk is a number of tokens, or 0 for what the device wants")
    if options.config == SHIPPED and (options.layers or options.experts):
        parser.error("--layers and --experts are for random weights, not for the shipped model")
    if options.budget_s <= STOP_S:
        parser.error(f"--budget-s must be more than {STOP_S:.0f}, which stopping may take")
    return options


def measure_all(
    options: argparse.Namespace,
    deadline: float,
    results: dict[str, Any],
    points: list[Point],
    write: Callable[[], None],
) -> None:
    """Fills `points` one after another, and calls `write` after each."""
    with running(options, deadline) as mesh:
        results["ready_s"] = mesh.ready_s
        results["plan"] = [line for line in mesh.lines if ": weights " in line]
        results["loaded_s"] = mesh.said(r"event=loaded .*seconds=([\d.]+)")
        results["step_tokens"] = mesh.said(r'event="step chosen" .*tokens=(\d+)')
        print(f"ready in {mesh.ready_s:.1f} s; weights: {results['loaded_s']} s")
        print("\n".join(results["plan"]))
        client = Client(mesh, options, layers_of(options))
        asyncio.run(client.warm_up(deadline))
        print(HEADER, flush=True)
        for at_once in options.at_once:
            left = deadline - time.monotonic()
            if not worth_it(left, at_once, points[-1] if points else None):
                print(f"{at_once} at once: left out, {left:.0f} s are left of --budget-s")
                continue
            points.append(asyncio.run(client.measure(at_once, deadline)))
            print(row(points[-1]), flush=True)
            if points[-1].error:
                print(f"{points[-1].failed} failed, the last with {points[-1].error}", flush=True)
            write()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    out = os.environ.get("OUT")
    target = options.json or (Path(out, "gpu_mesh.json") if out else None)
    deadline = time.monotonic() + options.budget_s - STOP_S
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped from outside"))
    settings = {key: str(value) for key, value in vars(options).items()}
    results: dict[str, Any] = {"settings": settings, "flags": flags(options), "gpu": gpu()}
    points: list[Point] = []

    def write() -> None:
        results["points"] = [asdict(point) for point in points]
        if target is not None:
            target.write_text(as_json(results, 1) + "\n")

    write()
    try:
        measure_all(options, deadline, results, points, write)
    except SystemExit as error:
        results["error"] = str(error)
        write()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if any(point.tokens > 100 and point.distinct < 2 for point in points):
        print("all tokens are the same one: hidden states may not be finite")
        return 1
    return int(not any(point.answers for point in points) or any(p.failed for p in points))


if __name__ == "__main__":
    sys.exit(main())
