"""What packed latents cost in accuracy: the shipped model's own, with four scales and with one.

    python -P bench/packed_latents.py [--model FOLDER]            (on a CPU, a minute)

Conversations with the model's own greedy answers. The prompt's latents are computed once, in
bfloat16, and packed in both forms; the answer's rows then read them in absorbed form, and their own
latents, which have one scale wherever they are packed. Printed are
the error of the packed values (norm of the difference over the norm), the error of logits beside
those of the model in float32 (root mean square of a row's difference over the spread of all; the
median row), and how many rows have the same likeliest token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / ".pythonpath")]

import command_line  # noqa: E402 - the path is set above
import torch  # noqa: E402 - the path is set above
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from pdmesh.kernels.quantised import pack_latents, unpack_latents  # noqa: E402
from pdmesh.launch.topology import shipped_model  # noqa: E402
from pdmesh.model.batch import Batch, SequenceSlice  # noqa: E402
from pdmesh.model.deepseek import DeepseekV3  # noqa: E402
from pdmesh.model.device.model import DeviceModel  # noqa: E402
from pdmesh.model.reference import generate_reference  # noqa: E402
from pdmesh.model.weights import load_model  # noqa: E402
from pdmesh.tools.tiny_answers import render  # noqa: E402

QUESTIONS = (
    "Hello! Who are you?",
    "Tell me a story.",
    "What is the capital of France?",
    "Can you find me a restaurant for tonight?",
    "I feel sad today.",
    "Have you read many books?",
)
PAGE, PAGES, RANK = 64, 6, 512
FORMS = ("bfloat16", "four scales", "one scale")


def conversations(model: DeepseekV3, path: Path, tokens: int) -> Iterator[tuple[list[int], int]]:
    """Questions with greedy answers: all tokens, and how many of them are the prompt's."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for question in QUESTIONS:
        prompt = tokenizer.encode(render([], question), add_special_tokens=False).ids
        answer = generate_reference(model, prompt, tokens, model.config.eos_token_ids)
        yield [*prompt, *answer], len(prompt)


def batch_of(tokens: Sequence[int], start: int, end: int) -> Batch:
    piece = SequenceSlice(tuple(range(PAGES)), start, end, start)
    return Batch.build([piece], [list(tokens[start:end])], PAGE)


def in_forms(pool: Tensor) -> dict[str, Tensor]:
    """A pool of bfloat16 latents in every form."""
    forms = (pool.clone(), pack_latents(pool, shared_scale=False), pack_latents(pool))
    return dict(zip(FORMS, forms, strict=True))


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def main() -> None:
    """Prints the table."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--model", type=Path, default=shipped_model(), help="checkpoint directory")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    args = parser.parse_args()
    reference, device = load_model(args.model), DeviceModel.load(args.model)
    right: list[Tensor] = []
    logits: dict[str, list[Tensor]] = {name: [] for name in FORMS}
    latents: list[Tensor] = []
    for tokens, prompt in conversations(reference, args.model, args.tokens):
        exact, pool = reference.new_latents(PAGES), device.new_latents(PAGES)
        for model, kept in ((reference, exact), (device, pool)):
            model.forward(batch_of(tokens, 0, prompt), kept, "mha")
        answer = batch_of(tokens, prompt, len(tokens))
        right.append(reference.logits(reference.forward(answer, exact, "absorbed")))
        for name, held in in_forms(pool).items():
            logits[name].append(device.logits(device.forward(answer, held, "absorbed")).float())
        rows = pool.transpose(1, 2).flatten(0, 1)[:prompt]
        latents.append(rows[:, : device.config.num_hidden_layers].flatten(0, 1))
    report(torch.cat(latents), torch.cat(right), {n: torch.cat(v) for n, v in logits.items()})


def report(latents: Tensor, right: Tensor, logits: dict[str, Tensor]) -> None:
    print(f"{latents.shape[0]} latents, {right.shape[0]} rows of answers")
    for name, held in in_forms(latents).items():
        read = unpack_latents(held) if held.dtype == torch.uint8 else held
        off = (logits[name] - right).square().mean(-1).sqrt().median() / right.std()
        same = (logits[name].argmax(-1) == right.argmax(-1)).float().mean()
        print(
            f"{name:12} latents {distance(read[:, :RANK], latents[:, :RANK]):.4f}"
            f"  logits {float(off):.4f}  same token {float(same):.1%}"
        )


if __name__ == "__main__":
    main()
