"""Long silences on real connections (compare llm-d/llm-d-kv-cache#359)."""

import asyncio

import grpc
import pytest
import router_fakes as fakes

from pdmesh.wire import chat_pb2, chat_pb2_grpc
from pdmesh.wire.rpc import channel_options


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_a_silent_stream_and_an_idle_channel_survive_minutes_of_pings(tmp_path):
    """A client that pings every 10 s: 90 s of silence in a stream, 180 s without any call."""
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        idle = grpc.aio.insecure_channel(mesh.router.address, options=channel_options())
        async with idle:
            await chat_pb2_grpc.ChatServiceStub(idle).ListModels(chat_pb2.ListModelsRequest())
            reached = mesh.prefill[0].wait_in("Prefill")
            answer = asyncio.ensure_future(mesh.chat(max_tokens=4, timeout=300))
            await reached.wait()
            await asyncio.sleep(90)
            assert not answer.done()
            mesh.prefill[0].hold["Prefill"].set()
            assert (await answer).reason == "length"
            await asyncio.sleep(90)
            assert idle.get_state() is grpc.ChannelConnectivity.READY
            await chat_pb2_grpc.ChatServiceStub(idle).ListModels(chat_pb2.ListModelsRequest())
