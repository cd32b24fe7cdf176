"""Text as it streams: whole characters only, and stop strings wherever they are cut."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.text.detokenizer import IncrementalDetokenizer
from pdmesh.text.output import OutputText
from pdmesh.text.stop import StopMatcher
from pdmesh.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).resolve().parent.parent / "model" / "tiny")
BYTE_IDS = {TOKENIZER.token_bytes(t): t for t in range(TOKENIZER.vocab_size)}
FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TEXTS = [
    f"A family: {FAMILY}, a flag: 🏳️\u200d🌈, a thumb: 👍🏽!",
    "안녕하세요, 세계! 한국어가 깨지지 않습니다.",
    "e\u0301 a\u0308 o\u0302 n\u0303 and Z\u0351\u036b\u0343algo",
    "日本語と中文 mixed with Ελληνικά and русский",
    "plain ASCII text",
]


def byte_tokens(data: bytes) -> list[int]:
    """One token for each byte: every character is cut wherever it can be."""
    return [BYTE_IDS[bytes([b])] for b in data]


def deltas(ids, sizes):
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    out, sizes = [], itertools.cycle(sizes)
    ids = list(ids)
    while ids:
        size = next(sizes)
        out.append(detokenizer.add(ids[:size]))
        ids = ids[size:]
    return [*out, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("cut", ["bytes", "tokens"])
def test_deltas_are_whole_characters_and_concatenate_to_the_text(text, size, cut):
    ids = byte_tokens(text.encode()) if cut == "bytes" else TOKENIZER.encode(text)
    parts = deltas(ids, [size])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_stream_that_ends_inside_a_character_shows_that_only_at_its_end(size, missing):
    ids = byte_tokens("so 👍".encode())[:-missing]
    parts = deltas(ids, [size])
    assert "".join(parts[:-1]) == "so "
    assert parts[-1] == "\ufffd"
    assert "".join(parts) == TOKENIZER.decode(ids)


@given(st.lists(st.integers(0, 4095), max_size=60), st.lists(st.integers(1, 5), min_size=1))
def test_any_tokens_in_any_chunks_give_what_one_decode_gives(ids, sizes):
    parts = deltas(ids, sizes)
    assert "".join(parts) == TOKENIZER.decode(ids)


@given(st.text(), st.lists(st.integers(1, 5), min_size=1))
def test_valid_text_never_shows_a_replacement_character_it_did_not_hold(text, sizes):
    parts = deltas(byte_tokens(text.encode()), sizes)
    assert "".join(parts) == text


def reference_cut(text, stops):
    """The text before the stop string that is completed first; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def may_show(text, stops):
    """How much of a text that holds no stop string can be shown: up to the longest suffix that
    begins one."""
    held = max(
        (k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])),
        default=0,
    )
    return len(text) - held


def check_stream(pieces, stops):
    """Feeds pieces and compares every step with the statements above."""
    matcher = StopMatcher(stops)
    shown, seen, hit = "", "", False
    for piece in pieces:
        seen += piece
        part, hit = matcher.add(piece)
        shown += part
        expected, found = reference_cut(seen, stops)
        assert hit == found
        assert shown == (expected if found else seen[: may_show(seen, stops)])
        if hit:
            break
    if not hit:
        shown += matcher.finish()
        assert shown == seen
    return shown


STOPS = ["DEFGHI", "ab", "abc", "é안👍", "aaab", "\n\n", "X", "ENDENDING", "twelve chars"]


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_is_found_wherever_it_is_cut(stop):
    text = f"before {stop} after"
    cuts = range(7, 7 + len(stop) + 1)
    for count in range(4):
        for places in itertools.combinations(cuts, count):
            edges = [0, *places, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
            assert check_stream(pieces, [stop]) == "before "


@pytest.mark.parametrize("text", ["ABC DEFGHIX", "ABC DEFGHX", "DEFGDEFGHX", "DEFGHI"[:-1]])
def test_a_near_miss_is_released_in_full(text):
    stop = "DEFGHIJ"
    for size in range(1, 5):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert check_stream(pieces, [stop]) == text


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_of_overlapping_stop_strings_the_one_completed_first_counts(size):
    def run(text, stops):
        return check_stream([text[i : i + size] for i in range(0, len(text), size)], stops)

    assert run("xxabc", ["ab", "abc"]) == "xx"
    assert run("xxabcd", ["abcd", "bc"]) == "xxa"
    assert run("xxabc", ["bc", "abc"]) == "xx"
    assert run("aaaab", ["aaab"]) == "a"
    assert run("abababac", ["ababac"]) == "ab"


def test_only_a_real_prefix_of_a_stop_string_is_held_back():
    matcher = StopMatcher(["stop"])
    assert matcher.add("to st") == ("to ", False)
    assert matcher.add("r") == ("str", False)
    assert matcher.add("sto") == ("", False)
    assert matcher.finish() == "sto"


def test_nothing_comes_after_a_stop_string():
    matcher = StopMatcher(["END"])
    assert matcher.add("a END b") == ("a ", True)
    assert matcher.hit == "END"
    assert matcher.add("more") == ("", True)
    assert matcher.finish() == ""


@given(
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text(alphabet="abé", max_size=4), max_size=12),
)
def test_any_stop_strings_in_any_pieces_behave_as_stated(stops, pieces):
    check_stream(pieces, stops)


def test_random_stop_strings_cut_over_tokens_end_at_the_token_that_completes_them():
    rng = random.Random(3)
    text = "The crow 🐦 said: 안녕! It flew away, e\u0301tude in hand, to the sea and back again."
    for _ in range(300):
        length = rng.randint(1, 12)
        start = rng.randrange(len(text) - length)
        stop = text[start : start + length]
        ids = byte_tokens(text.encode()) if rng.random() < 0.5 else TOKENIZER.encode(text)
        output, shown, used = OutputText(TOKENIZER, [stop]), "", 0
        for token in ids:
            shown += output.add(token)
            used += 1
            if output.stopped:
                break
        shown += output.finish()
        assert shown == text[: text.index(stop)]
        assert stop in TOKENIZER.decode(ids[:used])
        assert stop not in TOKENIZER.decode(ids[: used - 1])


def test_the_tail_held_back_for_a_stop_string_comes_at_the_end():
    output = OutputText(TOKENIZER, ["END OF STORY"])
    shown = "".join(output.add(t) for t in TOKENIZER.encode("so it goes END OF"))
    assert shown == "so it goes "
    assert output.finish() == "END OF"


def test_an_incomplete_character_at_the_end_follows_the_held_back_tail():
    output = OutputText(TOKENIZER, ["stop"])
    ids = byte_tokens(b"a st" + "👍".encode()[:2])
    assert "".join(output.add(t) for t in ids) == "a "
    assert output.finish() == "st\ufffd"


def test_an_incomplete_character_at_the_end_can_complete_a_stop_string():
    output = OutputText(TOKENIZER, ["t\ufffd"])
    ids = byte_tokens(b"a st" + "👍".encode()[:2])
    assert "".join(output.add(t) for t in ids) + output.finish() == "a s"


def test_a_stop_string_that_is_complete_before_min_tokens_is_text():
    ids = TOKENIZER.encode("one two one two one two")
    for least in range(len(ids) + 1):
        output, shown, used = OutputText(TOKENIZER, ["two"], least), "", 0
        for token in ids:
            shown += output.add(token)
            used += 1
            if output.stopped:
                break
        ends = [n for n in range(1, len(ids) + 1) if TOKENIZER.decode(ids[:n]).endswith("two")]
        assert used == next(n for n in ends if n >= least)
        assert shown + output.finish() == TOKENIZER.decode(ids[:used]).removesuffix("two")


def test_a_stop_string_that_does_not_count_may_begin_one_that_does():
    matcher = StopMatcher(["aba"])
    assert matcher.add("xaba", counts=False) == ("xab", False)
    assert matcher.add("ba") == ("", True)
    matcher = StopMatcher(["abab"])
    assert matcher.add("abab", counts=False) == ("ab", False)
    assert matcher.add("x") == ("abx", False)
