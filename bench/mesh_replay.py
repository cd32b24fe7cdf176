"""Replays a request trace through a whole mesh of processes with the shipped model, by policy.

    .venv/bin/python -P bench/mesh_replay.py            (--help for the options)

The trace is one in Mooncake's format with blocks of 16 tokens (see ``route_replay.py``); each block
id stands for 16 token ids drawn from it, so prompts share prefixes as the trace's do. A page is a
block. Requests are sent in the trace's order and at its times, as much faster as makes the prefill
workers ``--busy`` of their time busy if nothing is cached; how fast they compute is measured first,
with cold prompts. Prompts longer than the model's context (or ``--longest``) are left out and
counted. An answer ends after ``--output`` tokens, so that prefill, which routing is about, is most
of the work.

Printed for each policy: hit, the share of prompt tokens that were not computed (found in a worker's
cache, or fetched from another); imbalance, the most tokens that a prefill worker computed over the
mean; mean and 99th percentile of the time to the first token, in units of computing the mean
prompt alone, measured in the same run; and, beside it, hit and imbalance of the simulated workers
of ``route_replay.py`` on the same requests with as many pages. The mesh computes in ``exact``
arithmetic: the answers of all policies are compared, and must be the same to the last token.

Each policy has a mesh of its own, or with ``--one-mesh``, which is quicker, a router of its own and
pages of its own (a tenant) over the same workers, whose pools are then not empty.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import grpc  # noqa: E402 - the path is set above
import mesh_changes  # noqa: E402
import meshes  # noqa: E402
import route_replay  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from route_replay import Request, Trace  # noqa: E402

from pdmesh.router.policies import POLICY_NAMES  # noqa: E402

BLOCK = 16
CONTEXT = 4096
VOCAB = range(300, 4000)
DEFAULT = ROOT / "tests" / "data" / "mooncake_conversation_scaled32_block16_first300.jsonl"
POLICIES = ("round_robin", "bounded_load", "min_ttft", "priced")


@dataclass(frozen=True)
class Replayed:
    """One policy's run. Times in seconds; ``answers`` are token ids by request."""

    policy: str
    hit: float
    imbalance: float
    mean_s: float
    p99_s: float
    unit_s: float
    """Computing a prompt of the mean length, nothing else at work."""
    answers: tuple[tuple[int, ...], ...]


def servable(trace: Trace, longest: int) -> tuple[Trace, int]:
    """The requests with prompts of up to so many tokens, and how many others there are."""
    fitting = tuple(r for r in trace.requests if r.tokens <= longest)
    return Trace(trace.name, trace.block, fitting), len(trace.requests) - len(fitting)


def prompt_of(request: Request) -> list[int]:
    """Token ids: a block's depend on its id alone."""
    tokens = [t for b in request.blocks for t in random.Random(b).choices(VOCAB, k=BLOCK)]
    return tokens[: request.tokens]


async def tokens_per_second(
    stub: meshes.chat_pb2_grpc.ChatServiceStub, policy: str, rounds: int
) -> float:
    """What one prefill worker computes of cold prompts, one at a time."""
    rates = []
    for number in range(rounds):
        prompt = random.Random(f"cold {number}").choices(VOCAB, k=768)
        answer = await meshes.ask(
            stub, prompt, max_tokens=1, ignore_eos=True, tenant=f"rate {policy}"
        )
        assert answer.timing is not None
        rates.append(len(prompt) / answer.timing.prefill_ms * 1e3)
    return statistics.median(rates[1:] or rates)


async def replay(address: str, trace: Trace, policy: str, options: argparse.Namespace) -> Replayed:
    """All requests of a trace at their times, through the router at an address."""
    tokens, prefill, busy = sum(r.tokens for r in trace.requests), options.prefill, options.busy
    async with meshes.chat_stub(address) as stub:
        rate = await tokens_per_second(stub, policy, options.cold)
        span = max(r.at for r in trace.requests) - trace.requests[0].at
        speed = span / (tokens / rate / prefill / busy)
        began, done = time.perf_counter(), 0

        async def one(request: Request) -> meshes.Answer:
            nonlocal done
            due = (request.at - trace.requests[0].at) / speed
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            prompt = prompt_of(request)
            answer = await meshes.ask(
                stub,
                prompt,
                timeout=600,
                max_tokens=options.output,
                ignore_eos=True,
                tenant=f"trace {policy}",
            )
            done += 1
            print(f"\r{policy}: {done} of {len(trace.requests)} \033[K", end="", file=sys.stderr)
            return answer

        answers = await asyncio.gather(*(one(request) for request in trace.requests))
    print("\r\033[K", end="", file=sys.stderr)
    computed: dict[str, int] = {f"prefill-{n}": 0 for n in range(prefill)}
    for request, answer in zip(trace.requests, answers, strict=True):
        assert answer.usage is not None
        assert answer.timing is not None
        computed[answer.timing.prefill_worker] += request.tokens - answer.usage.cached_tokens
    times = sorted(answer.first_token_s for answer in answers)
    return Replayed(
        policy=policy,
        hit=1 - sum(computed.values()) / tokens,
        imbalance=max(computed.values()) * prefill / max(1, sum(computed.values())),
        mean_s=statistics.mean(times),
        p99_s=times[int(0.99 * len(times))],
        unit_s=tokens / len(times) / rate,
        answers=tuple(tuple(answer.token_ids) for answer in answers),
    )


@contextmanager
def running(policy: str, options: argparse.Namespace) -> Iterator[meshes.Mesh]:
    """A mesh of processes."""
    topology = (
        f'[router]\npolicy = "{policy}"\n'
        f"[prefill]\nworkers = {options.prefill}\npages = {options.pages}\n"
        f"[decode]\nworkers = {options.decode}\npages = {options.pages}\n"
    )
    flags = ("--page-size", str(BLOCK), "--arithmetic", "exact")
    with meshes.running_mesh(*flags, topology=topology) as mesh:
        mesh.workers = options.prefill + options.decode
        yield mesh


@contextmanager
def router(mesh: meshes.Mesh, policy: str) -> Iterator[str]:
    """One more router of a mesh; yields its address.

    Raises:
        TimeoutError: it does not become ready.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ("--redis", mesh.info["redis_url"], "--mesh", mesh.info["name"])
    secret = ("--secret-file", str(mesh.state_dir / "secret.key"), "--id", f"router-{policy}")
    command = [*("-m", "pdmesh.launch.cli", "serve", "router", "--port", str(port)), *place]
    process = subprocess.Popen(
        [sys.executable, "-P", *command, *secret, "--policy", policy, "--log-level", "WARNING"],
        env=mesh_changes.environment(mesh),
        stdin=subprocess.DEVNULL,
    )
    try:
        asyncio.run(serving(f"127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def serving(address: str) -> None:
    """Waits until a router knows workers of both roles.

    Raises:
        TimeoutError: it does not.
    """
    request = health_pb2.HealthCheckRequest()
    async with asyncio.timeout(meshes.START_S), grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = await health.Check(request, wait_for_ready=True)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.05)


def runs(trace: Trace, options: argparse.Namespace) -> Iterator[tuple[Replayed, list[str]]]:
    """Every policy's run, and what it left behind in the workers."""

    def run(mesh: meshes.Mesh, address: str, policy: str) -> tuple[Replayed, list[str]]:
        result = asyncio.run(replay(address, trace, policy, options))
        return result, asyncio.run(mesh.problems())

    first, *others = options.policies
    with running(first, options) as mesh:
        yield run(mesh, mesh.address, first)
        for policy in others if options.one_mesh else ():
            with router(mesh, policy) as address:
                yield run(mesh, address, policy)
    for policy in () if options.one_mesh else others:
        with running(policy, options) as mesh:
            yield run(mesh, mesh.address, policy)


HEADER = (
    f"{'policy':<17}{'hit %':>6} {'imbal.':>6} {'mean':>6} {'p99':>6}   | simulated: hit %, imbal."
)


def line(result: Replayed, simulated: route_replay.Result) -> str:
    return (
        f"{result.policy:<17}{100 * result.hit:>6.2f} {result.imbalance:>6.2f}"
        f" {result.mean_s / result.unit_s:>6.2f} {result.p99_s / result.unit_s:>6.2f}"
        f"   | {100 * simulated.hit:>5.2f} {simulated.imbalance:>6.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--trace", type=Path, default=DEFAULT, metavar="FILE", help=f"default: {DEFAULT.name}")
    add("--first", type=int, metavar="N", help="only the first N that are not too long")
    add("--longest", type=int, metavar="N", help="tokens of a prompt (default: what fits)")
    add(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        choices=POLICY_NAMES,
        help="which to compare",
    )
    add("--prefill", type=int, default=2, metavar="N", help="prefill workers (default: 2)")
    add("--decode", type=int, default=1, metavar="N", help="decode workers (default: 1)")
    add("--pages", type=int, default=2048, help="pages of each worker (default: 2048)")
    add("--output", type=int, default=2, metavar="N", help="tokens of each answer (default: 2)")
    add("--busy", type=float, default=0.9, help="of the workers' time, uncached (default: 0.9)")
    add("--cold", type=int, default=4, metavar="N", help="prompts to measure speed (default: 4)")
    add("--one-mesh", action="store_true", help="a router a policy, over the same workers")
    options = parser.parse_args(arguments)
    if not options.trace.is_file():
        raise SystemExit(f"no trace {options.trace}: name one with --trace")
    trace = route_replay.load(options.trace)
    if trace.block != BLOCK:
        raise SystemExit(f"{options.trace} has blocks of {trace.block} tokens, not {BLOCK}")
    longest = min(options.longest or CONTEXT, CONTEXT - options.output)
    trace, others = servable(trace, longest)
    trace = Trace(trace.name, trace.block, trace.requests[: options.first])
    print(f"{trace.name}: {len(trace.requests)} requests; {others} over {longest} tokens left out")
    print(HEADER)
    answers: dict[tuple[tuple[int, ...], ...], str] = {}
    for result, left in runs(trace, options):
        simulated = route_replay.replay(
            *(trace, options.pages * options.prefill, options.prefill),
            *(result.policy, random.Random(0)),
        )
        print(line(result, simulated), flush=True)
        answers[result.answers] = result.policy
        if left:
            print(f"{result.policy} left behind: {'; '.join(left)}")
            return 1
    if len(answers) > 1:
        print(f"the answers differ between {' and '.join(answers.values())}")
        return 1
    print("all policies gave the same answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
