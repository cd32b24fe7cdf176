"""Every pair of features in one request: the answer is what one process computes alone.

Real processes in exact mode. A pair counts only where both features are seen to have happened.
``PDMESH_WRITE_DOCS=1`` writes what was tested to docs/features.md; without it the file is compared.
"""

import asyncio
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
PAGE, CHUNK, TOKENS = 16, 32, 48
PATTERN = "([a-z]{2,7} ){8,14}end"
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
pages = 20
growth_tokens = 16
draft_tokens = DRAFTS
"""
passed: set[tuple[str, str]] = set()


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
    return fields


class Expected:
    """Answer ``index`` of a request, computed by one process."""

    def __init__(self, model, tokenizer, prompt, fields, index, stops):
        grammar = fields.get("grammar", "")
        eos = () if fields.get("ignore_eos") else tokenizer.ids.eos
        matcher = Grammars(shipped_model(), 4096).compile(grammar) if grammar else None
        self.logits = []
        tokens = generate_reference(
            model,
            prompt,
            TOKENS,
            eos,
            arithmetic="exact",
            sampling=SamplingParams(**fields),
            index=index,
            grammar=matcher,
            on_logits=self.logits.append,
        )
        self.finish = "stop" if tokens[-1] in eos else "length"
        self.tokens = [t for t in tokens if t not in eos]
        output = OutputText(tokenizer, stops)
        self.text = ""
        for number, token in enumerate(self.tokens):
            self.text += output.add(token)
            if output.stopped:
                self.tokens, self.finish = self.tokens[: number + 1], "stop"
                break
        self.text += output.finish()

    def logprobs(self):
        rows = torch.log_softmax(torch.cat(self.logits), dim=-1)
        return [float(rows[i, token]) for i, token in enumerate(self.tokens)]


def common_piece(answers):
    """A text of three characters from the middle of the first answer."""
    text = answers[0].text
    for at in range(len(text) // 2, len(text) - 3):
        piece = text[at : at + 3]
        if piece.isascii() and piece.strip():
            return piece
    raise AssertionError("no stop string to be found")


def expected_answers(model, tokenizer, prompt, fields, features):
    count = 2 if "n > 1" in features else 1
    free = [Expected(model, tokenizer, prompt, fields, i, ()) for i in range(count)]
    if "stop strings" not in features:
        return free, ()
    stops = (common_piece(free),)
    return [Expected(model, tokenizer, prompt, fields, i, stops) for i in range(count)], stops


class Reply:
    """What a client gets, by answer."""

    def __init__(self, count):
        self.texts, self.finishes = [""] * count, [""] * count
        self.tokens = [[] for _ in range(count)]
        self.logprobs = [[] for _ in range(count)]
        self.usage = None


async def ask(stub, request, count):
    reply = Reply(count)
    async for response in stub.StreamChat(request, timeout=120):
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


async def under_pressure(stub, mesh, request, count, crowd):
    """The reply to a request that had to give its pages up to requests of a higher priority."""
    prompts = [[100 + 7 * i + j for j in range(20)] for i in range(crowd)]
    others = [
        asyncio.ensure_future(
            ask(
                stub,
                chat_pb2.ChatRequest(
                    prompt_token_ids=prompt,
                    sampling=chat_pb2.Sampling(max_tokens=150, temperature=0, ignore_eos=True),
                    priority=5,
                ),
                1,
            )
        )
        for prompt in prompts
    ]
    reply = await ask(stub, request, count)
    await asyncio.gather(*others)
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
            assert [p.logprob for p in reply.logprobs[i]] == answer.logprobs()
            assert all(len(p.top_token_ids) == 3 for p in reply.logprobs[i])
        else:
            assert not reply.logprobs[i]
    if "structured output" in features and "stop strings" not in features:
        done = [t for t, f in zip(reply.texts, reply.finishes, strict=True) if f == "stop"]
        assert all(re.fullmatch(PATTERN, text) for text in done)
    if "stop strings" in features:
        assert reply.finishes[0] == "stop"
    assert bool(reply.usage.drafted_tokens) == mesh.mtp
    assert bool(reply.usage.cached_tokens) == ("prefix hit" in features)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} with {pair[1]}")
async def test_two_features_in_one_request_give_what_one_process_gives(
    mesh, model, tokenizer, pair
):
    if "MTP" in pair and not mesh.mtp:
        pytest.skip("this mesh has no MTP")
    number = PAIRS.index(pair)
    fields = sampling_for(pair, number)
    if "structured output" in pair:
        fields["grammar"] = regex_grammar(PATTERN)
    prompt = prompt_for(pair, number)
    wanted, stops = expected_answers(model, tokenizer, prompt, fields, pair)
    async with meshes.chat_stub(mesh.address) as stub:
        for attempt in range(5):
            name = f"pair-{number}-{attempt}"
            request = request_for(prompt, fields, pair, stops, name)
            if "prefix hit" in pair:
                await ask(stub, warm_up(request), 1)
            if "preemption" not in pair:
                check(await ask(stub, request, len(wanted)), wanted, pair, mesh)
                break
            reply = await under_pressure(stub, mesh, request, len(wanted), crowd=3 + attempt)
            check(reply, wanted, pair, mesh)
            if preempted(mesh, name):
                break
        else:
            raise AssertionError("it was never preempted")
    assert await mesh.problems() == []
    if mesh.mtp:
        passed.add(pair)


def warm_up(request):
    """The same prompt, one greedy token."""
    first = chat_pb2.ChatRequest()
    first.CopyFrom(request)
    first.ClearField("request_id")
    first.ClearField("response_format")
    first.sampling.Clear()
    first.sampling.max_tokens = 1
    return first


def rendered():
    """The matrix as a page."""
    lines = [
        "# Features in pairs",
        "",
        "Each mark is a test with real processes (`tests/test_pairwise_features.py`): one request",
        "that uses both features, and for which both were seen to happen, gives the tokens, the",
        "text, the finish reason and the log-probabilities that one process computes alone. The",
        "pairs run with MTP and, but for MTP's own row, without it; sampling at temperature 0.8,",
        "in exact mode.",
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
    if passed != set(PAIRS):
        pytest.skip("only a run of the whole file can tell")
    if os.environ.get("PDMESH_WRITE_DOCS"):
        DOCS.write_text(rendered())
    assert DOCS.read_text() == rendered()
