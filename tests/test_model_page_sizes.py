"""Hidden states, logits and latents are bitwise the same for every page size."""

import random

import pytest
import torch
from model_cases import equal, one_slice, run, same_latents, stale_pool, tokens_of, various_models

from pdmesh.model.batch import Batch
from pdmesh.model.reference import generate_reference

FORMS = ("mha", "absorbed")
MODELS = various_models()


def paged(model, page_size, form, whole, cuts, mtp):
    """Hidden states of chunks, MTP ones too, and the sequence's latents, over shuffled pages."""
    count = -(-len(whole) // page_size)
    pages = list(range(count))
    random.Random(page_size).shuffle(pages)
    pool = stale_pool(model, count, page_size)
    bounds = [0, *cuts, len(whole)]
    hidden: list[torch.Tensor] = []
    guesses = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        hidden += run(model, pool, form, (one_slice(tuple(pages), start, end), whole))
        if mtp:
            first = max(start, 1)
            batch = Batch.build(
                [one_slice(tuple(pages), first, end)], [whole[first:end]], page_size
            )
            previous = torch.cat(hidden)[first - 1 : end - 1]
            guesses.append(model.mtp_forward(batch, previous, pool, form))
    latents = pool[pages].transpose(1, 2).flatten(0, 1)[: len(whole)]
    return torch.cat(hidden), torch.cat(guesses) if mtp else hidden[0][:1], latents


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_depends_on_the_page_size(name, form):
    model = MODELS[name]
    whole = tokens_of(170, 12)
    mtp = model.mtp is not None
    expected = paged(model, 64, form, whole, [], mtp)
    for page_size in (8, 16, 32, 128):
        for cuts in ([], [16, 100, 168], [2, 64, 65]):
            got = paged(model, page_size, form, whole, cuts, mtp)
            assert equal(got[0], expected[0]), (page_size, cuts)
            assert equal(got[1], expected[1]), (page_size, cuts)
            assert same_latents(got[2], expected[2])
    # A prefix hit leaves page boundaries elsewhere: only the rest is computed, on a page of 16.
    pool = stale_pool(model, 12, 16)
    cold = run(model, pool, form, (one_slice(tuple(range(11)), 0, 170), whole))[0]
    hit = run(model, pool, form, (one_slice((*range(9), 11, 10), 144, 170), whole))[0]
    assert equal(cold, expected[0])
    assert equal(hit, expected[0][144:])


def test_answers_and_logits_are_the_same_for_every_page_size():
    model, prompt = MODELS["four heads"], tokens_of(61, 3)

    def answer(page_size, mtp):
        seen = []
        tokens = generate_reference(
            model, prompt, 12, mtp=mtp, on_logits=seen.append, page_size=page_size
        )
        return tokens, torch.cat(seen)

    tokens, logits = answer(64, False)
    assert logits.argmax(-1).tolist() == tokens
    for page_size in (1, 8, 16, 128):
        for mtp in (False, True):
            got = answer(page_size, mtp)
            assert got[0] == tokens
            assert equal(got[1], logits), (page_size, mtp)
