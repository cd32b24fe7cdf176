"""What the documentation of the public interface shows is what the router takes."""

import asyncio
import re
from pathlib import Path

import router_fakes as fakes

from pdmesh.wire import chat_pb2
from pdmesh.wire.messages import PrefillRequest

DOCS = Path(__file__).resolve().parent.parent / "docs"
API = (DOCS / "api.md").read_text()
OPERATIONS = (DOCS / "operations.md").read_text()


async def test_every_example_is_served(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", API, re.DOTALL))
    async with fakes.mesh(tmp_path, decode=1, default_max_tokens=8) as mesh:
        code = code.replace("127.0.0.1:7080", mesh.router.address)
        await asyncio.to_thread(exec, code + "\nstub = None", {"print": lambda *_: None})
        seen = mesh.prefill[0].seen(PrefillRequest)
        assert len(seen) == code.count("ask(") - 1
        assert sum(bool(request.sampling.grammar) for request in seen) == 4


def test_every_field_is_explained():
    for message in (chat_pb2.ChatRequest, chat_pb2.Sampling, chat_pb2.ResponseFormat):
        for field in message.DESCRIPTOR.fields:
            assert re.search(rf"^\| `{field.name}\b", API, re.MULTILINE), field.full_name
    for message in (chat_pb2.ChatResponse, chat_pb2.Usage, chat_pb2.Timing):
        for field in message.DESCRIPTOR.fields:
            assert f"`{field.name}`" in API, field.full_name


async def test_every_metric_of_the_router_is_explained(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        for family in mesh.router.metrics.registry.collect():
            stem = family.name.removesuffix("_tokens")
            assert stem in OPERATIONS or stem.replace("pdmesh", "") in OPERATIONS, family.name
