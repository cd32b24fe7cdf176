"""Twenty fixed prompts, answered greedily: `python -m pdmesh.tools.tiny_answers --help`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.tools.tiny_tokenizer import ASSISTANT, BOS, EOS, EOS_ID, USER

# Each entry is the user's turns of one chat; the last answer is the one that is rated.
PROMPTS: tuple[tuple[str, ...], ...] = (
    ("Hello! Who are you?",),
    ("Hi, how are you today?",),
    ("What can you do?",),
    ("What is your favorite color?",),
    ("I had a really long day at work.",),
    ("My name is Peter.", "What is my name?"),
    ("Do you like dogs?", "I have two of them, Rex and Bella."),
    ("Can you recommend a book?",),
    ("I want to book a table for two in San Francisco.",),
    ("Find me a bus from Sacramento to Fresno tomorrow.",),
    ("I'd like a large latte, please.",),
    ("What is the capital of France?",),
    ("What is 2 + 2?",),
    ("Anna has 3 apples and buys 4 more. How many apples does she have?",),
    ("Tell me a story.",),
    ("Tell me a story about a clever fox.",),
    ("Tell me a story about a little girl and her grandmother.",),
    ("Continue this story: Once upon a time there was a king who had three sons.",),
    ("Why do people tell stories?",),
    ("Thank you, goodbye!",),
)


def render(turns: list[tuple[str, str]], question: str) -> str:
    """The chat template's text for finished (question, answer) turns and one open question."""
    past = "".join(f"{USER}{asked}{ASSISTANT}{answer}{EOS}" for asked, answer in turns)
    return f"{BOS}{past}{USER}{question}{ASSISTANT}"


def answer(model: DeepseekV3, tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The greedy continuation of `text`, without the end token."""
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    tokens = generate_reference(model, prompt, limit, eos=(EOS_ID,))
    return tokenizer.decode(tokens, skip_special_tokens=True)


def all_answers(folder: Path, limit: int) -> list[dict[str, str]]:
    """Every prompt's turns and the model's answers to them."""
    model = load_model(folder, torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = []
    for questions in PROMPTS:
        turns: list[tuple[str, str]] = []
        for question in questions:
            reply = answer(model, tokenizer, render(turns, question), limit)
            turns.append((question, reply))
        answers.append({"prompt": " / ".join(questions), "answer": turns[-1][1]})
        print(json.dumps(answers[-1]), flush=True)
    return answers


def main() -> None:
    """Print the answers, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=300, help="tokens an answer may have")
    args = parser.parse_args()
    all_answers(args.model_dir, args.limit)


if __name__ == "__main__":
    main()
