"""A model that costs nothing and cannot be deceived: arithmetic on 64-bit words instead of tensors.

The latents of a position are a function of its token and of the latents before it as they are read
from the pages; the next token is a function of every latent up to there, again as read. So a page
that is missing, stale, torn or another's changes the tokens. ``Oracle`` says the same from tokens
alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdmesh.decode.drafter import SequenceRows, due
from pdmesh.decode.runner import StepRows
from pdmesh.decode.speculate import accept
from pdmesh.model.choice import Choice
from pdmesh.model.tree import TokenTree
from pdmesh.prefill.runner import ChunkResult, PromptRows
from pdmesh.simulation.loop import in_pieces
from pdmesh.simulation.memory import GuardedStore
from pdmesh.wire.hashes import Arithmetic, PageFormat
from pdmesh.wire.sampling import SamplingParams

Words = npt.NDArray[np.uint64]

VOCAB = 1000
EOS = 0
PAGE_SIZE = 16
WIDTH = 4
"""float32 values of a latent, and of a hidden state: two words."""
MAIN_LAYERS = 2
MAX_CONTEXT = 512
_MASK = (1 << 64) - 1
_ROOT = 0x5DEECE66D
_EOS_IN = 40
"""One token in so many ends the text."""


def sim_format(mtp: bool, arithmetic: Arithmetic = "exact") -> PageFormat:
    """The page format of the simulated model."""
    return PageFormat(
        model="sim",
        weights="sim",
        dtype="float32",
        page_size=PAGE_SIZE,
        num_layers=MAIN_LAYERS + mtp,
        mtp_layers=int(mtp),
        latent_width=WIDTH,
        arithmetic=arithmetic,
    )


def mix(one: int, two: int) -> int:
    """A word that depends on every bit of both (the finaliser of SplitMix64)."""
    x = (one * 0x9E3779B97F4A7C15 + two + 0x7F4A7C15F39CC060) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_all(words: Words, salt: int) -> Words:
    x = words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * 0xD1342543DE82EF95 & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_one(word: int, salt: int) -> int:
    """``_mix_all`` of one word."""
    x = (word * 0x9E3779B97F4A7C15 + salt * 0xD1342543DE82EF95) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_PLACES: Words = _mix_all(np.arange(MAX_CONTEXT * MAIN_LAYERS * 2, dtype=np.uint64), 77).reshape(
    MAX_CONTEXT, MAIN_LAYERS, 2
) | np.uint64(1)


_PLACE_INTS: list[list[int]] = _PLACES.reshape(MAX_CONTEXT, -1).tolist()


def latents_of(chain: Words) -> Words:
    """[n, MAIN_LAYERS, 2] from the first word [n] of each position."""
    rest = [_mix_all(chain, salt) for salt in range(1, 2 * MAIN_LAYERS)]
    return np.stack([chain, *rest], axis=1).reshape(-1, MAIN_LAYERS, 2)


def latents_of_one(word: int) -> list[int]:
    """The 2 * MAIN_LAYERS words of one position."""
    return [word, *(_mix_one(word, salt) for salt in range(1, 2 * MAIN_LAYERS))]


def digests(latents: Words) -> Words:
    """[n]: of each position, everything up to it, from latents [n, MAIN_LAYERS, 2]."""
    places = _PLACES[: len(latents)]
    total: Words = np.cumsum((latents * places).sum(axis=(1, 2), dtype=np.uint64), dtype=np.uint64)
    return total


def grow_chain(before: int, tokens: Sequence[int]) -> list[int]:
    """The first words of positions that hold ``tokens`` and follow one whose word is ``before``."""
    words = []
    for token in tokens:
        before = mix(before, token)
        words.append(before)
    return words


def next_token(digest: int, choice: Choice) -> int:
    """What follows a position."""
    return pick(digest, choice.params, choice.position, choice.index, EOS not in choice.forbidden)


def pick(digest: int, params: SamplingParams, position: int, index: int, may_end: bool) -> int:
    """The token at an output position of one of a request's answers."""
    if params.temperature > 0:
        digest = mix(digest, mix(params.seed, position * 64 + index))
    word = mix(digest, 1)
    if may_end and (word >> 40) % _EOS_IN == 0:
        return EOS
    return 1 + word % (VOCAB - 1)


class Pages:
    """The words of a store [pages, layers, PAGE_SIZE, 2], seen along a page table."""

    def __init__(self, store: GuardedStore) -> None:
        self._words: Words = store.tensor.numpy().view(np.uint64)
        self.touch = store.touch
        self.mtp = self._words.shape[1] > MAIN_LAYERS

    def read(self, table: Sequence[int], end: int) -> Words:
        """Main latents [end, MAIN_LAYERS, 2] of the first positions."""
        pages = self._words[list(table[: -(-end // PAGE_SIZE)]), :MAIN_LAYERS]
        return pages.transpose(0, 2, 1, 3).reshape(-1, MAIN_LAYERS, 2)[:end]

    def word(self, table: Sequence[int], position: int) -> int:
        """The first word of a position; of what stands before the first one, a constant."""
        if position < 0:
            return _ROOT
        return int(self._words[table[position // PAGE_SIZE], 0, position % PAGE_SIZE, 0])

    def write(self, table: Sequence[int], layer: int, start: int, words: Words) -> None:
        """Latents [n, 2] of one layer from position ``start`` on."""
        for i, pair in enumerate(words):
            position = start + i
            self._words[table[position // PAGE_SIZE], layer, position % PAGE_SIZE] = pair

    def write_one(self, table: Sequence[int], position: int, words: list[int]) -> None:
        """The main latents of one position."""
        place = self._words[table[position // PAGE_SIZE], :MAIN_LAYERS, position % PAGE_SIZE]
        place[:] = np.array(words, np.uint64).reshape(MAIN_LAYERS, 2)

    def digest(self, table: Sequence[int], end: int) -> int:
        """That of position ``end - 1``."""
        latents = self.read(table, end)
        return int((latents * _PLACES[:end]).sum(dtype=np.uint64))

    def write_mtp(
        self, table: Sequence[int], start: int, hidden: Words, tokens: Sequence[int]
    ) -> None:
        """MTP latents from slot ``start`` on: of ``hidden`` [n, 2] before, and the slot's token."""
        pairs = [
            [mix(int(one), token), mix(int(two), token)]
            for (one, two), token in zip(hidden, tokens, strict=True)
        ]
        if pairs:
            self.write(table, MAIN_LAYERS, start, np.array(pairs, np.uint64))

    def bytes_of(self, page: int, first: bool) -> bytes:
        """All that must be equal in pages of one hash; slot 0 of a sequence has no MTP latent."""
        words = self._words[page]
        if not first or not self.mtp:
            return bytes(words.tobytes())
        return bytes(words[:MAIN_LAYERS].tobytes() + words[MAIN_LAYERS, 1:].tobytes())


def hidden_of(found: Words) -> Words:
    """Hidden states [n, 2] of positions with these digests [n]."""
    return np.stack([_mix_all(found, 11), _mix_all(found, 12)], axis=1)


def as_tensor(hidden: Words) -> torch.Tensor:
    """[n, WIDTH] float32, bit for bit."""
    return torch.from_numpy(np.ascontiguousarray(hidden).view(np.float32).copy())


def as_words(hidden: torch.Tensor) -> Words:
    """[n, 2] of [n, WIDTH] float32."""
    words: Words = np.ascontiguousarray(hidden.numpy()).view(np.uint64)
    return words


class SimPrefillRunner:
    """Has the interface of ``prefill.runner.PrefillRunner``."""

    def __init__(self, store: GuardedStore) -> None:
        self._pages = Pages(store)

    @in_pieces
    def step(self, prompts: Sequence[PromptRows]) -> Generator[None, None, list[ChunkResult]]:
        pages = self._pages
        fresh = [self._latents(p) for p in prompts]
        for layer in range(MAIN_LAYERS):
            yield
            for p, latents in zip(prompts, fresh, strict=True):
                pages.touch(p.page_table[: -(-p.end // PAGE_SIZE)], "a prefill step")
                skip = max(0, p.write_from - p.start)
                pages.write(p.page_table, layer, p.start + skip, latents[skip:, layer])
                p.push(layer)
        found = [digests(pages.read(p.page_table, p.end)) for p in prompts]
        if pages.mtp:
            for p, digest in zip(prompts, found, strict=True):
                self._fill_mtp(p, digest)
                p.push(MAIN_LAYERS)
        return [self._result(p, digest) for p, digest in zip(prompts, found, strict=True)]

    def _latents(self, p: PromptRows) -> Words:
        before = self._pages.word(p.page_table, p.start - 1)
        return latents_of(np.array(grow_chain(before, p.tokens[p.start : p.end]), np.uint64))

    def _fill_mtp(self, p: PromptRows, digest: Words) -> None:
        start = max(1, p.write_from, p.start + (p.carry is None))
        if start >= p.end:
            return
        hidden = hidden_of(digest[start - 1 : p.end - 1])
        if start == p.start:
            assert p.carry is not None
            hidden[0] = as_words(p.carry.unsqueeze(0))[0]
        self._pages.write_mtp(p.page_table, start, hidden, p.tokens[start : p.end])

    def _result(self, p: PromptRows, digest: Words) -> ChunkResult:
        carry = as_tensor(hidden_of(digest[-1:]))[0]
        if not p.last:
            return ChunkResult(carry)
        last = int(digest[-1])
        return ChunkResult(carry, tuple(next_token(last, choice) for choice in p.choices()))


class SimDecodeRunner:
    """Has the interface of ``decode.runner.DecodeRunner``; ``right`` of ten drafts are right."""

    def __init__(self, store: GuardedStore, draft_tokens: int, right: int = 7) -> None:
        self._pages = Pages(store)
        self._draft_tokens = draft_tokens
        self._right = right

    @in_pieces
    def step(self, sequences: Sequence[SequenceRows]) -> Generator[None, None, list[StepRows]]:
        steps = []
        for s in sequences:
            yield
            steps.append(self._one(s))
        yield
        return steps

    def _one(self, s: SequenceRows) -> StepRows:
        pages, table, count = self._pages, s.page_table, self._draft_tokens
        pages.touch(table[: s.computed // PAGE_SIZE + 1], "a decode step")
        most = 0 if s.pending is None else s.most_drafts(PAGE_SIZE)
        filled = due(s, count, PAGE_SIZE)
        if filled:
            assert s.pending is not None
            hidden = as_words(s.pending)
            start = s.computed + 1 - len(hidden)
            pages.write_mtp(table, start, hidden, s.tokens[start : s.computed + 1])
        nodes, chosen, found = [s.tokens[s.computed]], [], []
        while True:
            position = s.computed + len(nodes) - 1
            word = grow_chain(pages.word(table, position - 1), nodes[-1:])
            pages.write_one(table, position, latents_of_one(word[0]))
            digest = pages.digest(table, position + 1)
            found.append(digest)
            token = next_token(digest, s.sampling.choice(nodes[1:]))
            chosen.append(token)
            if len(nodes) > min(count, most):
                break
            guess = token if mix(digest, 5) % 10 < self._right else 1 + token % (VOCAB - 1)
            nodes.append(guess)
            if pages.mtp:  # what a guess leaves behind is no true latent
                place = s.computed + len(nodes) - 1
                pages.write_mtp(table, place, np.array([[digest, 7]], np.uint64), [guess])
        tree = TokenTree.chain(nodes)
        accepted = accept(tree, chosen, s.room, s.sampling.stop_tokens)
        kept = len(accepted.path)
        rows = as_tensor(hidden_of(np.array(found[:kept], np.uint64)))
        return StepRows(tree, accepted, [None] * kept, rows, filled, 0.001)


@dataclass(frozen=True)
class Expected:
    """What an answer has to be."""

    tokens: tuple[int, ...]
    finish: str


class Oracle:
    """The answer to a prompt, from tokens alone."""

    def answer(self, prompt: Sequence[int], params: SamplingParams, index: int) -> Expected:
        """The whole answer number ``index``."""
        chain = grow_chain(_ROOT, prompt)
        total = int(digests(latents_of(np.array(chain, np.uint64)))[-1])
        word = chain[-1]
        tokens: list[int] = []
        while True:
            position = len(tokens)
            may_end = params.ignore_eos or position >= params.min_tokens
            token = pick(total, params, position, index, may_end)
            if token == EOS and not params.ignore_eos:
                return Expected(tuple(tokens), "stop")
            tokens.append(token)
            if len(tokens) == params.max_tokens:
                return Expected(tuple(tokens), "length")
            place = len(prompt) + position
            word = mix(word, token)
            weights = zip(latents_of_one(word), _PLACE_INTS[place], strict=True)
            total = (total + sum(one * weight for one, weight in weights)) & _MASK
