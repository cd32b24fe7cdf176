"""A request's way through the router, over fake workers."""

import router_fakes as fakes

from pdmesh.wire import chat_pb2


async def test_an_answer_is_the_first_token_from_prefill_and_the_rest_from_decode(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        for worker in mesh.workers:
            worker.answer = [300, 301, 302, 303, 304]
        answer = await mesh.chat(max_tokens=5)
        assert answer.ids == [300, 301, 302, 303, 304]
        assert answer.reason == "length"
        assert answer.usage.completion_tokens == 5
        await mesh.at_rest()
