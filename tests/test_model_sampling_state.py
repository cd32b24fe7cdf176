"""What a sequence's next choice depends on: counts, bad words, minimum length, position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import forbidden

from pdmesh.model.sampler import SamplingState
from pdmesh.wire.errors import InternalError
from pdmesh.wire.sampling import SamplingParams

VOCAB = 6
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=6)
words = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)


def state(prompt=(), output=(), eos=(), index=0, **params):
    return SamplingState(SamplingParams(**params), prompt, eos=eos, index=index, output=output)


def seen(choice):
    """Counts by token, as the sampler gets them."""
    return dict(zip(choice.counts.ids.tolist(), choice.counts.values.tolist(), strict=True))


@given(texts, texts, texts, texts)
def test_counts_are_of_prompt_and_answer_and_path(prompt, output, more, path):
    sequence = state(prompt, output, repetition_penalty=1.5)
    sequence.advance(more)
    answer = [*output, *more, *path]
    assert seen(sequence.choice(path)) == {t: answer.count(t) for t in {*prompt, *answer}}


@given(texts, texts, texts)
def test_frequency_and_presence_look_at_the_answer_only(prompt, output, path):
    for params in ({"frequency_penalty": 0.5}, {"presence_penalty": 0.5}):
        answer = [*output, *path]
        choice = state(prompt, output, **params).choice(path)
        assert seen(choice) == {t: answer.count(t) for t in set(answer)}


@settings(deadline=None)
@given(texts, st.lists(texts, max_size=4), texts, words)
def test_a_state_rebuilt_from_tokens_equals_one_that_went_step_by_step(prompt, parts, path, bad):
    params = {"repetition_penalty": 1.2, "bad_words": bad, "min_tokens": 4, "seed": 9}
    stepwise = state(prompt, eos=(0,), index=2, **params)
    for part in parts:
        stepwise.advance(part)
        stepwise.choice(path)
        stepwise.allowed(path)
    whole = state(prompt, [t for part in parts for t in part], eos=(0,), index=2, **params)
    a, b = stepwise.choice(path), whole.choice(path)
    assert seen(a) == seen(b)
    assert (a.position, a.index, set(a.forbidden)) == (b.position, b.index, set(b.forbidden))
    assert stepwise.allowed(path) == whole.allowed(path)
    assert stepwise.position == whole.position == sum(map(len, parts))


@settings(deadline=None)
@given(texts, texts, texts, words, st.integers(0, 8))
def test_a_path_then_is_the_answer_now(prompt, output, path, bad, least):
    params = {"repetition_penalty": 1.2, "bad_words": bad, "min_tokens": least}
    ahead = state(prompt, output, eos=(0,), **params).choice(path)
    now = state(prompt, [*output, *path], eos=(0,), **params).choice()
    assert seen(ahead) == seen(now)
    assert (ahead.position, set(ahead.forbidden)) == (now.position, set(now.forbidden))


@given(texts, texts, words, st.integers(0, 8))
def test_bad_words_and_min_tokens_forbid_what_their_definition_says(prompt, answer, bad, least):
    params = SamplingParams(bad_words=bad, min_tokens=least, stop_token_ids=(2,))
    choice = SamplingState(params, prompt, eos=(0,), output=answer).choice()
    assert set(choice.forbidden) == forbidden(params, answer, (0,))


@given(texts, texts, words, st.integers(0, 8))
def test_allowed_is_the_first_draft_token_that_a_choice_would_forbid(output, draft, bad, least):
    sequence = state((), output, eos=(0,), bad_words=bad, min_tokens=least)
    forbids = [t in sequence.choice(draft[:i]).forbidden for i, t in enumerate(draft)]
    assert sequence.allowed(draft) == (forbids.index(True) if True in forbids else len(draft))


def test_a_bad_word_does_not_begin_in_the_prompt():
    sequence = state(prompt=[1], bad_words=((1, 2),))
    assert 2 not in sequence.choice().forbidden
    assert 2 in sequence.choice((1,)).forbidden


def test_a_long_bad_word_is_found_after_many_short_steps():
    word = tuple(range(64))
    sequence = state(bad_words=(word,))
    for token in word[:-1]:
        assert not sequence.choice().forbidden
        sequence.advance([token])
    assert list(sequence.choice().forbidden) == [63]
    sequence.advance([5])
    assert not sequence.choice().forbidden


def test_a_choice_does_not_change_with_the_steps_that_follow():
    sequence = state([1], [2], repetition_penalty=1.5, bad_words=((3, 4),))
    choice = sequence.choice((3,))
    before = (seen(choice), choice.position, tuple(choice.forbidden))
    sequence.advance(list(range(6)) * 40)
    assert (seen(choice), choice.position, tuple(choice.forbidden)) == before


def test_counts_grow_past_any_number_of_distinct_tokens():
    sequence = state(range(500), repetition_penalty=1.5)
    sequence.advance(list(range(400, 1000)))
    counts = seen(sequence.choice((5, 2000)))
    assert counts == (
        dict.fromkeys(range(400), 0) | dict.fromkeys(range(400, 1000), 1) | {5: 1, 2000: 1}
    )


def test_biases_of_one_token_add_up():
    choice = state(logit_bias=((3, 1.5), (4, 1.0), (3, -0.5))).choice()
    assert choice.bias.ids.tolist() == [3, 4]
    assert choice.bias.values.tolist() == [1.0, 1.0]


def test_stop_tokens_are_the_models_and_the_clients():
    assert state(eos=(0, 1), stop_token_ids=(7,)).stop_tokens == {0, 1, 7}
    assert state(eos=(0, 1), stop_token_ids=(7,), ignore_eos=True).stop_tokens == {7}


def test_min_tokens_keeps_every_end_away_and_then_lets_it_come():
    sequence = state(eos=(0, 1), stop_token_ids=(5,), ignore_eos=True, min_tokens=2)
    assert set(sequence.choice().forbidden) == {0, 1, 5}
    assert set(sequence.choice((3,)).forbidden) == {0, 1, 5}
    assert not sequence.choice((3, 3)).forbidden
    assert sequence.allowed((3, 3, 0)) == 3
    assert sequence.allowed((3, 0, 3)) == 1


def test_a_plain_request_carries_nothing_to_its_choice():
    choice = state([1, 2, 3], [4], temperature=0.5).choice((5,))
    assert not choice.shaped
    assert choice.position == 2


def test_a_grammar_in_the_parameters_needs_its_compiled_form():
    with pytest.raises(InternalError, match="without it"):
        state(grammar='start: "a"')


def test_free_text_never_ends_by_itself():
    assert not state(output=[1, 2], eos=(2,)).ended
