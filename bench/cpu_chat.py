"""Tokens per second through the mesh beside transformers' generate, on the same cores.

    make bench            (or: .venv/bin/python -P bench/cpu_chat.py --help)

Both sides run the same weights in float32 on the same cores. transformers gets one batched
``generate`` with all threads; the mesh is ``pdmesh up`` with one prefill and two decode workers.
The sides take turns for several rounds, so that a noisy machine troubles both; what counts is the
ratio of a round. Output lengths are fixed (end-of-text ignored), so both do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import meshes  # noqa: E402 - the path is set above
from figures import as_json  # noqa: E402

from pdmesh.launch.status import collect  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.checkpoint import save_checkpoint  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402

QUESTIONS = (
    "Hello! Who are you?",
    "Can you tell me a short story about a fox?",
    "I want to book a table for two people tonight.",
    "What do you like to do on weekends?",
    "Please find me a restaurant in San Jose.",
    "Do you have any pets?",
    "I need a large latte with oat milk, please.",
    "How are you feeling today?",
    "Tell me about your family.",
    "What kind of music do you like?",
    "I am looking for a flight to New York.",
    "Do you like to read books?",
    "Can you help me find a movie to watch?",
    "It is raining here. What should I do?",
    "My dog ran away this morning.",
    "Tell me something nice.",
)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Transformers:
    """The same weights in transformers, greedy, with left padding."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            ours = load_model(checkpoint, torch.float32, torch.device("cpu"), mtp=True)
            save_checkpoint(ours, folder, fp8=False, dtype=torch.float32)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds of one batched call, and the new tokens."""
        torch.set_num_threads(self._threads)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began, out[:, width:].tolist()


async def through_mesh(
    address: str, prompts: list[list[int]], new_tokens: int, tenant: str
) -> tuple[float, list[meshes.Answer]]:
    """Seconds until the last of the concurrent answers, and the answers. Caches start cold."""
    async with meshes.chat_stub(address) as stub:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(
                meshes.ask(stub, p, tenant=tenant, max_tokens=new_tokens, ignore_eos=True)
                for p in prompts
            )
        )
        return time.perf_counter() - began, list(answers)


class DecodeSteps:
    """What the decode workers count of their steps, between two looks."""

    NAMES = ("step_duration_seconds", "engine_overhead_seconds", "step_batch_size")

    def __init__(self, mesh: meshes.Mesh) -> None:
        self._mesh = mesh
        self._before = self._look()

    def _look(self) -> dict[str, float]:
        lines = asyncio.run(collect(self._mesh.info["redis_url"], self._mesh.info["name"]))
        found = [meshes.scrape(line.metrics) for line in lines if line.role == "decode"]
        wanted = [f"pdmesh_{name}_{part}" for name in self.NAMES for part in ("sum", "count")]
        return {name: sum(samples[name] for samples in found) for name in wanted}

    def report(self) -> str:
        """One sentence: the share of the steps since the start that is not model and sampler."""
        now = self._look()
        change = {name: now[name] - self._before[name] for name in now}
        steps = change["pdmesh_step_duration_seconds_count"]
        seconds = change["pdmesh_step_duration_seconds_sum"]
        share = 100 * change["pdmesh_engine_overhead_seconds_sum"] / seconds
        batch = change["pdmesh_step_batch_size_sum"] / steps
        return (
            f"decode steps: {steps:.0f} of {1e3 * seconds / steps:.1f} ms, {batch:.1f} chats each; "
            f"{share:.1f} % of their time is neither model nor sampler"
        )


def encode(checkpoint: Path, questions: tuple[str, ...]) -> list[list[int]]:
    from pdmesh.text.template import load_template
    from pdmesh.text.tokenizer import load_tokenizer

    template = load_template(checkpoint, load_tokenizer(checkpoint))
    return [template.encode([{"role": "user", "content": q}]) for q in questions]


def latency_table(answers: list[meshes.Answer]) -> list[str]:
    ttft = [a.first_token_s * 1e3 for a in answers]
    gaps = [
        (b - a) * 1e3
        for answer in answers
        for a, b in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    rows = []
    for name, values in (("TTFT", ttft), ("ITL", gaps)):
        middle, worst = statistics.median(values), percentile(values, 0.99)
        rows.append(f"{name}: median {middle:.1f} ms, p99 {worst:.1f} ms")
    stages = {
        "queue": sum(a.timing.queue_ms for a in answers),
        "prefill": sum(a.timing.prefill_ms for a in answers),
        "transfer": sum(a.timing.transfer_ms for a in answers),
        "decode": sum(a.timing.decode_ms for a in answers),
        "router": sum(a.timing.router_ms for a in answers),
    }
    total = sum(stages.values())
    shares = ", ".join(f"{name} {100 * ms / total:.1f} %" for name, ms in stages.items())
    rows.append(f"share of the time: {shares}")
    drafted = sum(a.usage.drafted_tokens for a in answers)
    accepted = sum(a.usage.accepted_tokens for a in answers)
    rows.append(f"MTP: {accepted} of {drafted} drafts accepted ({100 * accepted / drafted:.0f} %)")
    return rows


def agreement(ours: list[meshes.Answer], theirs: list[list[int]]) -> str:
    """How far the two greedy answers agree; they round differently, so a near tie may part them."""
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip([x.token_ids for x in ours], theirs, strict=True)
    ]
    whole = sum(n == len(b) for n, b in zip(same, theirs, strict=True))
    return f"{whole} of {len(theirs)} answers equal transformers' token for token"


def measure(options: argparse.Namespace, mesh: meshes.Mesh) -> dict[str, list[float]]:
    """Rates in tokens/s of every round, both sides, by name."""
    checkpoint = options.model or shipped_model()
    prompts = encode(checkpoint, QUESTIONS)
    while len(prompts) < options.chats:
        prompts += prompts
    many, few = prompts[: options.chats], prompts[: options.singles]
    tokens = options.tokens
    theirs = Transformers(checkpoint, options.threads)
    theirs.generate(few[:1], 8)
    asyncio.run(through_mesh(mesh.address, few[:1], 8, "warm-up"))
    rates: dict[str, list[float]] = {}
    shares: list[str] = []
    alone: list[meshes.Answer] = []
    together: list[meshes.Answer] = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        seconds = sum(theirs.generate([p], tokens)[0] for p in few)
        rates.setdefault("transformers, batch 1", []).append(tokens * len(few) / seconds)
        seconds = 0.0
        for i, prompt in enumerate(few):
            spent, answers = asyncio.run(
                through_mesh(mesh.address, [prompt], tokens, f"one-{number}-{i}")
            )
            seconds += spent
            alone += answers
        rates.setdefault("pdmesh, 1 chat", []).append(tokens * len(few) / seconds)
        seconds, batched = theirs.generate(many, tokens)
        name = f"transformers, batch {len(many)}"
        rates.setdefault(name, []).append(tokens * len(many) / seconds)
        steps = DecodeSteps(mesh)
        seconds, answers = asyncio.run(through_mesh(mesh.address, many, tokens, f"all-{number}"))
        shares.append(steps.report())
        together += answers
        rates.setdefault(f"pdmesh, {len(many)} chats", []).append(tokens * len(many) / seconds)
    print(agreement(answers, batched))
    print("\n".join(shares))
    for title, sample in (("1 chat", alone), (f"{len(many)} chats", together)):
        print(f"\n{title}:")
        for row in latency_table(sample):
            print("  " + row)
    return rates


def report(rates: dict[str, list[float]]) -> None:
    names = list(rates)
    print("\n| | tokens/s (median) | ratio of a round: median (lowest, highest) |\n|---|---|---|")
    for theirs, ours in (names[:2], names[2:]):
        ratios = [b / a for a, b in zip(rates[theirs], rates[ours], strict=True)]
        print(f"| {theirs} | {statistics.median(rates[theirs]):.0f} | 1 |")
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f}, {max(ratios):.1f})"
        print(f"| {ours} | {statistics.median(rates[ours]):.0f} | {spread} |")


def main() -> int:
    parser = command_line.parser(
        __doc__, "standard output, and those of every round to --json FILE"
    )
    parser.add_argument("--tokens", type=int, default=128, help="new tokens an answer (128)")
    parser.add_argument("--chats", type=int, default=16, help="concurrent chats (16)")
    parser.add_argument("--singles", type=int, default=4, help="chats one after another (4)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, sides taking turns (3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of transformers (2)")
    parser.add_argument("--model", type=Path, help="checkpoint directory (the shipped model)")
    parser.add_argument("--drafts", type=int, help="MTP drafts a step (what pdmesh up takes)")
    parser.add_argument("--json", type=Path, help="also write the rates of every round here")
    options = parser.parse_args()
    arguments = ["--model", str(options.model)] if options.model else []
    settings = "" if options.drafts is None else f"draft_tokens = {options.drafts}\n"
    topology = f"[decode]\nmetrics_port = 9200\n{settings}"
    with meshes.running_mesh(*arguments, topology=topology) as mesh:
        rates = measure(options, mesh)
    report(rates)
    if options.json:
        options.json.write_text(as_json(rates, 2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
