"""The decisions of a decode worker: what a step yields, and who runs next."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.decode.runner import StepRows
from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.decode.speculate import accept, judged
from pdmesh.model.sampler import SamplingState
from pdmesh.model.tree import TokenTree
from pdmesh.router.stream import GatewayStream, Limits
from pdmesh.text.output import OutputText
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.messages import StreamRequest, TokenChunk
from pdmesh.wire.sampling import SamplingParams

EOS = 1
TOKENIZER = load_tokenizer(Path(__file__).resolve().parent.parent / "model" / "tiny")


def chain(*drafts):
    return TokenTree.chain((5, *drafts))


def unspeculated(target, room):
    """The output of plain decoding when the target model would say ``target`` for ever."""
    out = []
    for token in target:
        if token == EOS:
            return out, "stop"
        out.append(token)
        if len(out) == room:
            return out, "length"
    return out, None


def test_a_wrong_draft_gives_the_targets_token_and_nothing_after_it():
    result = accept(chain(8), [7, 9], 10, frozenset({EOS}))
    assert (result.tokens, result.path, result.drafts_accepted) == ((7,), (0,), 0)


def test_a_right_draft_gives_two_tokens():
    result = accept(chain(8), [8, 9], 10, frozenset({EOS}))
    assert (result.tokens, result.path, result.drafts_accepted) == ((8, 9), (0, 1), 1)


def test_a_step_without_drafts_gives_one_token():
    result = accept(chain(), [7], 10, frozenset({EOS}))
    assert (result.tokens, result.path, result.finish) == ((7,), (0,), None)


def test_nothing_follows_a_stop_token_inside_an_accepted_run():
    result = accept(chain(EOS), [EOS, 9], 10, frozenset({EOS}))
    assert (result.tokens, result.finish, result.stop_token) == ((), "stop", EOS)
    result = accept(chain(8), [8, EOS], 10, frozenset({EOS}))
    assert (result.tokens, result.finish, result.stop_token) == ((8,), "stop", EOS)


def test_the_output_limit_holds_inside_an_accepted_run():
    result = accept(chain(8), [8, 9], 1, frozenset({EOS}))
    assert (result.tokens, result.path, result.finish) == ((8,), (0,), "length")


def test_the_branch_that_the_model_chose_is_the_path():
    """Two guesses for the next token, the second of them right, with a right draft below it."""
    tree = TokenTree((5, 8, 9, 7, 6), (-1, 0, 1, 0, 3))
    result = accept(tree, [7, 0, 0, 6, 4], 10, frozenset({EOS}))
    assert (result.tokens, result.path, result.drafts_accepted) == ((7, 6, 4), (0, 3, 4), 2)


def test_only_depths_that_were_put_to_the_test_are_judged():
    tree = chain(8, 9, 7)
    stops = frozenset({EOS})
    for chosen, tried, right in (
        ([0, 0, 0, 0], 1, 0),
        ([8, 0, 0, 0], 2, 1),
        ([8, 9, 7, 0], 3, 3),
        ([8, EOS, 0, 0], 1, 1),  # whether 9 was a good guess nobody knows
    ):
        assert judged(tree, accept(tree, chosen, 10, stops)) == (tried, right)
    branches = TokenTree((5, 8, 9, 7), (-1, 0, 1, 0))
    assert judged(branches, accept(branches, [7, 0, 0, 4], 10, stops)) == (1, 1)


@st.composite
def trees(draw, root):
    size = draw(st.integers(1, 6))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, size)))
    tokens = (root, *(draw(st.integers(0, 5)) for _ in range(1, size)))
    return TokenTree(tokens, parents)


def scripted(tree, rest):
    """The target's choice after each node if it says ``rest``; junk after a wrong draft."""
    chosen = []
    for node in range(len(tree)):
        said = [tree.tokens[i] for i in tree.path(node)[1:]]
        right = rest[: len(said)] == said and len(said) < len(rest)
        chosen.append(rest[len(said)] if right else 99)
    return chosen


@given(data=st.data(), target=st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_speculation_never_changes_the_output(data, target):
    """Drives ``accept`` with a scripted target and random trees of drafts."""
    room = data.draw(st.integers(1, 40))
    expected, finish = unspeculated(target, room)
    out, ended = [], None
    while ended is None and len(out) < len(target):
        rest = target[len(out) :]
        tree = data.draw(trees(9))
        result = accept(tree, scripted(tree, rest), room - len(out), frozenset({EOS}))
        tokens = result.tokens[: len(rest)]  # beyond its end the script says junk
        assert result.path[0] == 0
        assert list(result.path) == sorted(set(result.path))
        out += tokens
        ended = result.finish if tokens == result.tokens else None
    assert (out, ended) == (expected, finish)


# ---- the end of an answer inside an accepted block (huggingface/transformers#47912) ---------

WORDS = TOKENIZER.encode("one two three four five six seven eight nine ten")
BLOCKS = [(k, at) for k in (2, 3, 4) for at in range(k + 1)]
"""Draft lengths, and each place in the block of an accepted step."""
PAGE = 2


def new_sequence(params, first, eos=()):
    prompt = (3, 4, 5)
    return DecodeSequence(
        entry=SimpleNamespace(ended=None),
        request=StreamRequest(
            lease_id="l",
            generation=1,
            request_id="r",
            attempt=1,
            token_ids=prompt,
            first_token=first,
            sampling=params,
        ),
        tokens=[*prompt, first],
        computed=len(prompt),
        pending=torch.zeros(1, 4),
        sampling=SamplingState(params, prompt, eos=eos, output=(first,)),
        hashes=[],
    )


def answer(target, drafts, params, eos=()):
    """What the client gets of a target that says ``target``, all drafts right, and the sequence.

    (text, tokens, finish), the sequence, its chunks
    """
    sequence = new_sequence(params, target[0], eos)
    ends = frozenset({*eos, *params.stop_token_ids})
    limits = Limits(params.max_tokens, ends, TOKENIZER.vocab_size)
    gate = GatewayStream(OutputText(TOKENIZER, params.stop), limits)
    gate.begin_attempt()
    first = TokenChunk(attempt=1, position=0, token_ids=tuple(target[:1]))
    text, chunks, published = gate.take(first).text, [], []
    while gate.finish is None and not sequence.done:
        rest = target[sequence.generated :]
        tree = TokenTree.chain((sequence.tokens[-1], *rest[:drafts]))
        accepted = accept(tree, scripted(tree, rest), sequence.room, sequence.sampling.stop_tokens)
        rows = torch.zeros(len(accepted.path), 4)
        step = StepRows(tree, accepted, [None] * len(accepted.path), rows, True)
        chunk, complete = sequence.apply(step, 1.0)
        first_page, hashes = sequence.extend_hashes(b"k" * 32, b"r" * 32, PAGE, complete)
        assert first_page == len(published)
        published += hashes
        text += gate.take(chunk).text
        chunks.append(chunk)
    return (text + gate.tail(), gate.tokens, gate.finish), sequence, chunks


def same_as_without_speculation(drafts, target, params, eos=()):
    plain, alone, _ = answer(target, 0, params, eos)
    fast, sequence, chunks = answer(target, drafts, params, eos)
    assert fast == plain
    assert max(len(chunk.token_ids) for chunk in chunks) >= min(2, len(plain[1]) - 1)
    return sequence, alone


def nothing_after_the_end_is_kept(sequence, alone):
    """Tokens, usage and what may be shared as a prefix end where they do without speculation."""
    assert sequence.tokens == alone.tokens
    assert sequence.generated == alone.generated
    assert sequence.hashes == alone.hashes[: len(sequence.hashes)]


@pytest.mark.parametrize(("drafts", "at"), BLOCKS)
def test_end_of_text_at_any_place_of_an_accepted_block_ends_the_answer_there(drafts, at):
    target = [*WORDS[: 1 + at], EOS, *WORDS[1 + at :]]
    pair = same_as_without_speculation(drafts, target, SamplingParams(max_tokens=30), (EOS,))
    nothing_after_the_end_is_kept(*pair)
    assert pair[0].tokens[3:] == WORDS[: 1 + at]


@pytest.mark.parametrize(("drafts", "at"), BLOCKS)
def test_a_stop_token_at_any_place_of_an_accepted_block_ends_the_answer_there(drafts, at):
    params = SamplingParams(max_tokens=30, stop_token_ids=(WORDS[1 + at],))
    pair = same_as_without_speculation(drafts, WORDS, params)
    nothing_after_the_end_is_kept(*pair)
    assert pair[0].tokens[3:] == WORDS[: 1 + at]


@pytest.mark.parametrize(("drafts", "at"), BLOCKS)
def test_max_tokens_at_any_place_of_an_accepted_block_ends_the_answer_there(drafts, at):
    params = SamplingParams(max_tokens=2 + at)
    pair = same_as_without_speculation(drafts, WORDS, params)
    nothing_after_the_end_is_kept(*pair)
    assert pair[0].generated == 2 + at


@pytest.mark.parametrize(("drafts", "at"), BLOCKS)
def test_the_end_of_a_stop_string_at_any_place_of_an_accepted_block_ends_the_answer(drafts, at):
    """The router finds it: what the worker said beyond it is neither shown nor counted."""
    last = TOKENIZER.decode(WORDS[: 2 + at])[len(TOKENIZER.decode(WORDS[:at])) :]
    params = SamplingParams(max_tokens=30, stop=(last,))
    same_as_without_speculation(drafts, WORDS, params)


class EndsAfter(SamplingState):
    """As a grammar does that is complete after some tokens of the answer."""

    limit = 0

    @property
    def ended(self):
        return self.position >= self.limit


@pytest.mark.parametrize(("drafts", "at"), BLOCKS)
def test_a_grammar_that_ends_inside_an_accepted_block_ends_the_answer_there(drafts, at):
    sequence = new_sequence(SamplingParams(max_tokens=30), WORDS[0])
    sequence.sampling.__class__ = EndsAfter
    sequence.sampling.limit = 2 + at
    tree = TokenTree.chain(WORDS[: 1 + drafts])
    accepted = accept(tree, scripted(tree, WORDS[1:]), sequence.room, frozenset())
    step = StepRows(tree, accepted, [None] * (1 + drafts), torch.zeros(1 + drafts, 4), True)
    chunk, complete = sequence.apply(step, 1.0)
    assert chunk.token_ids == tuple(WORDS[1 : 2 + at])
    assert (chunk.finish, chunk.stop_token, sequence.done) == ("stop", None, True)
    assert chunk.accepted == at
    assert complete <= sequence.computed == len(sequence.tokens) - 1


def test_pages_count_as_complete_once_their_mtp_rows_come_from_true_hidden_states():
    """Positions of accepted drafts wait for the next step; without drafting they wait longer."""
    sequence = new_sequence(SamplingParams(max_tokens=30), WORDS[0])
    completes, pending = [], []
    for drafts, filled in ((2, True), (0, False), (0, False), (1, True)):
        rest = WORDS[sequence.generated :]
        tree = TokenTree.chain((sequence.tokens[-1], *rest[:drafts]))
        accepted = accept(tree, scripted(tree, rest), sequence.room, frozenset())
        rows = torch.arange(float(len(accepted.path)))[:, None] + sequence.computed
        step = StepRows(tree, accepted, [None] * len(accepted.path), rows, filled)
        completes.append(sequence.apply(step, 1.0)[1])
        pending.append(sequence.pending[:, 0].tolist())
    assert completes == [4, 4, 4, 9]
    assert pending == [[3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7], [8, 9]]


# ---- the batch ------------------------------------------------------------------------------


def test_sequences_join_between_steps_first_come_first_served():
    s = DecodeScheduler(2)
    for name in "abc":
        s.add(name)
    assert s.next_batch() == ["a", "b"]
    assert (s.waiting, s.running) == (1, 2)
    s.remove("a")
    assert s.next_batch() == ["b", "c"]
    s.remove("a")
    s.remove("b")
    s.remove("c")
    assert s.next_batch() == []
