"""What MTP drafts bring: acceptance by depth, tokens a step, speed beside no drafts.

    .venv/bin/python -P bench/mtp.py --help

One decode engine in this process, without mesh, on one thread; prompts are chat questions in the
model's own template. Answers have a fixed length (end-of-text ignored). All numbers of drafts take
turns in every round, so that a noisy machine troubles all; what counts is the ratio of a round.
Each has to give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
from cpu_chat import QUESTIONS, encode  # noqa: E402 - the path is set above

from pdmesh.decode.config import AUTO, MAX_DRAFTS  # noqa: E402
from pdmesh.decode.runner import DecodeRunner  # noqa: E402
from pdmesh.decode.sequence import DecodeSequence  # noqa: E402
from pdmesh.decode.speculate import judged  # noqa: E402
from pdmesh.kvcache.store import LatentStore  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.sampler import SamplingState, sample  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402
from pdmesh.wire.ids import PAGE_SIZE  # noqa: E402
from pdmesh.wire.messages import StreamRequest  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402


@dataclass
class Tally:
    """What one number of drafts gave; ``tried`` and ``right`` by depth."""

    tried: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    right: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    tokens: int = 0
    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each round."""

    def add(self, steps: list[Any]) -> None:
        for step in steps:
            tests, hits = judged(step.tree, step.accepted)
            for depth in range(tests):
                self.tried[depth] += 1
                self.right[depth] += depth < hits
            self.tokens += len(step.accepted.tokens)
            self.rows += 1


class Chats:
    """A batch of chats whose prompts are computed; ``start`` begins their answers anew.

    Each has ``pages`` pages of the store, from page ``at`` on.
    """

    def __init__(
        self,
        model: DeepseekV3,
        store: LatentStore,
        at: int,
        pages: int,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        self._prompts, self._params = prompts, params
        self._at, self._pages = at, pages
        self._latents = store.tensor
        self._first = [
            self._prefill(model, prompt, self._table(number), number)
            for number, prompt in enumerate(prompts)
        ]
        self._here = slice(at, at + pages * len(prompts))
        self._computed = self._latents[self._here].clone()

    def _table(self, number: int) -> tuple[int, ...]:
        first = self._at + number * self._pages
        return tuple(range(first, first + self._pages))

    def _state(self, number: int) -> SamplingState:
        return SamplingState(self._params, self._prompts[number], index=number)

    @torch.inference_mode()
    def _prefill(
        self, model: DeepseekV3, prompt: list[int], table: tuple[int, ...], number: int
    ) -> tuple[int, torch.Tensor]:
        latents = self._latents
        batch = Batch.build([SequenceSlice(table, 0, len(prompt), 0)], [prompt], PAGE_SIZE)
        hidden = model.forward(batch, latents, "mha")
        batch = Batch.build([SequenceSlice(table, 1, len(prompt), 1)], [prompt[1:]], PAGE_SIZE)
        model.mtp_forward(batch, hidden[:-1], latents, "mha")
        token = sample(model.logits(hidden[-1:]), [self._state(number).choice()])[0][0]
        return token, hidden[-1:].clone()

    def start(self) -> list[DecodeSequence]:
        self._latents[self._here] = self._computed
        return [self._sequence(number) for number in range(len(self._prompts))]

    def _sequence(self, number: int) -> DecodeSequence:
        token, hidden = self._first[number]
        prompt, state = self._prompts[number], self._state(number)
        state.advance((token,))
        request = StreamRequest(
            lease_id="",
            generation=1,
            request_id="",
            attempt=1,
            token_ids=tuple(prompt),
            first_token=token,
            sampling=self._params,
        )
        pages = SimpleNamespace(page_table=self._table(number))
        entry: Any = SimpleNamespace(reservation=pages, ended=None)
        return DecodeSequence(
            entry, request, [*prompt, token], len(prompt), hidden, state, hashes=[]
        )


def answer(runner: DecodeRunner, chats: Chats, tally: Tally) -> tuple[float, list[list[int]]]:
    """Seconds until the last of the answers, and all tokens."""
    sequences = chats.start()
    began = time.perf_counter()
    while running := [s for s in sequences if not s.done]:
        steps = runner.step([s.rows() for s in running])
        for sequence, step in zip(running, steps, strict=True):
            sequence.apply(step, 0.0)
        tally.add(steps)
    return time.perf_counter() - began, [s.tokens for s in sequences]


class Case:
    """One batch size at one temperature: several batches, and an engine for each draft number."""

    def __init__(
        self, model: DeepseekV3, options: argparse.Namespace, batch: int, temperature: float
    ) -> None:
        params = SamplingParams(
            max_tokens=options.tokens, temperature=temperature, seed=7, ignore_eos=True
        )
        prompts = encode(options.model or shipped_model(), QUESTIONS)
        while len(prompts) < batch:
            prompts += prompts
        used = max(batch, options.singles)
        used -= used % batch
        pages = -(-(max(map(len, prompts[:used])) + options.tokens) // PAGE_SIZE)
        width = model.config.latent_width
        store = LatentStore(used * pages, model.num_latent_layers, PAGE_SIZE, width, torch.float32)
        self.name = f"{batch} chats, temperature {temperature:g}"
        self._chats = [
            Chats(model, store, at * pages, pages, prompts[at : at + batch], params)
            for at in range(0, used, batch)
        ]
        self._runners = {
            number: DecodeRunner(model, store, PAGE_SIZE, number, options.branches)
            for number in options.drafts
        }
        self.tallies = {number: Tally() for number in options.drafts}
        self.differing = 0

    def round(self) -> None:
        expected: list[list[list[int]]] = []
        for number, tally in self.tallies.items():
            total = 0.0
            for at, chats in enumerate(self._chats):
                seconds, tokens = answer(self._runners[number], chats, tally)
                total += seconds
                if len(expected) <= at:
                    expected.append(tokens)
                self.differing += tokens != expected[at]
            tally.seconds.append(total)

    def report(self) -> None:
        print(f"\n{self.name}\n")
        print("| drafts | right at depth 1, 2, ... | tokens a step | speed: median (low, high) |")
        print("|---|---|---|---|")
        base = next(iter(self.tallies.values())).seconds
        for number, tally in self.tallies.items():
            shares = ", ".join(
                f"{100 * right / tried:.0f} %"
                for tried, right in zip(tally.tried, tally.right, strict=True)
                if tried
            )
            ratios = [a / b for a, b in zip(base, tally.seconds, strict=True)]
            name = "auto" if number == AUTO else str(number)
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
            print(f"| {name} | {shares or '-'} | {tally.tokens / tally.rows:.2f} | {spread} |")
        if self.differing:
            print(f"\n{self.differing} batches gave other tokens than the first row's")


def drafts_of(text: str) -> int:
    if text == "auto":
        return AUTO
    number = int(text)
    if not 0 <= number <= MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"{number} is not 0 to {MAX_DRAFTS}")
    return number


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens an answer (64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, all taking turns (3)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="concurrent chats"
    )
    parser.add_argument(
        "--drafts",
        type=drafts_of,
        nargs="+",
        default=[0, 1, 2, 3, 4, AUTO],
        metavar="K",
        help="0 to 4 or auto; the first is what the others are compared with (0 1 2 3 4 auto)",
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="of sampling"
    )
    parser.add_argument("--branches", type=int, default=1, help="likely tokens at depth 1 (1)")
    parser.add_argument("--singles", type=int, default=4, help="chats of small batches (4)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--model", type=Path, help="checkpoint directory (the shipped model)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or shipped_model()
    model = load_model(path, torch.float32, torch.device("cpu"), mtp=True)
    differing = 0
    for batch in options.batches:
        for temperature in options.temperatures:
            case = Case(model, options, batch, temperature)
            for number in range(options.rounds):
                print(f"{case.name}: round {number + 1} of {options.rounds}", file=sys.stderr)
                case.round()
            case.report()
            differing += case.differing
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
