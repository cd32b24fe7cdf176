"""What tests that kill processes of a mesh wait for."""

import asyncio
import time

import grpc
import meshes

from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import PdmeshError

DECODE = ("decode-0", "decode-1")


async def busy(statuses, *names, timeout=120):
    """Waits until one of the workers, or of those named, has work; returns the name of the one
    with most."""
    async with asyncio.timeout(timeout):
        while True:
            most = max(await statuses(*names), key=lambda s: s.running + s.queued)
            if most.running + most.queued:
                return most.worker_id


async def restarted(mesh, name, old, timeout=180):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if mesh.pids().get(name) not in (old, None):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} was not restarted\n{mesh.log()}")


async def ready_again(mesh, timeout=180):
    """Waits until the router counts all workers, and only instances that answer."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            await mesh.statuses()
            async with meshes.chat_stub(mesh.address) as stub:
                (card,) = (await stub.ListModels(chat_pb2.ListModelsRequest(), timeout=30)).models
            if (card.prefill_workers, card.decode_workers) == (1, 2):
                return
        except (grpc.aio.AioRpcError, PdmeshError, ValueError):
            pass
        await asyncio.sleep(0.2)
    raise AssertionError(f"the mesh did not recover\n{mesh.log()}")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
