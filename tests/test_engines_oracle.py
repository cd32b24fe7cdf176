"""The engines against transformers: prefill and decode workers in one process, MTP drafts on.

Weights are random, made by transformers and read by our loader; the MTP layer is our own.
"""

import asyncio
import copy
import random
from collections import Counter

import msgspec
import pytest
import torch
from model_cases import TINY, V2, yarn
from oracles import published, with_random_mtp
from sampling_cases import fits
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from worker_rig import PAGE, rig

from pdmesh.wire.sampling import SamplingParams

TIE = 1e-4
"""Two logits as close as this may change places: float32 sums are ordered differently here and
there, which moves logits of these models by up to 2e-5 (``test_model_oracle``)."""
NEW = 12
SHORT = {"num_hidden_layers": 2, "max_position_embeddings": 256}
CASES = {
    "grouped noaux_tc": {},
    "noaux_tc, no q_lora, yarn": {"q_lora_rank": None, "rope_scaling": yarn(4.0, 32)},
    "V2 softmax groups, yarn": V2
    | {
        "topk_method": "group_limited_greedy",
        "rope_scaling": yarn(4.0, 32, mscale=0.707, mscale_all_dim=0.707),
    },
}
LENGTHS = (1, 17, 50, 64, 70, 97)
"""Some reach over the original length of yarn; drafts are scripted from 64 tokens on."""
COUNTS = {"grouped noaux_tc": 36, "noaux_tc, no q_lora, yarn": 32, "V2 softmax groups, yarn": 32}
assert sum(COUNTS.values()) == 100


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, tmp_path_factory):
    """(name, the model of transformers, the same model here)."""
    fields = TINY | {"num_nextn_predict_layers": 0} | SHORT | CASES[request.param]
    theirs = published(fields)
    ours = with_random_mtp(theirs, tmp_path_factory.mktemp("oracle"))
    return request.param, theirs, ours


@torch.inference_mode()
def generated(theirs, prompts):
    """What ``generate`` of transformers answers, greedily, to prompts of one length."""
    ids = torch.tensor(prompts)
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].tolist()


@torch.inference_mode()
def judged(exact, prompts, answers):
    """Of every token of the answers, in float64: how far its logit is below the best one, and how
    far the second best is.

    ``exact`` is the model in float64; prompts are of one length. Two tensors [answers, NEW].
    """
    logits = exact(torch.tensor([[*p, *a] for p, a in zip(prompts, answers, strict=True)])).logits
    rows = logits[:, len(prompts[0]) - 1 : -1]
    best = rows.topk(2).values
    chosen = rows.gather(-1, torch.tensor(answers)[..., None])[..., 0]
    return best[..., 0] - chosen, best[..., 0] - best[..., 1]


def options_for(ours, **more):
    return {
        "served": ours,
        "drafts": 3,
        "branches": 2,
        "page_size": 16,
        "pages": 600,
        "max_batch": 16,
        "transport": "loopback",
    } | more


def test_greedy_tokens_equal_those_of_generate_but_where_two_logits_tie(pair):
    name, theirs, ours = pair
    chooser = random.Random(name)
    groups = [
        [
            [chooser.randrange(ours.config.vocab_size) for _ in range(length)]
            for _ in range(-(-(COUNTS[name] - i) // len(LENGTHS)))
        ]
        for i, length in enumerate(LENGTHS)
    ]
    prompts = [prompt for group in groups for prompt in group]
    assert len(prompts) == COUNTS[name]
    expected = [generated(theirs, group) for group in groups]
    flat = [answer for group in expected for answer in group]
    truth = {tuple(p[:PAGE]): a for p, a in zip(prompts, flat, strict=True) if len(p) >= PAGE}

    async def serve():
        async with rig(**options_for(ours, truth=truth)) as mesh:
            answers = await asyncio.gather(*(mesh.ask(p, NEW) for p in prompts))
            assert mesh.decode.worker.accepted > 20
            assert mesh.decode.worker.drafted > 2 * mesh.decode.worker.accepted
            return [answer.tokens for answer in answers]

    got = asyncio.run(serve())
    exact = copy.deepcopy(theirs).double()
    exact.set_experts_implementation("eager")
    served = iter(got)
    differing = 0
    for group, wanted in zip(groups, expected, strict=True):
        answers = [next(served) for _ in group]
        below, second = judged(exact, group, answers)
        assert float(below.max()) < TIE, "a token that is neither the best nor tied with it"
        for answer, want, gaps in zip(answers, wanted, second, strict=True):
            assert len(answer) == NEW
            if answer != want:
                differing += 1
                at = next(i for i in range(NEW) if answer[i] != want[i])
                assert float(gaps[at]) < TIE, "another token though the best two do not tie"
    assert differing <= 1, "ties are rare"


# ---- distributions ----------------------------------------------------------------------------


DRAWN = SamplingParams(max_tokens=3, temperature=0.2, top_k=6, top_p=0.85)
ANSWERS, REQUESTS = 16, 50
PROMPT = [7, 100, 23, 5, 64, 81, 3, 17, 90, 45, 11, 120, 66, 2, 31, 8, 77, 50, 29, 12] * 4


@torch.inference_mode()
def shares(theirs, params, prompt):
    """Probability by whole answer of ``params.max_tokens`` tokens, shaped by transformers."""
    shapers = [
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k),
        TopPLogitsWarper(params.top_p),
    ]
    found = {(): 1.0}
    for _ in range(params.max_tokens):
        begun = list(found)
        ids = torch.tensor([[*prompt, *answer] for answer in begun])
        scores = theirs(ids).logits[:, -1]
        for shape in shapers:
            scores = shape(ids, scores)
        rows = scores.softmax(-1).tolist()
        found = {
            (*answer, token): found[answer] * share
            for answer, row in zip(begun, rows, strict=True)
            for token, share in enumerate(row)
            if share
        }
    return found


async def draws(mesh, number):
    """The answers of one request, as the router asks for them."""
    params = msgspec.structs.replace(DRAWN, seed=number)
    lease = await mesh.reserve(PROMPT, DRAWN.max_tokens, n=ANSWERS, wait_ms=60_000)
    first = await mesh.compute(PROMPT, lease, params, n=ANSWERS)

    async def rest(answer):
        chunks = await mesh.read(PROMPT, lease, first, params, answer=answer)
        await mesh.release(lease, answer=answer)
        return (first.token_ids[answer], *(t for c in chunks for t in c.token_ids))

    return await asyncio.gather(*(rest(answer) for answer in range(ANSWERS)))


def test_sampled_answers_follow_the_distribution_of_transformers(pair):
    """The first token comes from prefill, the others from decode, some of them as drafts."""
    _, theirs, ours = pair
    expected = shares(theirs, DRAWN, PROMPT)
    likely = max(expected, key=expected.get)

    async def serve():
        options = options_for(ours, truth={tuple(PROMPT[:PAGE]): list(likely)})
        async with rig(**options) as mesh:
            counts = Counter()
            for number in range(0, REQUESTS, 5):
                several = (draws(mesh, number + i) for i in range(5))
                for answers in await asyncio.gather(*several):
                    counts.update(answers)
            assert mesh.decode.worker.accepted > REQUESTS
            return counts

    counts = asyncio.run(serve())
    assert counts.total() == ANSWERS * REQUESTS
    assert fits(counts, expected)
    for length in (1, 2):
        assert fits(beginnings(counts, length), beginnings(expected, length))
    flatter = shares(theirs, FLATTER, PROMPT)
    assert not fits(beginnings(counts, 2), beginnings(flatter, 2)), "the measure tells them apart"


FLATTER = SamplingParams(max_tokens=3, temperature=0.5, top_k=6, top_p=0.85)


def beginnings(found, length):
    """Sums over answers that begin alike."""
    sums = Counter()
    for answer, value in found.items():
        sums[answer[:length]] += value
    return sums
