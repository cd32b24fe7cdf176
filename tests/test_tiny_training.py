"""The tools that train the small model compute what the serving model computes, and run."""

import json
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from pdmesh.tools import train_tiny
from pdmesh.tools.tiny_batches import Batches, Mix
from pdmesh.tools.tiny_chat_forms import seed_chains, story_dialogues
from pdmesh.tools.tiny_corpus import Document, Turn, choose_held_out, read_seed
from pdmesh.tools.tiny_eval import Rows, score, windows
from pdmesh.tools.tiny_forward import (
    all_experts,
    expert_weights,
    grouped_experts,
    route,
)
from pdmesh.tools.tiny_model import build_model, network_of
from pdmesh.tools.tiny_optim import orthogonalise
from pdmesh.tools.tiny_pack import encode_documents
from pdmesh.tools.tiny_tokenizer import BOS, BOS_ID, EOS_ID, VOCAB_SIZE

ROOT = Path(__file__).parents[1]
TINY = ROOT / "model" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_the_training_forward_equals_the_serving_models_dense_forward():
    model = build_model(TINY, torch.device("cpu"), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
        for gate in model.gates():
            gate.e_score_correction_bias += 0.1 * torch.randn(32)
        tokens = torch.randint(0, VOCAB_SIZE, (2, 70))
        rows, dense = network_of(model).rows(tokens), model.dense_forward(tokens)
    torch.testing.assert_close(rows.logits, model.logits(dense.hidden), atol=1e-4, rtol=0)
    mtp = model.mtp_logits(dense.mtp_hidden)[:, 1:]
    torch.testing.assert_close(rows.mtp_logits[:, 1:], mtp, atol=1e-4, rtol=0)
    assert torch.equal(rows.load, torch.stack(dense.expert_load))


def test_computing_only_the_chosen_experts_gives_the_same_sum_and_gradients():
    torch.manual_seed(0)
    x = torch.randn(37, 32, requires_grad=True)
    gate_up = (0.2 * torch.randn(8, 32, 32)).requires_grad_()
    down = (0.2 * torch.randn(8, 32, 16)).requires_grad_()
    logits = torch.randn(37, 8, requires_grad=True)
    mask = route(logits, torch.zeros(8), groups=4, top_groups=2, top_k=2)
    inputs, probe = (x, gate_up, down, logits), torch.randn(37, 32)
    results = []
    for compute in (all_experts, lambda *a: grouped_experts(*a, top_k=2)):
        output = compute(x, expert_weights(logits, mask, 2.5), gate_up, down)
        results.append((output, *torch.autograd.grad((output * probe).sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_orthogonalising_brings_every_singular_value_near_one():
    matrices = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    for values in torch.linalg.svdvals(orthogonalise(matrices)):
        assert 0.5 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize(("length", "context"), [(5, 8), (8, 8), (9, 8), (50, 8), (2, 4), (1, 4)])
def test_windows_score_every_token_but_the_first_exactly_once(length, context):
    scored = []
    for begin, end, first in windows(length, context):
        assert end - begin <= context
        assert begin < first
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_a_model_that_knows_nothing_scores_log2_of_the_vocabulary_a_token(tokenizer):
    held_out = encode_documents(tokenizer, [Document("books", text="A short text, nothing more.")])

    def forward(tokens):
        flat = torch.zeros(1, tokens.shape[1], VOCAB_SIZE)
        return Rows(flat, flat, torch.ones(1, 4))

    tokens = len(held_out.ids) - 1
    expected = 12.0 * tokens / len("A short text, nothing more.")
    assert score(forward, held_out, 64, range(1)).bits_per_byte == pytest.approx(expected)


def test_a_dialogue_is_encoded_as_the_chat_template_renders_it(tokenizer):
    turns = (
        Turn(True, "Hi there"),
        Turn(False, "Hello!"),
        Turn(True, "Bye"),
        Turn(False, "So long"),
    )
    packed = encode_documents(tokenizer, [Document("seed", turns=turns, system="Be kind.")])
    template = jinja2.Template((TINY / "chat_template.jinja").read_text(encoding="utf-8"))
    messages = [{"role": "system", "content": "Be kind."}] + [
        {"role": "user" if turn.user else "assistant", "content": turn.text} for turn in turns
    ]
    text = template.render(messages=messages, bos_token=BOS)
    assert packed.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_batch_holds_whole_documents_in_any_order_and_groups_left_out_do_not_appear(tokenizer):
    documents = [Document("books", text=f"Text number {n}.") for n in range(40)]
    documents.append(Document("seed", turns=(Turn(True, "unseen"), Turn(False, "unseen"))))
    batches = Batches(encode_documents(tokenizer, documents), torch.device("cpu"), seed=0)
    ids, weights = batches.epoch(Mix())
    texts = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert all(document.text in texts for document in documents[:-1])
    assert "unseen" not in texts
    assert (ids == BOS_ID).sum() == (ids == EOS_ID).sum() == 40
    assert torch.equal(weights, torch.ones_like(weights))


def test_the_held_out_list_does_not_depend_on_the_order_of_the_documents():
    documents = [Document("books", text=f"Document {n}, long enough.") for n in range(500)]
    assert choose_held_out(documents) == choose_held_out(documents[::-1])
    assert len(choose_held_out(documents)) == 200


def test_the_committed_held_out_list_names_200_different_documents():
    entries = json.loads((ROOT / "tools" / "tiny_heldout.json").read_text(encoding="utf-8"))
    assert len({entry["key"] for entry in entries}) == len(entries) == 200


def test_a_story_becomes_a_request_and_the_whole_story():
    story = Document("stories", "The fox and the hen", "There was a fox. " * 20)
    for dialogue in story_dialogues([story], variants=8, seed=0):
        request, answer = dialogue.turns
        assert request.user
        assert request.text
        assert not answer.user
        assert "There was a fox." in answer.text


def test_every_seed_dialogue_starts_with_the_user_and_ends_with_the_assistant():
    seeds = read_seed()
    assert len(seeds) >= 150
    for document in [*seeds, *seed_chains(seeds, 50, seed=0)]:
        assert [turn.user for turn in document.turns] == [True, False] * (len(document.turns) // 2)
        assert all(turn.text.strip() for turn in document.turns)


@pytest.fixture
def smaller(tmp_path) -> Path:
    """A folder like the small model's, of two layers and few experts: training it takes seconds."""
    folder = tmp_path / "smaller"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64}
    config |= {"intermediate_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 8}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_smoke_mode_trains_quantises_and_writes_a_model_that_loads(
    tmp_path, smaller, monkeypatch, capsys
):
    work, out = tmp_path / "w", tmp_path / "o"
    arguments = ["--smoke", "--model-dir", str(smaller), "--work", str(work), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdmesh.tools.train_tiny", *arguments],
        env={"PYTHONPATH": str(ROOT / ".pythonpath"), "OMP_NUM_THREADS": "1", "PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert [entry["label"] for entry in report["history"]][-1] == "quantised"
    assert list(out.glob("model*.safetensors"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    train_tiny.main([*arguments, "--resume"])
    assert "resumed after 6 steps" in capsys.readouterr().out
