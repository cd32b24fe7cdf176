"""The shipped small model as a model: it loads, it talks, and it knows its held-out text."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pdmesh.model.deepseek import DeepseekV3
from pdmesh.model.weights import load_model
from pdmesh.tools.tiny_answers import answer, render
from pdmesh.tools.tiny_corpus import Document, Turn
from pdmesh.tools.tiny_eval import Scores, score
from pdmesh.tools.tiny_model import network_of
from pdmesh.tools.tiny_pack import encode_documents

ROOT = Path(__file__).parents[1]
TINY = ROOT / "model" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    return load_model(TINY, torch.float32)


@pytest.fixture(scope="module")
def sample_scores(model, tokenizer) -> Scores:
    documents = []
    sample = ROOT / "tools" / "tiny_heldout_sample.jsonl"
    for line in sample.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        turns = tuple(
            Turn(message["role"] == "user", message["content"])
            for message in record.get("messages", [])
        )
        documents.append(Document(record["source"], text=record.get("text", ""), turns=turns))
    held_out = encode_documents(tokenizer, documents)
    return score(network_of(model).rows, held_out, 1024, range(len(documents)))


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello! Who are you?", ("model", "pdmesh")),
        ("Hi, how are you today?", ("you",)),
        ("What can you do?", ("stories",)),
        ("What is the capital of France?", ("Paris",)),
        ("Thank you, goodbye!", ("bye",)),
    ],
)
def test_a_greedy_answer_is_the_short_english_sentence_that_was_asked_for(
    model, tokenizer, question, expected
):
    text = answer(model, tokenizer, render([], question), 80)
    assert all(word in text for word in expected), text
    assert 10 <= len(text) <= 300
    assert text.isascii()
    assert text.rstrip()[-1] in ".!?"


def test_a_name_given_in_one_turn_is_known_in_the_next(model, tokenizer):
    first = answer(model, tokenizer, render([], "My name is Anna."), 60)
    turns = [("My name is Anna.", first)]
    assert "Anna" in answer(model, tokenizer, render(turns, "What is my name?"), 60)


def test_a_story_that_is_asked_for_is_told_to_its_end_without_going_in_circles(model, tokenizer):
    text = answer(model, tokenizer, render([], "Tell me a story about a fox."), 300)
    words = text.split()
    assert len(words) >= 40
    assert len(set(words)) >= len(words) // 3
    assert text.rstrip()[-1] in '.!?"'


def test_held_out_text_costs_no_more_bits_a_byte_than_the_card_allows(sample_scores):
    assert sample_scores.bits_per_byte <= 1.25


def test_the_mtp_layer_agrees_with_the_model_on_most_held_out_tokens(sample_scores):
    assert sample_scores.mtp_acceptance >= 0.68
