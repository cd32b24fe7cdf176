"""Steps of a decode runner: drafts of any number and shape change neither tokens nor pages."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from model_cases import one_slice, tiny_model, tokens_of

from pdmesh.decode.config import AUTO
from pdmesh.decode.drafter import MtpDrafter, SequenceRows, due, joined_tree
from pdmesh.decode.runner import DecodeRunner
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.model.batch import Batch
from pdmesh.model.sampler import SamplingState, sample
from pdmesh.model.tree import TokenTree
from pdmesh.wire.messages import StreamRequest
from pdmesh.wire.sampling import SamplingParams

MODEL = tiny_model()
VOCAB = MODEL.config.vocab_size
GUARD = 7.25
"""What pages of nobody hold before and after."""


class Listening:
    """The model, with its last logits kept."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def logits(self, hidden):
        self.heard = self._model.logits(hidden)
        return self.heard


class Scripted:
    """An MTP drafter whose tokens are replaced: ``script(rest, tree, most)`` gives the tree.

    ``rest`` is what the model will say next.
    """

    def __init__(self, inner, script, truth):
        self._inner, self._script, self._truth = inner, script, truth

    def propose(self, sequences, count):
        trees = self._inner.propose(sequences, count)
        made = []
        for s, tree in zip(sequences, trees, strict=True):
            known = next(t for t in self._truth if t[: len(s.tokens)] == list(s.tokens))
            rest = known[len(s.tokens) :]
            made.append(self._script(rest, tree) if len(tree) > 1 and rest else tree)
        return made


def all_right(rest, tree):
    return TokenTree.chain((tree.tokens[0], *rest[: len(tree) - 1]))


def all_wrong(rest, tree):
    wrong = [(t + 1) % VOCAB for t in rest[: len(tree) - 1]]
    return TokenTree.chain((tree.tokens[0], *wrong))


def partly_right(rest, tree):
    """The first drafts right, the others wrong, at another depth each time."""
    drafts = rest[: len(tree) - 1]
    cut = len(rest) % (len(drafts) + 1)
    return TokenTree.chain(
        (tree.tokens[0], *drafts[:cut], *((t + 1) % VOCAB for t in drafts[cut:]))
    )


def right_beside_the_chain(rest, tree):
    """A wrong chain, the right token as the last of its rivals."""
    size = len(tree) - 1
    if size < 2:
        return tree
    wrong = [(t + 1) % VOCAB for t in rest[: size - 1]]
    return joined_tree(tree.tokens[0], wrong, rest[:1])


def right_below_a_rival(rest, tree):
    """Wrong nodes before and between those of the right path, so that latents move by two."""
    size = len(tree) - 1
    if size < 4 or len(rest) < 2:
        return all_right(rest, tree)
    one, two = rest[:2]
    tokens = (tree.tokens[0], (one + 1) % VOCAB, one, (two + 1) % VOCAB, two)
    return TokenTree(tokens, (-1, 0, 0, 2, 2))


class Reserved:
    """A reservation that has all the pages it may want."""

    def __init__(self, pages):
        self._pages = pages

    @property
    def page_table(self):
        return tuple(self._pages)


class Run:
    """Sequences that share a pool, from their prompts to their ends."""

    def __init__(self, prompts, params, page=64, drafts=0, branches=1, drafter=None, **more):
        self.page = page
        self.pages = [[] for _ in prompts]
        longest = max(map(len, prompts)) + params.max_tokens
        self.model = Listening(MODEL)
        total = len(prompts) * -(-longest // page) + 4
        self.latents = MODEL.new_latents(total, page).fill_(GUARD)
        self.free = iter(range(2, total - 1))  # the first and the last pages are nobody's
        self.store = SimpleNamespace(tensor=self.latents)
        if drafter is not None:
            more["drafter"] = drafter(MtpDrafter(MODEL, self.store, page, branches))
        self.look_ahead = more.pop("look_ahead", 4)
        self.runner = DecodeRunner(self.model, self.store, page, drafts, branches=branches, **more)
        self.logits = [[] for _ in prompts]
        self.logprobs = [[] for _ in prompts]
        self.complete = [0] * len(prompts)
        self.steps = []
        self.sequences = [self._prefill(i, p, params) for i, p in enumerate(prompts)]

    def _grow(self, index, count):
        pages = self.pages[index]
        while len(pages) < count:
            pages.append(next(self.free))
            self.latents[pages[-1]] = float("nan")

    def _prefill(self, index, prompt, params):
        self._grow(index, -(-len(prompt) // self.page))
        pages = tuple(self.pages[index])
        batch = Batch.build([one_slice(pages, 0, len(prompt))], [prompt], self.page)
        hidden = MODEL(batch, self.latents, "mha")
        if len(prompt) > 1:
            batch = Batch.build([one_slice(pages, 1, len(prompt))], [prompt[1:]], self.page)
            MODEL.mtp_forward(batch, hidden[:-1], self.latents, "mha")
        state = SamplingState(params, prompt)
        first = sample(MODEL.logits(hidden[-1:]), [state.choice()])[0][0]
        state.advance((first,))
        request = StreamRequest(
            lease_id="l",
            generation=1,
            request_id="r",
            attempt=1,
            token_ids=tuple(prompt),
            first_token=first,
            sampling=params,
        )
        reservation = Reserved(self.pages[index])
        return DecodeSequence(
            entry=SimpleNamespace(reservation=reservation, ended=None),
            request=request,
            tokens=[*prompt, first],
            computed=len(prompt),
            pending=hidden[-1:].clone(),
            sampling=state,
            hashes=[],
        )

    def step(self, indices):
        for i in indices:
            self._grow(i, self.sequences[i].pages_needed(self.page, self.look_ahead))
        steps = self.runner.step([self.sequences[i].rows() for i in indices])
        at = 0
        for i, step in zip(indices, steps, strict=True):
            for node in step.accepted.path:
                self.logits[i].append(self.model.heard[at + node].clone())
            at += len(step.tree)
            chunk, self.complete[i] = self.sequences[i].apply(step, 0.0)
            self.logprobs[i] += chunk.logprobs
        self.steps.append(steps)

    def finish(self):
        while running := [i for i, s in enumerate(self.sequences) if not s.done]:
            self.step(running)
        return self

    @property
    def tokens(self):
        return [s.tokens for s in self.sequences]

    def published(self, index):
        """The latents of the complete pages, in all layers; slot 0 of the MTP layer is nobody's."""
        pages = self.latents[self.pages[index][: self.complete[index] // self.page]].clone()
        pages[:1, -1, 0] = 0.0
        return pages


def same(run, plain):
    """Tokens, logits, log-probabilities and shareable pages are those of the plain run."""
    assert run.tokens == plain.tokens
    assert run.logprobs == plain.logprobs
    for i in range(len(plain.tokens)):
        assert len(run.logits[i]) == len(plain.logits[i])
        for place, (one, other) in enumerate(zip(run.logits[i], plain.logits[i], strict=True)):
            assert torch.equal(one, other), (i, place)
        ours, theirs = run.published(i), plain.published(i)
        shared = min(len(ours), len(theirs))
        assert shared >= len(run.tokens[i][:-8]) // run.page
        assert not ours.isnan().any()
        assert torch.equal(ours[:shared], theirs[:shared])
    nobody = [0, 1, len(run.latents) - 1]
    assert (run.latents[nobody] == GUARD).all()


PROMPTS = {
    16: [tokens_of(length, length, VOCAB) for length in (12, 29, 46, 63)],
    64: [tokens_of(length, length, VOCAB) for length in (12, 61, 126, 63)],
}
"""Lengths modulo 16 of 12 to 15: drafts spill over the page (vllm-project/vllm#16370)."""
PARAMS = SamplingParams(max_tokens=28, logprobs=2)
PLAIN = {page: Run(prompts, PARAMS, page).finish() for page, prompts in PROMPTS.items()}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("drafts", "branches"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (AUTO, 1), (1, 2), (4, 2), (2, 3), (4, 3)],
)
def test_mtp_drafts_change_nothing(drafts, branches, page):
    run = Run(PROMPTS[page], PARAMS, page, drafts, branches).finish()
    same(run, PLAIN[page])


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("script", [all_right, all_wrong, partly_right])
def test_right_and_wrong_drafts_change_nothing(script, drafts, page):
    def drafter(inner):
        return Scripted(inner, script, PLAIN[page].tokens)

    run = Run(PROMPTS[page], PARAMS, page, drafts, drafter=drafter).finish()
    same(run, PLAIN[page])
    accepted = [step.accepted.drafts_accepted for step in itertools.chain(*run.steps)]
    if script is all_right:
        assert len(run.steps) == -(-27 // (1 + drafts))
    elif script is all_wrong:
        assert not any(accepted)
        assert len(run.steps) == 27
    else:
        assert {*range(drafts + 1)} >= set(accepted) > {0}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("script", [right_beside_the_chain, right_below_a_rival])
def test_latents_of_an_accepted_branch_move_to_their_positions(script, page):
    def drafter(inner):
        return Scripted(inner, script, PLAIN[page].tokens)

    run = Run(PROMPTS[page], PARAMS, page, 4, drafter=drafter).finish()
    same(run, PLAIN[page])
    paths = {step.accepted.path for step in itertools.chain(*run.steps)}
    assert ((0, 4) if script is right_beside_the_chain else (0, 2, 4)) in paths


def test_a_sequence_is_the_same_alone_and_among_others():
    for number, prompt in enumerate(PROMPTS[64]):
        run = Run([prompt], PARAMS, 64, 3).finish()
        assert run.tokens[0] == PLAIN[64].tokens[number]
        for one, other in zip(run.logits[0], PLAIN[64].logits[number], strict=True):
            assert torch.equal(one, other)


def test_joining_and_leaving_sequences_change_nothing():
    """Steps over changing subsets, as a batch has them, with pages not complete in between."""
    run = Run(PROMPTS[16], PARAMS, 16, 2)
    for number in range(12):
        run.step([i for i in range(4) if (number + i) % 3])
    same(run.finish(), PLAIN[16])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.5, "min_tokens": 9},
    ],
)
def test_sampled_tokens_with_penalties_are_those_without_drafts(fields):
    params = SamplingParams(max_tokens=28, logprobs=1, stop_token_ids=(3,), **fields)
    plain = Run(PROMPTS[16], params, 16).finish()
    for drafts, branches in ((2, 1), (4, 3)):
        run = Run(PROMPTS[16], params, 16, drafts, branches).finish()
        assert run.tokens == plain.tokens
        assert run.logprobs == plain.logprobs
    truth = [[*t, 3] for t in plain.tokens]

    def drafter(inner):
        return Scripted(inner, all_right, truth)

    run = Run(PROMPTS[16], params, 16, 3, drafter=drafter).finish()
    assert run.tokens == plain.tokens
    assert run.logprobs == plain.logprobs
    assert len(run.steps) < len(plain.steps)


@pytest.mark.parametrize("room", [2, 3, 4, 5])
def test_drafts_never_reach_beyond_max_tokens_nor_the_context(room):
    prompt = tokens_of(1024 - room, 3, VOCAB)
    params = SamplingParams(max_tokens=room)
    plain = Run([prompt], params, 16).finish()
    for branches in (1, 3):
        run = Run([prompt], params, 16, 4, branches).finish()
        assert run.tokens == plain.tokens
        assert len(run.steps[0][0].tree) <= room - 1


def test_with_fewer_pages_a_step_drafts_less():
    prompt = tokens_of(61, 1, VOCAB)
    run = Run([prompt], PARAMS, 64, 4, 3, look_ahead=0)
    run.step([0])
    assert run.steps[0][0].drafted <= 2
    same(run.finish(), Run([prompt], PARAMS, 64).finish())


def test_drafts_that_may_not_be_chosen_are_left_out():
    """A stop token, and words that the request forbids, with all that would follow them."""
    prompt = PROMPTS[64][1]
    free = Run([prompt], PARAMS, 64, 4)
    free.step([0])
    drafts = free.steps[0][0].tree.tokens[1:]
    assert len(set(drafts)) == 4
    for place, token in enumerate(drafts):
        for fields in ({"stop_token_ids": (token,)}, {"bad_words": ((token,),)}):
            run = Run([prompt], SamplingParams(max_tokens=40, **fields), 64, 4)
            run.sequences[0].tokens[-1] = free.sequences[0].tokens[len(prompt)]
            run.step([0])
            assert run.steps[0][0].tree.tokens[1:] == drafts[:place]


def rows(computed, pending, room=10, pages=10):
    state = torch.zeros(pending, 4)
    return SequenceRows([0] * (computed + 1), tuple(range(pages)), computed, None, room, state)


def test_pending_rows_wait_for_a_draft_or_a_full_page():
    assert due(rows(40, 1), 1, 16)
    assert not due(rows(40, 1, room=1), 1, 16), "the last token needs no draft"
    assert not due(rows(40, 1), 0, 16)
    assert not due(rows(46, 15), 0, 16)
    assert due(rows(47, 16), 0, 16)
    assert due(rows(48, 2), 0, 16)
    assert not due(rows(48, 1), 0, 16)
    assert not due(SequenceRows([0] * 48, (), 47, None, 9, None), 2, 16)


def test_without_drafts_the_mtp_layer_runs_once_a_page():
    calls = []

    class Counting(MtpDrafter):
        def _forward(self, slices, tokens, previous):
            calls.append([len(t) for t in tokens])
            return super()._forward(slices, tokens, previous)

    params = SamplingParams(max_tokens=40)
    run = Run([PROMPTS[16][0]], params, 16, 0)
    run.runner._drafter = Counting(MODEL, run.store, 16)
    same(run.finish(), Run([PROMPTS[16][0]], params, 16, 1).finish())
    assert calls == [[4], [16], [16]]


def test_seconds_come_from_the_clock_that_was_handed_in():
    ticks = iter(range(0, 1000, 5))
    run = Run(PROMPTS[16], PARAMS, 16, 1, clock=lambda: next(ticks))
    run.step([0, 1])
    assert [step.model_s for step in run.steps[0]] == [5, 5]


@pytest.mark.parametrize("drafts", [-2, 5])
def test_an_impossible_number_of_drafts_is_refused(drafts):
    with pytest.raises(ValueError, match="draft_tokens"):
        DecodeRunner(MODEL, SimpleNamespace(tensor=None), 16, drafts)
