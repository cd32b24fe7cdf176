"""The sampler: what each parameter means, seeds, rows that do not see each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_cases import possible, shaped

from pdmesh.model import truncation
from pdmesh.model.sampler import Choice, SamplingState, best_tokens, sample, uniform
from pdmesh.wire.errors import InternalError
from pdmesh.wire.sampling import SamplingParams

VOCAB = 12
EOS = (0,)


def rows(n, vocab=50, seed=0):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(position=0, **params):
    return Choice(SamplingParams(**params), position)


def one(logits, position=0, **params):
    ids, logprobs = sample(logits.unsqueeze(0), [choose(position, **params)])
    return ids[0], logprobs[0]


eighths = st.integers(-80, 80).map(lambda x: x / 8)
tokens = st.integers(0, VOCAB - 1)
# Sums of these are exact, so that equal means equal in any order of operations.
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.25]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    logit_bias=st.lists(st.tuples(tokens, eighths), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


@st.composite
def cases(draw):
    """One row: logits, parameters, prompt, answer, path, answer's index, what a grammar allows."""
    return (
        draw(st.lists(eighths, min_size=VOCAB, max_size=VOCAB)),
        draw(parameters),
        draw(st.lists(tokens, max_size=4)),
        draw(st.lists(tokens, max_size=5)),
        draw(st.lists(tokens, max_size=3)),
        draw(st.integers(0, 3)),
        draw(st.none() | st.sets(tokens, min_size=1)),
    )


def bitmask(allowed):
    words = np.zeros(1, dtype=np.int32)
    for token in allowed:
        words[0] |= np.int32(1 << token)
    return words


def choice_of(case):
    _, params, prompt, answer, path, index, allowed = case
    state = SamplingState(params, prompt, eos=EOS, index=index, output=answer)
    choice = state.choice(path)
    return choice if allowed is None else replace(choice, mask=bitmask(allowed))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_parameter_means_what_its_definition_says(case):
    logits, params, prompt, answer, path, index, allowed = case
    ids, _ = sample(torch.tensor([logits]), [choice_of(case)])
    values = shaped(logits, params, prompt, answer + path, EOS, allowed)
    number = uniform(params.seed, len(answer + path), index)
    assert ids[0] in possible(values, params, number)


@settings(max_examples=100, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_a_row_alone_equals_the_row_in_any_batch(batch, random):
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(len(batch)))
    choices = [choice_of(case) for case in batch]
    choices = [replace(c, params=with_logprobs(c.params, random)) for c in choices]
    alone = [sample(logits[i : i + 1], [choice]) for i, choice in enumerate(choices)]
    order = random.sample(range(len(batch)), len(batch))
    ids, logprobs = sample(logits[order], [choices[i] for i in order])
    assert [([a], [b]) for a, b in zip(ids, logprobs, strict=True)] == [alone[i] for i in order]


def with_logprobs(params, random):
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**fields | {"logprobs": random.choice([None, 0, 3])})


@pytest.mark.parametrize("vocab", [1000, 4097, 20_001])
@pytest.mark.parametrize("spread", [0.0, 0.5, 8.0])
def test_a_large_row_alone_equals_the_row_in_a_batch_bit_by_bit(vocab, spread):
    kinds = ({}, {"top_p": 0.9}, {"top_k": 700}, {"min_p": 0.1}, {"top_p": 0.5, "min_p": 1e-4})
    logits = rows(15, vocab) * spread
    choices = [choose(p, temperature=0.8, seed=p, **kinds[p % 5]) for p in range(15)]
    together, _ = sample(logits, choices)
    assert together == [sample(logits[p : p + 1], [choices[p]])[0][0] for p in range(15)]
    whole = truncation._probabilities(logits.double(), [c.params for c in choices]).cumsum(-1)
    for p in range(15):
        alone = truncation._probabilities(logits[p : p + 1].double(), [choices[p].params])
        assert torch.equal(alone.cumsum(-1)[0], whole[p])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=8, max_size=40),
    st.sampled_from([{}, {"top_k": 3}, {"top_k": 9}, {"min_p": 0.2}, {"top_k": 5, "min_p": 0.1}]),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.integers(0, 2**32),
)
@example([0] * 20, {"top_k": 9}, 1.0, 1)
def test_sorting_the_likeliest_first_changes_nothing(logits, cut, top_p, seed):
    choice = [choose(temperature=1.0, seed=seed, top_p=top_p, **cut)]
    row = torch.tensor([logits], dtype=torch.float32)
    answers = set()
    with pytest.MonkeyPatch.context() as patch:
        for counts in ((), (1,), (4,), (2, 6)):
            patch.setattr(truncation, "CANDIDATES", counts)
            answers.add(sample(row, choice)[0][0])
    assert len(answers) == 1


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals():
    logits = rows(5)
    logits[2, 7] = logits[2, 30] = 99.0
    ids, _ = sample(logits, [choose(i) for i in range(5)])
    assert ids == logits.argmax(-1).tolist()
    assert ids[2] == 7


def test_a_random_choice_depends_on_seed_position_and_answer_alone():
    logits = rows(1)[0]
    alone = [one(logits, position=p, temperature=1.0, seed=7)[0] for p in range(30)]
    batch = [choose(p, temperature=1.0, seed=7) for p in reversed(range(30))]
    together, _ = sample(logits.expand(30, -1), batch)
    assert together[::-1] == alone
    assert alone != [one(logits, position=p, temperature=1.0, seed=8)[0] for p in range(30)]
    second, _ = sample(logits.expand(30, -1), [replace(c, index=1) for c in batch])
    assert second[::-1] != alone


def test_uniform_numbers_are_fixed_for_ever():
    """A change here changes every seeded answer: the values are part of the interface."""
    values = [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 5), uniform(0, 0, 1)]
    assert values[:3] == [0.011546754286331562, 0.5023796042735054, 0.46292535650502586]
    assert values[3] == pytest.approx(numpy_uniform(0, 0, 1), abs=0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_uniform_numbers_are_those_of_numpy(seed, position, index):
    assert uniform(seed, position, index) == numpy_uniform(seed, position, index)


def numpy_uniform(seed, position, index):
    generator = np.random.Philox(key=seed, counter=position + (index << 64))
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    drawn = {one(logits, position=p, temperature=5.0, top_k=2)[0] for p in range(200)}
    assert drawn == {2, 3}
    nucleus = {one(logits, position=p, temperature=1.0, top_p=0.6)[0] for p in range(200)}
    assert nucleus == {3}
    both = {one(logits, position=p, temperature=1.0, top_p=0.7)[0] for p in range(200)}
    assert both == {2, 3}


def test_extreme_but_allowed_values_give_a_token_of_the_vocabulary():
    logits = rows(1)[0]
    for params in (
        {"temperature": 1e-6},
        {"temperature": 100.0, "top_k": 50},
        {"temperature": 1.0, "top_p": 1e-12},
        {"temperature": 1.0, "top_p": 1 - 1e-16},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 5e-324, "min_p": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "logit_bias": ((3, -100.0),)},
    ):
        assert 0 <= one(logits, **params)[0] < 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_near_zero_does_not_overflow(temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-308)
    choice = SamplingState(params, [1, 2]).choice()
    ids, _ = sample(torch.tensor([[0.0, 50.0, 60.0]]), [choice])
    assert ids[0] in (1, 2)


def test_a_tiny_temperature_equals_greedy():
    logits = rows(1)[0]
    for temperature in (1e-6, 1e-300, 5e-324):
        assert one(logits, temperature=temperature)[0] == int(logits.argmax())


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_forbidden_token_is_not_drawn_at_either_end(number):
    logits = torch.full((1, VOCAB), -math.inf, dtype=torch.float64)
    logits[0, 4:7] = 0.0
    for cut in ({}, {"top_k": 9}, {"top_p": 0.99}, {"min_p": 0.1}):
        params = [SamplingParams(temperature=1.0, **cut)]
        assert truncation.draw(logits.clone(), params, [number])[0] == (4 if number == 0 else 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_device_finds_the_likeliest_tokens_and_bad_logits_at_once(bad):
    """What runs there, computed here; of equal logits the first is taken."""
    logits = rows(5, 200)
    logits[1, [150, 40]] = logits[1].max() + 1
    assert best_tokens(logits) == sample(logits, [choose(temperature=0.0)] * 5)[0]
    logits[3, 7] = bad
    with pytest.raises(InternalError, match="for token 7 in row 3 of 5"):
        best_tokens(logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_an_error_and_not_a_token(bad):
    logits = rows(3)
    logits[1, 17] = bad
    with pytest.raises(InternalError, match="logit .* for token 17 in row 1 of 3"):
        sample(logits, [choose(), choose(temperature=1.0), choose()])


def test_the_grammar_wins_where_other_rules_leave_nothing():
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    params = SamplingParams(min_tokens=5, bad_words=((4,),))
    choice = SamplingState(params, [], eos=EOS).choice()
    assert sample(logits, [replace(choice, mask=bitmask([0, 4]))])[0] == [4]
    assert sample(logits, [replace(choice, mask=bitmask([0]))])[0] == [0]
    assert sample(logits, [replace(choice, mask=bitmask([0, 3, 4]))])[0] == [3]


def test_a_grammar_that_allows_nothing_is_an_error():
    with pytest.raises(InternalError, match="allows no token"):
        sample(rows(1, VOCAB), [replace(choose(), mask=bitmask([]))])


def test_ids_past_the_end_of_a_grammars_mask_are_not_allowed():
    logits = torch.arange(100, dtype=torch.float32).expand(2, -1)
    masked = replace(choose(), mask=np.full(1, -1, dtype=np.int32))
    assert sample(logits, [masked, choose()])[0] == [31, 99]


def test_the_logits_stay_as_they_were():
    logits = rows(2)
    before = logits.clone()
    sample(logits, [choose(temperature=1.0, top_p=0.5), choose(temperature=0.5)])
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 7), []) == ([], [])


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_logprobs_are_those_of_the_unmodified_distribution(wanted):
    logits = rows(1)[0]
    token, answer = one(
        logits, temperature=2.0, top_k=3, logprobs=wanted, logit_bias=((4, 9.0),), bad_words=((1,),)
    )
    reference = torch.log_softmax(logits, -1)
    assert answer.logprob == pytest.approx(float(reference[token]), abs=1e-6)
    assert len(answer.top_ids) == len(answer.top_logprobs) == wanted
    assert list(answer.top_logprobs) == sorted(answer.top_logprobs, reverse=True)


def test_who_did_not_ask_gets_no_logprobs():
    assert one(rows(1)[0])[1] is None
