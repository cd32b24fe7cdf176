"""The decisions of a decode worker: what a step yields, and who runs next."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.decode.scheduler import DecodeScheduler
from pdmesh.decode.speculate import accept

EOS = 1


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
    result = accept([7, 9], [8], 10, frozenset({EOS}))
    assert (result.tokens, result.rows, result.drafts_accepted) == ((7,), 1, 0)


def test_a_right_draft_gives_two_tokens():
    result = accept([8, 9], [8], 10, frozenset({EOS}))
    assert (result.tokens, result.rows, result.drafts_accepted) == ((8, 9), 2, 1)


def test_nothing_follows_a_stop_token_inside_an_accepted_run():
    result = accept([EOS, 9], [EOS], 10, frozenset({EOS}))
    assert (result.tokens, result.finish, result.stop_token) == ((), "stop", EOS)
    result = accept([8, EOS], [8], 10, frozenset({EOS}))
    assert (result.tokens, result.finish, result.stop_token) == ((8,), "stop", EOS)


def test_the_output_limit_holds_inside_an_accepted_run():
    result = accept([8, 9], [8], 1, frozenset({EOS}))
    assert (result.tokens, result.finish) == ((8,), "length")


@given(
    target=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    guesses=st.lists(st.integers(0, 5), min_size=80, max_size=80),
    drafts_a_step=st.integers(0, 4),
    room=st.integers(1, 40),
)
def test_speculation_never_changes_the_output(target, guesses, drafts_a_step, room):
    """Drives ``accept`` with a scripted target and random drafts of any length."""
    expected, finish = unspeculated(target, room)
    supply = iter(itertools.cycle(guesses))
    out, ended = [], None
    while ended is None and len(out) < len(target):
        drafts = [next(supply) for _ in range(min(drafts_a_step, len(target) - len(out) - 1))]
        chosen = target[len(out) : len(out) + 1 + len(drafts)]
        # After a wrong draft the target's further choices are about another text: make them junk.
        for i, draft in enumerate(drafts):
            if draft != chosen[i]:
                chosen[i + 1 :] = [99] * (len(chosen) - i - 1)
                break
        result = accept(chosen, drafts, room - len(out), frozenset({EOS}))
        assert result.rows >= 1
        out += result.tokens
        ended = result.finish
    assert (out, ended) == (expected, finish)


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
