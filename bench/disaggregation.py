"""What a long prompt does to running answers: one pool of ranks for both, or one for each.

    .venv/bin/python -P bench/disaggregation.py        (--help for the options)

Ranks are processes that share the experts of the shipped model (``model/parallel/member.py``): as
many in both arrangements, on the same cores, with the same answers running.

- `colocated`: one group. Every rank has its share of the answers. One of them gets a long prompt,
  and computes a chunk of it in the same pass as the next tokens of its own answers. Ranks are in
  lock-step, so a step of all takes as long as that one's.
- `separate`: half of the ranks are a group that computes prompts, the other half one that has all
  answers; neither waits for the other.

Each half of the ranks has half of the cores in both arrangements, as ranks on devices of their own
would (`--no-pinning`: the system places them). While answers run, the prompt comes again and again,
with pauses between. The inter-token latency (ITL) of an answer is the time from step to step of its
rank; steps while a prompt is computed are told from the others. The ratio of the two, both of one
run, says what a prompt costs those who wait for their next token. The other columns say what that
has for a price: with separate pools the ranks for prompts give no tokens, so ITL without a prompt
may be longer; with small chunks the prompt itself takes longer. All answers, and the first token
behind the prompt, are checked to be the same in every arrangement and round.

What is not in it: handing the prompt's pages over, MTP drafts, routing.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing as mp
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is loaded, here and in every rank

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above

from pdmesh.launch.ports import claim_ports  # noqa: E402
from pdmesh.launch.ranks import FIRST_PORT  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.computing import ComputingModel  # noqa: E402
from pdmesh.model.parallel.member import Member, Place  # noqa: E402
from pdmesh.model.parallel.virtual import Settings  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

CONTEXT = 192
"""Tokens before an answer."""
LENGTH = 256
"""Tokens after which an answer begins again, so that contexts do not grow on and on."""
COMPARED = 30
"""Tokens of every answer that are compared."""
PAGE = 64
ANSWER_PAGES = -(-(CONTEXT + LENGTH) // PAGE)
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What one rank does.

    Attributes:
        rank, addresses: its place in its group.
        cores: where it runs; empty: anywhere.
        answers: the numbers of the answers that it has.
        chunk: tokens of a prompt that it computes in a step; 0: it gets no prompt.
        prompt: tokens of the prompt.
    """

    rank: int
    addresses: tuple[str, ...]
    cores: tuple[int, ...]
    answers: tuple[int, ...]
    chunk: int
    prompt: int


@dataclass
class Found:
    """What one rank measured.

    Attributes:
        answers: how many it has.
        steps: when each step with answers ended, in seconds of the monotonic clock.
        prompts: begin and end of each.
        repeated: steps computed again because a rank was lost: there should be none.
        tokens: the first ones of each answer, by its number; the prompt's first token is at -1.
    """

    answers: int
    steps: list[float] = field(default_factory=list)
    prompts: list[tuple[float, float]] = field(default_factory=list)
    repeated: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Run:
    """ITLs in seconds, one a token, and how long prompts took."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)
    timeline: list[tuple[float, float]] = field(default_factory=list)
    """Of the last round: end and length of each."""
    intervals: list[tuple[float, float]] = field(default_factory=list)
    """Of the last round: when prompts were computed."""


# ---- a rank -------------------------------------------------------------------------------


def work(plan: Plan, pipe: Connection, prompt: Event, stop: Event) -> None:
    """The process of a rank; `prompt` is set while one has to be computed."""
    if plan.cores:
        os.sched_setaffinity(0, plan.cores)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # at the end ranks lose each other
    model = load_model(shipped_model(), torch.float32, torch.device("cpu"))
    pages = len(plan.answers) * ANSWER_PAGES + -(-plan.prompt // PAGE)
    settings = Settings("exact", mode="auto")
    member = Member(model, Place(plan.rank, plan.addresses, "bench", 60.0), settings=settings)
    if len(plan.addresses) > 1:
        member.start()
    called: ComputingModel = member if len(plan.addresses) > 1 else model
    rows = Rows(plan, called, model.new_latents(pages))
    pipe.send(None)
    pipe.recv()
    while not stop.is_set():
        if plan.chunk and prompt.is_set():
            rows.compute_prompt()
            prompt.clear()
        elif plan.answers:
            rows.step()
        else:
            time.sleep(0.002)
    rows.found.repeated = member.repeated
    pipe.send(rows.found)
    pipe.recv()  # until then others may need the experts here
    member.close()


class Rows:
    """The answers and the prompt of one rank."""

    def __init__(self, plan: Plan, model: ComputingModel, pool: torch.Tensor) -> None:
        self.found = Found(len(plan.answers))
        self._plan = plan
        self._model = model
        self._pool = pool
        first = len(plan.answers) * ANSWER_PAGES
        self._pages = [
            tuple(range(i * ANSWER_PAGES, (i + 1) * ANSWER_PAGES)) for i in range(len(plan.answers))
        ]
        self._prompt_pages = tuple(range(first, pool.shape[0]))
        self._prompt = random_tokens(plan.prompt, seed=1)
        contexts = [random_tokens(CONTEXT, seed=100 + answer) for answer in plan.answers]
        self._begins = [context[-1] for context in contexts]
        self._last = list(self._begins)
        self._at = CONTEXT - 1
        if contexts:
            slices = [SequenceSlice(pages, 0, CONTEXT - 1, 0) for pages in self._pages]
            batch = Batch.build(slices, [context[:-1] for context in contexts])
            with torch.inference_mode():
                model.forward(batch, pool, "absorbed")

    @torch.inference_mode()
    def step(self, start: int = 0, end: int = 0) -> None:
        """The next token of every answer, and the rows start..end-1 of the prompt."""
        at = self._at
        slices = [SequenceSlice(pages, at, at + 1, at) for pages in self._pages]
        tokens = [[token] for token in self._last]
        if end:
            slices.append(SequenceSlice(self._prompt_pages, start, end, start, form="mha"))
            tokens.append(self._prompt[start:end])
        hidden = self._model.forward(Batch.build(slices, tokens), self._pool, "absorbed")
        count = len(self._pages)
        if end and end == self._plan.prompt:
            self.found.tokens[-1] = self._model.logits(hidden[-1:]).argmax(dim=-1).tolist()
        if not count:
            return
        self._last = self._model.logits(hidden[:count]).argmax(dim=-1).tolist()
        self.found.steps.append(time.monotonic())
        for answer, token in zip(self._plan.answers, self._last, strict=True):
            kept = self.found.tokens.setdefault(answer, [])
            if len(kept) < COMPARED:
                kept.append(token)
        self._at += 1
        if self._at == CONTEXT + LENGTH - 1:
            self._at, self._last = CONTEXT - 1, list(self._begins)

    def compute_prompt(self) -> None:
        """All of it, chunk by chunk."""
        began = time.monotonic()
        for start in range(0, self._plan.prompt, self._plan.chunk):
            self.step(start, min(start + self._plan.chunk, self._plan.prompt))
        self.found.prompts.append((began, time.monotonic()))


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 4096) for _ in range(count)]


# ---- the run ------------------------------------------------------------------------------


def plans(args: argparse.Namespace, chunk: int, separate: bool, ports: Sequence[int]) -> list[Plan]:
    """One a rank; the first gets the prompt."""
    half = args.ranks // 2
    cores = sorted(os.sched_getaffinity(0)) if args.pinning else []
    halves: list[tuple[int, ...]] = [(), ()]
    if len(cores) > 1:
        halves = [tuple(cores[: len(cores) // 2]), tuple(cores[len(cores) // 2 :])]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    answering = range(half, args.ranks) if separate else range(args.ranks)
    found = []
    for rank in range(args.ranks):
        group = range(args.ranks)
        if separate:
            group = range(half) if rank < half else range(half, args.ranks)
        share: tuple[int, ...] = ()
        if rank in answering:
            share = tuple(range(answering.index(rank), args.answers, len(answering)))
        found.append(
            Plan(
                group.index(rank),
                tuple(addresses[other] for other in group),
                halves[rank >= half],
                share,
                0 if rank else chunk,
                0 if rank else args.prompt,
            )
        )
    return found


def run_once(ranks: Sequence[Plan], prompts: int, pause_s: float) -> list[Found]:
    """Starts the processes, sends the prompts, and ends the processes."""
    context = mp.get_context("spawn")
    prompt, stop = context.Event(), context.Event()
    pipes, processes = [], []
    try:
        for plan in ranks:
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(plan, theirs, prompt, stop), daemon=True)
            process.start()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        time.sleep(WARM_UP_S)
        for _ in range(prompts):
            time.sleep(pause_s)
            prompt.set()
            while prompt.is_set():
                if not all(process.is_alive() for process in processes):
                    sys.exit("a rank has died")
                time.sleep(0.01)
        time.sleep(pause_s)
        stop.set()
        found = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(20)
        return found
    finally:
        for process in processes:
            process.kill()


def sort_out(run: Run, found: Sequence[Found]) -> None:
    """Adds a round to `run`."""
    run.intervals = [prompt for rank in found for prompt in rank.prompts]
    run.timeline = []
    if any(rank.repeated for rank in found):
        print("a rank was lost and steps were repeated: this run does not count", file=sys.stderr)
    run.prompts += [end - begin for begin, end in run.intervals]
    for rank in found:
        begun = rank.steps[0] + WARM_UP_S if rank.steps else 0.0
        for before, now in zip(rank.steps, rank.steps[1:], strict=False):
            if before < begun:
                continue
            busy = any(before < end and now > begin for begin, end in run.intervals)
            (run.busy if busy else run.quiet).extend([now - before] * rank.answers)
            run.timeline += [(now, now - before)] * rank.answers


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def same_tokens(seen: dict[int, list[int]], found: Sequence[Found]) -> None:
    """Compares with what other arrangements gave."""
    for rank in found:
        for answer, tokens in rank.tokens.items():
            before = seen.setdefault(answer, tokens)
            common = min(len(before), len(tokens))
            if not common or before[:common] != tokens[:common]:
                sys.exit(f"answer {answer} differs: {before[:common]} and {tokens[:common]}")


def report(runs: dict[str, Run], separate: str) -> None:
    print(
        "| | ITL while a prompt is computed, over the median without: median, p99 | median ITL "
        "without a prompt, over separate | a prompt takes, over separate | ms: ITL without, with, "
        "prompt |"
    )
    print("|---|---|---|---|---|")
    other = runs[separate]
    for name, run in runs.items():
        quiet, prompt = statistics.median(run.quiet), statistics.median(run.prompts)
        with_prompt = statistics.median(run.busy)
        print(
            f"| {name} | {with_prompt / quiet:.1f}, {percentile(run.busy, 0.99) / quiet:.1f} "
            f"| {quiet / statistics.median(other.quiet):.2f} "
            f"| {prompt / statistics.median(other.prompts):.2f} "
            f"| {quiet * 1e3:.0f}, {with_prompt * 1e3:.0f}, {prompt * 1e3:.0f} |"
        )
    tails = {n: percentile(r.quiet, 0.99) / statistics.median(r.quiet) for n, r in runs.items()}
    print("p99 over median without a prompt:", ", ".join(f"{n} {t:.1f}" for n, t in tails.items()))


def plot(runs: dict[str, Run], path: Path) -> None:
    """The last round of each arrangement: every answer's ITL over time, prompts shaded."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        sys.exit("this needs matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(10, 1.9 * len(runs) + 0.6), sharey=True, layout="constrained"
    )
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        zero, quiet = min(end for end, _ in run.timeline), statistics.median(run.quiet)
        for begin, end in run.intervals:
            axis.axvspan(begin - zero, end - zero, color="#f28e2b", alpha=0.25, linewidth=0)
        ends, lengths = zip(*run.timeline, strict=True)
        axis.scatter(
            [end - zero for end in ends], [x / quiet for x in lengths], s=4, color="#4e79a7"
        )
        axis.set_yscale("log")
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylabel("ITL / median")
        axis.grid(axis="y", alpha=0.3)
    axes[-1].set_xlabel("s; shaded: a prompt is computed")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = command_line.parser(__doc__, "standard output, and a drawing to --plot FILE")
    parser.add_argument("--ranks", type=int, default=4, help="in all, an even number (4)")
    parser.add_argument("--answers", type=int, default=12, help="in all (12)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (2048)")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[512, 128, 32], help="colocated (512 128 32)"
    )
    parser.add_argument("--prompts", type=int, default=2, help="of a round (2)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between them (3)")
    parser.add_argument("--rounds", type=int, default=2, help="arrangements take turns (2)")
    parser.add_argument(
        "--no-pinning",
        dest="pinning",
        action="store_false",
        help="let the system place the ranks on cores",
    )
    parser.add_argument("--plot", type=Path, help="draw the last round to this file")
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks % 2 or args.prompt < 1 or min(args.chunks, default=0) < 1:
        parser.error("ranks must be an even number, prompt and chunks positive")
    widest = max(args.chunks)
    separate = f"separate, chunks of {widest}"
    wanted = {f"colocated, chunks of {chunk}": (chunk, False) for chunk in args.chunks}
    wanted[separate] = (widest, True)
    runs = {name: Run() for name in wanted}
    seen: dict[int, list[int]] = {}
    for _ in range(args.rounds):
        for name, (chunk, parted) in wanted.items():
            with claim_ports("127.0.0.1", FIRST_PORT, args.ranks, ()) as ports:
                ranks = plans(args, chunk, parted, ports)
                found = run_once(ranks, args.prompts, args.pause)
            same_tokens(seen, found)
            sort_out(runs[name], found)
    report(runs, separate)
    print(f"{len(seen)} answers, the same tokens in all rounds")
    if args.plot is not None:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
