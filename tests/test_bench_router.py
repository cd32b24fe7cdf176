"""What stands around a router while its costs are measured."""

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

from pdmesh.router.view import Registry
from pdmesh.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench():
    """Imports a module of the benchmark."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_a_stand_in_for_the_registry_has_all_that_a_router_asks_of_one(bench):
    asked = {name for name in vars(Registry) if not name.startswith("_")}
    match = bench("router_match")
    for made in (bench("router_mesh").Listed, match.Registered, match.Learnt):
        assert asked <= set(dir(made))


def test_pages_are_found_once_they_have_been_asked_for(bench):
    match = bench("router_match")
    records = [match.record("prefill", 0), match.record("decode", 0), match.record("decode", 1)]
    registry = match.Learnt(records)
    first, longer = ([bytes([n]) * 16 for n in range(count)] for count in (3, 5))
    assert registry.owned_prefixes(first) == {}
    found = registry.owned_prefixes(longer)
    assert found == {"prefill-0": 3, "decode-1": 3}
    assert registry.owned_prefixes(longer)["prefill-0"] == 5


def test_prompts_share_half_of_their_words_with_every_eighth_and_warm_up_has_others(bench):
    load = bench("router_load").Load(streams=8, tokens=2, step_ms=0.0, answers=2, words=20)
    one, two = (load.prompt(3, answer).split() for answer in (0, 1))
    assert len(one) == len(two) == 20
    assert one[:10] == two[:10]
    assert one[10:] != two[10:]
    assert one[:10] != load.prompt(4, 0).split()[:10]
    prompts = {load.prompt(stream, answer) for stream in range(8) for answer in range(2)}
    assert len(prompts) == 16
    assert not prompts & {load.warm_up(8).prompt(stream, 0) for stream in range(8)}


@pytest.mark.parametrize("step_ms", [0.0, 0.1])
def test_an_answer_over_http_has_the_tokens_that_one_over_grpc_has(bench, step_ms):
    http, tokens = bench("router_http"), bench("router_load").TOKENS
    tokenizer = load_tokenizer(ROOT / "model" / "tiny")

    async def answer(prefills: bool) -> list[str]:
        loop = asyncio.get_running_loop()
        workers = http.Workers(step_ms, http.events_of(tokenizer))
        server = await loop.create_server(lambda: http.Served(workers, prefills), "127.0.0.1", 0)
        steps = asyncio.create_task(workers.run())
        port = server.sockets[0].getsockname()[1]
        transport, asking = await loop.create_connection(http.Asking, "127.0.0.1", port)
        body = json.dumps({"max_tokens": 7}).encode()
        await asyncio.wait_for(asking.ask(transport, body), 60)  # the connection is kept
        texts = http.texts_of(await asyncio.wait_for(asking.ask(transport, body), 60))
        transport.close()
        server.close()
        steps.cancel()
        return texts

    assert asyncio.run(answer(prefills=False)) == [tokenizer.decode([t]) for t in tokens[:7]]
    assert len(asyncio.run(answer(prefills=True))) == 1
