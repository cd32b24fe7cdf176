"""Every pair of features in one request, and all nine: the answer is what one process computes.

Real processes in exact mode. A pair counts only where both features are seen to have happened.
``PDMESH_WRITE_DOCS=1`` writes what was tested to docs/features.md; without it the file is compared.
Without MTP a few pairs are the sample of ``make test``.
"""

import asyncio
import functools
import itertools
import os
import random
import re

import meshes
import pytest
import torch

from pdmesh.launch.topology import shipped_model
from pdmesh.model.grammar import Grammars
from pdmesh.model.reference import generate_reference
from pdmesh.model.weights import load_model
from pdmesh.text.grammar import regex_grammar
from pdmesh.text.output import OutputText
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire import chat_pb2
from pdmesh.wire.sampling import SamplingParams

FEATURES = (
    "chunked prefill",
    "prefix hit",
    "MTP",
    "n > 1",
    "structured output",
    "logprobs",
    "penalties",
    "stop strings",
    "preemption",
)
PAIRS = tuple(itertools.combinations(FEATURES, 2))
CASES = (*PAIRS, FEATURES)
SAMPLE = {
    ("chunked prefill", "prefix hit"),
    ("chunked prefill", "preemption"),
    ("n > 1", "preemption"),
    ("structured output", "preemption"),
    ("prefix hit", "logprobs"),
    ("penalties", "stop strings"),
}
"""Pairs that run without MTP in every run."""
RUNS = [
    *(("MTP", case) for case in CASES),
    *(("no MTP", case) for case in CASES if "MTP" not in case),
]
PAGE, CHUNK, TOKENS = 16, 32, 32
CROWD, GROWTH = 8, 4
PATTERN = "([a-z]{2,7} ){4,8}end"
DOCS = meshes.ROOT / "docs" / "features.md"
TOPOLOGY = f"""
[model]
arithmetic = "exact"
page_size = {PAGE}
mtp = MTP
[prefill]
pages = 128
chunk_tokens = {CHUNK}
[decode]
workers = 1
pages = {3 * CROWD}
growth_tokens = {GROWTH}
draft_tokens = DRAFTS
"""
passed: set[tuple[str, tuple[str, ...]]] = set()
"""Those of ``RUNS`` that were right."""


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(shipped_model(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(shipped_model())


@pytest.fixture(scope="module", params=["MTP", "no MTP"])
def mesh(request):
    with_mtp = request.param == "MTP"
    topology = TOPOLOGY.replace("MTP", str(with_mtp).lower()).replace(
        "DRAFTS", "3" if with_mtp else "0"
    )
    with meshes.running_mesh(topology=topology) as running:
        running.workers, running.mtp = 2, with_mtp
        yield running


def prompt_for(features, number):
    """Longer than two chunks for chunked prefill, within one chunk otherwise."""
    rng = random.Random(number)
    length = 70 + number % 11 if "chunked prefill" in features else 25 + number % 6
    base = [rng.randrange(20, 4096) for _ in range(9)]
    return [base[i % 9] for i in range(length)]


def sampling_for(features, number):
    fields = {"max_tokens": TOKENS, "temperature": 0.8, "top_p": 0.95, "seed": number}
    if "logprobs" in features:
        fields["logprobs"] = 3
    if "penalties" in features:
        fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    if "structured output" not in features:
        fields["ignore_eos"] = True
    else:
        fields["grammar"] = regex_grammar(PATTERN)
    return fields


class Expected:
    """Answer ``index`` of a request, computed by one process; ``stop_at`` cuts it."""

    def __init__(self, model, tokenizer, prompt, fields, index):
        grammar = fields.get("grammar", "")
        eos = () if fields.get("ignore_eos") else tokenizer.ids.eos
        matcher = Grammars(shipped_model(), 4096).compile(grammar) if grammar else None
        self.tokenizer = tokenizer
        self.logprobs = []
        tokens = generate_reference(
            model,
            prompt,
            TOKENS,
            eos,
            arithmetic="exact",
            sampling=SamplingParams(**fields),
            index=index,
            grammar=matcher,
            on_logits=lambda row: self.logprobs.append(torch.log_softmax(row[0], dim=-1)),
        )
        ended = tokens[-1] in eos or len(tokens) < TOKENS
        self.finish = "stop" if ended else "length"
        self.tokens = [t for t in tokens if t not in eos]
        self.logprobs = [float(row[t]) for row, t in zip(self.logprobs, tokens, strict=True)]
        self.logprobs = self.logprobs[: len(self.tokens)]
        self.text = ""
        self.stop_at(())

    def stop_at(self, stops):
        output, self.text = OutputText(self.tokenizer, stops), ""
        for count, token in enumerate(self.tokens, 1):
            self.text += output.add(token)
            if output.stopped:
                self.tokens, self.logprobs = self.tokens[:count], self.logprobs[:count]
                self.finish = "stop"
                break
        self.text += output.finish()


def late_piece(text):
    """Three characters that stand in the last third of a text, and not before."""
    for at in range(2 * len(text) // 3, len(text) - 3):
        piece = text[at : at + 3]
        if piece.isascii() and piece.strip() and text.index(piece) == at:
            return piece
    raise AssertionError("no stop string to be found")


@functools.cache
def expected_answers(model, tokenizer, features):
    """Prompt, sampling fields, stop strings and answers of a case."""
    number = CASES.index(features)
    prompt, fields = prompt_for(features, number), sampling_for(features, number)
    count = 2 if "n > 1" in features else 1
    answers = [Expected(model, tokenizer, prompt, fields, i) for i in range(count)]
    stops = (late_piece(answers[0].text),) if "stop strings" in features else ()
    for answer in answers:
        answer.stop_at(stops)
    return prompt, fields, stops, answers


class Reply:
    """What a client gets, by answer."""

    def __init__(self, count):
        self.texts, self.finishes = [""] * count, [""] * count
        self.tokens = [[] for _ in range(count)]
        self.logprobs = [[] for _ in range(count)]
        self.usage = None


async def ask(stub, request, count):
    reply = Reply(count)
    async for response in stub.StreamChat(request, timeout=240):
        i = response.index
        reply.texts[i] += response.text
        reply.tokens[i] += response.token_ids
        reply.logprobs[i] += response.logprobs
        reply.finishes[i] = reply.finishes[i] or response.finish_reason
        if response.HasField("usage"):
            reply.usage = response.usage
    return reply


def request_for(prompt, fields, features, stops, name):
    rest = {k: v for k, v in fields.items() if k != "grammar"}
    sampling = chat_pb2.Sampling(**rest, stop=stops, n=2 if "n > 1" in features else 1)
    request = chat_pb2.ChatRequest(
        prompt_token_ids=prompt, sampling=sampling, request_id=name, tenant=name, priority=-5
    )
    if "structured output" in features:
        request.response_format.regex = PATTERN
    return request


async def under_pressure(stub, request, count):
    """The reply to a request that has to give its pages up to requests of a higher priority.

    The crowd's prompts take two pages each, which leaves room for the request; a few tokens later
    they need three, which does not.
    """
    crowd = [
        chat_pb2.ChatRequest(
            prompt_token_ids=[100 + 7 * i + j for j in range(2 * PAGE - GROWTH)],
            sampling=chat_pb2.Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True),
            priority=5,
        )
        for i in range(CROWD)
    ]
    reply, *_ = await asyncio.gather(
        ask(stub, request, count), *(ask(stub, other, 1) for other in crowd)
    )
    return reply


def preempted(mesh, name):
    return re.search(rf"preempted.*request={re.escape(name)}\b", logs(mesh)) is not None


def logs(mesh):
    return "\n".join(
        path.read_text(errors="replace") for path in sorted(mesh.state_dir.rglob("*.log"))
    )


def check(reply, wanted, features, mesh):
    for i, answer in enumerate(wanted):
        assert reply.tokens[i] == answer.tokens
        assert reply.texts[i] == answer.text
        assert reply.finishes[i] == answer.finish
        if "logprobs" in features:
            assert [p.logprob for p in reply.logprobs[i]] == answer.logprobs
            assert all(len(p.top_token_ids) == 3 for p in reply.logprobs[i])
        else:
            assert not reply.logprobs[i]
    if "structured output" in features and "stop strings" not in features:
        done = [t for t, f in zip(reply.texts, reply.finishes, strict=True) if f == "stop"]
        assert all(re.fullmatch(PATTERN, text) for text in done)
    if "stop strings" in features:
        assert reply.finishes[0] == "stop"
    assert bool(reply.usage.drafted_tokens) == mesh.mtp
    assert reply.usage.cached_tokens == (PAGE if "prefix hit" in features else 0)
    computed = reply.usage.prompt_tokens - reply.usage.cached_tokens
    assert (computed > CHUNK) == ("chunked prefill" in features)


def quick(run):
    return run[0] == "MTP" or run[1] in SAMPLE


def param(run):
    mesh, features = run
    name = " with ".join(features) if len(features) == 2 else "all"
    return pytest.param(
        mesh, features, marks=() if quick(run) else pytest.mark.full, id=f"{mesh}-{name}"
    )


@pytest.mark.parametrize(("mesh", "features"), list(map(param, RUNS)), indirect=["mesh"])
async def test_features_in_one_request_give_what_one_process_gives(
    mesh, model, tokenizer, features
):
    prompt, fields, stops, wanted = expected_answers(model, tokenizer, features)
    async with meshes.chat_stub(mesh.address) as stub:
        for attempt in range(10):
            name = f"case-{CASES.index(features)}-{attempt}"
            request = request_for(prompt, fields, features, stops, name)
            if "prefix hit" in features:
                await ask(stub, warm_up(request), 1)
            if "preemption" not in features:
                check(await ask(stub, request, len(wanted)), wanted, features, mesh)
                break
            reply = await under_pressure(stub, request, len(wanted))
            check(reply, wanted, features, mesh)
            if preempted(mesh, name):
                break
        else:
            raise AssertionError("it was never preempted")
    passed.add(("MTP" if mesh.mtp else "no MTP", features))


async def test_nothing_of_all_that_is_left_behind(mesh):
    assert await mesh.problems() == []


def warm_up(request):
    """One page of the prompt and one token of the next; one greedy token."""
    first = chat_pb2.ChatRequest()
    first.CopyFrom(request)
    first.ClearField("request_id")
    first.ClearField("response_format")
    first.sampling.Clear()
    first.sampling.max_tokens = 1
    del first.prompt_token_ids[PAGE + 1 :]
    return first


def rendered():
    """The matrix as a page."""
    lines = [
        "# Features in pairs",
        "",
        "Each mark is a test with real processes (`tests/test_pairwise_features.py`): one request",
        "that uses both features, and for which both were seen to happen, gives the tokens, the",
        "text, the finish reason and the log-probabilities that one process computes alone. The",
        "pairs run with MTP and, but for MTP's own, without it (a sample in `make test`, all in",
        "`make test-full`); sampling at temperature 0.8, in exact mode. One more request uses all",
        "nine.",
        "",
        "| | " + " | ".join(FEATURES[1:]) + " |",
        "|---" * len(FEATURES) + "|",
    ]
    for row, feature in enumerate(FEATURES[:-1]):
        cells = ["" if row >= FEATURES.index(other) else "tested" for other in FEATURES[1:]]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines += ["", "This page is written by the test run: `PDMESH_WRITE_DOCS=1 .venv/bin/pytest", ""]
    lines[-2] += " tests/test_pairwise_features.py`."
    return "\n".join(lines)


def test_the_published_matrix_is_what_was_tested():
    if not passed >= set(filter(quick, RUNS)):
        pytest.skip("only a run of the whole file can tell")
    if os.environ.get("PDMESH_WRITE_DOCS"):
        DOCS.write_text(rendered())
    assert DOCS.read_text() == rendered()
