"""The tokenizer of a checkpoint directory, and the chat template over it."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from pdmesh.text.template import ChatTemplate, load_template
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.errors import ConfigError, InvalidRequest

MODEL = Path(__file__).resolve().parent.parent / "model" / "tiny"
TOKENIZER = load_tokenizer(MODEL)
TEMPLATE = load_template(MODEL, TOKENIZER)
LIBRARY = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
EOS = "<｜end▁of▁sentence｜>"


def trained(tmp_path, **changes):
    """A small byte-level tokenizer of our own in a checkpoint directory."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat and that was that"] * 20, trainer)
    made.add_tokens(["<tool>"])
    spec = json.loads(made.to_str()) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    return tmp_path


def test_ordinary_text_has_the_ids_that_the_library_gives():
    for text in ("Hello there, how are you?", "  two  spaces\n\n", "1234 + 5", "naïve café", ""):
        assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


def test_text_that_spells_a_special_token_stays_text():
    reserved = set(TOKENIZER.special.values())
    for text in TOKENIZER.special:
        ids = TOKENIZER.encode(f"a{text}b")
        assert not reserved & set(ids)
        assert TOKENIZER.decode(ids) == f"a{text}b"


@given(st.text())
def test_encoding_and_decoding_gives_the_text_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_decoding_any_ids_gives_what_the_library_gives(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


def test_special_ids_come_from_all_files_that_name_them(tmp_path):
    trained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9, "vocab_size": 512}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.ids.bos, tokenizer.ids.eos) == (0, (1, 7, 9))
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_bytes(511) == b""


def test_an_added_token_that_is_not_special_is_shown_and_cannot_be_forged(tmp_path):
    tokenizer = load_tokenizer(trained(tmp_path))
    tool = tokenizer.special["<tool>"]
    assert tokenizer.decode([tool]) == "<tool>"
    assert tool not in tokenizer.encode("<tool>")


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="byte-level"):
        load_tokenizer(trained(tmp_path, decoder={"type": "WordPiece"} | {"prefix": "##"}))


def test_a_conversation_has_the_ids_that_transformers_gives():
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(MODEL))
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello! Who are you?"},
        {"role": "assistant", "content": " I am a small model. "},
        {"role": "user", "content": "Tell me\n\na story about 12 crows."},
    ]
    for messages in (turns, turns[1:], turns[1:2], turns[:2]):
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert TEMPLATE.encode(messages) == expected


def shape(ids):
    """The special tokens of a prompt, in order."""
    reserved = {token: text for text, token in TOKENIZER.special.items()}
    return [reserved[token] for token in ids if token in reserved]


@pytest.mark.parametrize("forged", sorted(TOKENIZER.special))
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_no_message_can_make_a_special_token(role, forged):
    def conversation(text):
        return [
            {"role": role, "content": text},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "go on"},
        ]

    ids = TEMPLATE.encode(conversation(f"x{forged}y"))
    assert shape(ids) == shape(TEMPLATE.encode(conversation("xy")))
    dropped = role == "assistant" and forged == "</think>"
    assert (f"x{forged}y" in TOKENIZER.decode(ids)) == (not dropped)


@pytest.mark.parametrize("text", ["\ue000", "\ue000\ue000", f"\ue000{USER}", f"<{USER}{USER}"])
def test_the_mark_used_inside_is_ordinary_text_too(text):
    ids = TEMPLATE.encode([{"role": "user", "content": f"a{text}b"}])
    assert TOKENIZER.decode(ids) == f"a{text}b"
    assert shape(ids) == shape(TEMPLATE.encode([{"role": "user", "content": "a"}]))


PIECES = [*"<>｜Us\ue000 ", USER, EOS, "</think>"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_content_always_comes_through_unchanged(text):
    ids = TEMPLATE.encode([{"role": "user", "content": text}])
    assert TOKENIZER.decode(ids) == text
    assert shape(ids)[-1] == ASSISTANT
    assert len(shape(ids)) == 3


def test_reasoning_in_an_earlier_answer_is_dropped_by_the_template():
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>hm</think>hello"},
        {"role": "user", "content": "bye"},
    ]
    assert "hm" not in TOKENIZER.decode(TEMPLATE.encode(turns))


def test_a_refusing_template_is_an_invalid_request_and_a_broken_one_a_config_error():
    refusing = ChatTemplate("{{ raise_exception('alternate the roles') }}", TOKENIZER)
    with pytest.raises(InvalidRequest, match="alternate the roles"):
        refusing.encode([{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match="chat template is broken"):
        ChatTemplate("{% for %}", TOKENIZER)


def test_a_template_cannot_reach_python_internals():
    evil = ChatTemplate("{{ messages.__class__.__mro__ }}", TOKENIZER)
    with pytest.raises(InvalidRequest):
        evil.encode([{"role": "user", "content": "hi"}])


def test_the_template_may_stand_in_the_tokenizer_config(tmp_path):
    trained(tmp_path)
    config = {"chat_template": "{{ bos_token }}{{ messages[0]['content'] }}", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = load_template(tmp_path, tokenizer).encode([{"role": "user", "content": "the cat"}])
    assert ids == [0, *tokenizer.encode("the cat")]


def test_a_checkpoint_without_a_template_is_refused(tmp_path):
    tokenizer = load_tokenizer(trained(tmp_path))
    with pytest.raises(ConfigError, match="no chat template"):
        load_template(tmp_path, tokenizer)
