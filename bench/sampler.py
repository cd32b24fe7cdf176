"""Time of one sampling step by kind of request, as a ratio to greedy rows of the same shape.

    .venv/bin/python -P bench/sampler.py [--rounds N] [--vocab 4096 129280]

One thread. The kinds take turns within a round; printed are the median over rounds of the ratio
(lowest, highest), and the greedy time. ``choices`` is what ``SamplingState.choice`` adds for the
same rows. The grammar is matched with the tokenizer of the shipped model, whatever the number of
logits.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402
import torch  # noqa: E402
from llguidance import LLMatcher  # noqa: E402

import pdmesh.model.tiny  # noqa: E402
from pdmesh.model.grammar import Grammar, Grammars  # noqa: E402
from pdmesh.model.sampler import SamplingState, sample  # noqa: E402
from pdmesh.wire.sampling import SamplingParams  # noqa: E402

KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p, flat": {"temperature": 20.0, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "grammar": {},
    "all": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5},
}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="kinds taking turns")
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[4096, 129280], help="numbers of logits"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="rows of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for vocab in options.vocab:
        grammar = _grammar(vocab)
        for rows in options.rows:
            _table(vocab, rows, options.rounds, grammar)


def _grammar(vocab: int) -> Grammar:
    path = Path(str(pdmesh.model.tiny.__path__[0]))
    compiled = Grammars(path, vocab)
    return compiled.compile(LLMatcher.grammar_from_json_schema(json.dumps(_SCHEMA)))


def _table(vocab: int, rows: int, rounds: int, grammar: Grammar) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    states = {kind: _states(kind, rows, vocab, grammar) for kind in KINDS}
    step: dict[str, list[float]] = {kind: [] for kind in KINDS}
    made: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, here in states.items():
            choices = [state.choice() for state in here]
            step[kind].append(_seconds(lambda choices=choices: sample(logits, choices)))
            made[kind].append(_seconds(lambda here=here: [state.choice() for state in here]))
    greedy = step["greedy"][1:]
    print(f"{rows} rows of {vocab}: greedy {statistics.median(greedy) * 1e3:.3f} ms")
    for kind in KINDS:
        sampled, chosen = _ratio(step[kind][1:], greedy), _ratio(made[kind][1:], greedy)
        print(f"  {kind:12} {sampled}   choices {chosen}")


def _states(kind: str, rows: int, vocab: int, grammar: Grammar) -> list[SamplingState]:
    """Sequences of 512 prompt tokens and 128 tokens of answer."""
    tokens = torch.randint(0, vocab, (rows, 640), generator=torch.Generator().manual_seed(1))
    constrained = grammar if kind in ("grammar", "all") else None
    return [
        SamplingState(
            SamplingParams(seed=row, **KINDS[kind]),
            tokens[row, :512].tolist(),
            eos=(1,),
            grammar=constrained,
            output=tokens[row, 512:].tolist() if constrained is None else (),
        )
        for row in range(rows)
    ]


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _ratio(times: list[float], base: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    return f"{statistics.median(ratios):7.1f} ({ratios[0]:.1f}, {ratios[-1]:.1f})"


if __name__ == "__main__":
    main()
