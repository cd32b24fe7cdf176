"""The shipped small model as files: sizes, tokenizer, chat template."""

import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from pdmesh.tools.tiny_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

TINY = Path(__file__).parents[1] / "model" / "tiny"
BOS, EOS, USER, ASSISTANT = (SPECIAL_TOKENS[index] for index in (0, 1, 3, 4))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def render(messages: list[dict], add_generation_prompt: bool = False) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((TINY / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(
        messages=messages, bos_token=BOS, add_generation_prompt=add_generation_prompt
    )


def test_the_folder_is_at_most_36_megabytes_and_each_shard_15():
    files = [file for file in TINY.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 36_000_000
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert shards
    assert max(shard.stat().st_size for shard in shards) <= 15_000_000


def test_the_config_has_every_part_of_the_architecture_and_a_latent_of_512_and_64():
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v3"
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert config["q_lora_rank"]
    assert config["num_nextn_predict_layers"] == 1
    assert config["first_k_dense_replace"] == 1
    assert config["num_hidden_layers"] >= 6
    assert config["n_routed_experts"] >= 32
    assert config["num_experts_per_tok"] >= 4
    assert config["n_shared_experts"] == 1
    assert config["topk_group"] < config["n_group"]
    assert config["topk_method"] == "noaux_tc"
    assert config["max_position_embeddings"] >= 4096
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_every_special_token_is_one_id_and_they_come_first(tokenizer):
    for number, text in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [number]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_the_tokenizer_config_names_the_special_tokens_and_carries_the_template():
    config = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"]) == (BOS, EOS)
    assert config["chat_template"] == (TINY / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\n\ttab", "naïve café 你好 🙂 \x00\x7f", "1234.5", ""]
)
def test_any_text_comes_back_from_the_tokenizer_unchanged(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_chat_is_rendered_in_deepseek_v3s_format():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>hm</think>Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    expected = f"{BOS}Be kind.{USER}Hi{ASSISTANT}Hello!{EOS}{USER}Bye{ASSISTANT}"
    assert render(messages, add_generation_prompt=True) == expected


def test_a_tool_call_and_its_output_are_rendered_in_their_own_tokens():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    assert render(messages) == (
        f"{BOS}{USER}1?{ASSISTANT}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add"
        '\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        f"{EOS}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
        f"<｜tool▁outputs▁end｜>Two.{EOS}"
    )
