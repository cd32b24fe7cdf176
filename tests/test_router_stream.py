"""The gateway's side of an answer: every position once, and the right end."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.router.stream import GatewayStream, Limits, StreamBroken
from pdmesh.text.output import OutputText
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.messages import TokenChunk, TokenLogprobs

TOKENIZER = load_tokenizer(Path(__file__).resolve().parent.parent / "model" / "tiny")
WORDS = TOKENIZER.encode("one two three four five six seven eight nine ten")


def stream(stops=(), max_tokens=1000, stop_ids=(1,)):
    limits = Limits(max_tokens, frozenset(stop_ids), TOKENIZER.vocab_size)
    gate = GatewayStream(OutputText(TOKENIZER, stops), limits)
    gate.begin_attempt()
    return gate


def chunk(position, ids, attempt=1, **rest):
    return TokenChunk(attempt=attempt, position=position, token_ids=tuple(ids), **rest)


def test_tokens_seen_before_are_dropped_with_their_logprobs():
    gate = stream()
    entries = tuple(TokenLogprobs(logprob=-float(i)) for i in range(4))
    gate.take(chunk(0, WORDS[:3], logprobs=entries[:3]))
    delta = gate.take(chunk(1, WORDS[1:5], logprobs=entries))
    assert delta.token_ids == tuple(WORDS[3:5])
    assert delta.logprobs == entries[2:]
    assert gate.take(chunk(0, WORDS[:2])).token_ids == ()
    assert gate.tokens == WORDS[:5]


def test_tokens_of_an_earlier_attempt_are_dropped():
    gate = stream()
    gate.take(chunk(0, WORDS[:2]))
    gate.begin_attempt()
    assert gate.take(chunk(2, [9], attempt=1, finish="stop")).token_ids == ()
    assert gate.finish is None
    assert gate.take(chunk(2, WORDS[2:3], attempt=2)).token_ids == (WORDS[2],)


def test_a_gap_is_an_error_and_changes_nothing():
    gate = stream()
    gate.take(chunk(0, WORDS[:2]))
    with pytest.raises(StreamBroken, match="tokens 2 to 3 of the answer are missing"):
        gate.take(chunk(4, WORDS[4:]))
    assert gate.tokens == WORDS[:2]


@pytest.mark.parametrize("bad", [-1, TOKENIZER.vocab_size, 2**31])
def test_an_id_outside_the_vocabulary_is_an_error(bad):
    gate = stream()
    with pytest.raises(StreamBroken, match="outside the vocabulary"):
        gate.take(chunk(0, [WORDS[0], bad]))
    assert gate.tokens == [], "a token that the client does not get is not counted"


def test_max_tokens_cuts_a_chunk_that_runs_over_it():
    gate = stream(max_tokens=4)
    assert gate.take(chunk(0, WORDS[:6])).token_ids == tuple(WORDS[:4])
    assert gate.finish == "length"
    assert gate.take(chunk(4, WORDS[4:])).token_ids == ()


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it():
    gate = stream()
    delta = gate.take(chunk(0, [*WORDS[:2], 1, *WORDS[2:]]))
    assert delta.token_ids == tuple(WORDS[:2])
    assert gate.finish == "stop"


def test_a_stop_string_on_the_last_token_allowed_is_a_stop():
    gate = stream(stops=["two"], max_tokens=len(TOKENIZER.encode("one two")))
    gate.take(chunk(0, WORDS))
    assert gate.finish == "stop"


def test_a_stop_string_ends_at_the_token_that_completes_it():
    gate = stream(stops=["four"])
    delta = gate.take(chunk(0, WORDS))
    assert delta.text + gate.tail() == "one two three "
    assert "four" in TOKENIZER.decode(gate.tokens)
    assert "four" not in TOKENIZER.decode(gate.tokens[:-1])


def test_an_answer_that_ends_without_a_stop_string_releases_its_tail():
    gate = stream(stops=["ten more"])
    delta = gate.take(chunk(0, WORDS, finish="length"))
    assert delta.text == "one two three four five six seven eight nine "
    assert gate.tail() == "ten"


def test_random_overlaps_and_attempts_give_the_answer_once():
    for seed in range(200):
        rng = random.Random(seed)
        gate = stream()
        text = ""
        while len(gate.tokens) < len(WORDS):
            if rng.random() < 0.2:
                gate.begin_attempt()
            attempt = gate.attempt - (rng.random() < 0.2)
            start = rng.randint(max(0, len(gate.tokens) - 3), len(gate.tokens))
            text += gate.take(chunk(start, WORDS[start : start + rng.randint(0, 5)], attempt)).text
        assert gate.tokens == WORDS
        assert text + gate.tail() == TOKENIZER.decode(WORDS)


def answer_of(chunks, stops, max_tokens, stop_ids, min_tokens=0):
    """What a client gets of an answer that comes in these chunks."""
    limits = Limits(max_tokens, frozenset(stop_ids), TOKENIZER.vocab_size)
    gate = GatewayStream(OutputText(TOKENIZER, stops, min_tokens), limits)
    gate.begin_attempt()
    deltas = [gate.take(c) for c in chunks]
    text = "".join(delta.text for delta in deltas) + gate.tail()
    ids = [token for delta in deltas for token in delta.token_ids]
    assert ids == gate.tokens
    return text, ids, [e for delta in deltas for e in delta.logprobs], gate.finish


@given(
    st.lists(st.sampled_from([*WORDS, *TOKENIZER.encode("\u00fc\U0001f600"), 1, 2]), max_size=40),
    st.lists(st.integers(1, 12), min_size=1),
    st.lists(st.sampled_from(["two", "e f", "\U0001f600", "n", " ten one"]), max_size=2),
    st.integers(1, 45),
    st.sets(st.sampled_from([1, 2, WORDS[4]])),
    st.integers(0, 8),
    st.booleans(),
)
def test_an_answer_is_the_same_however_its_tokens_are_split(
    ids, sizes, stops, max_tokens, stop_ids, min_tokens, with_logprobs
):
    entries = tuple(TokenLogprobs(logprob=-float(i)) for i in range(len(ids)))

    def split(sizes):
        chunks, start = [], 0
        while start < len(ids):
            end = min(len(ids), start + sizes[len(chunks) % len(sizes)])
            last = "length" if end == len(ids) else None
            logprobs = entries[start:end] if with_logprobs else ()
            chunks.append(chunk(start, ids[start:end], finish=last, logprobs=logprobs))
            start = end
        return chunks

    rules = (stops, max_tokens, stop_ids, min_tokens)
    one_by_one = answer_of(split([1]), *rules)
    assert answer_of(split(sizes), *rules) == one_by_one
    assert answer_of(split([100]), *rules) == one_by_one
    assert one_by_one[1] == ids[: len(one_by_one[1])]
    assert len(one_by_one[2]) == (len(one_by_one[1]) if with_logprobs else 0)
