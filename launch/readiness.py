"""Whether a process of a mesh does what it is there for by now, or has ended."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.launch.processes import Child
from pdmesh.wire.rpc import channel_options


async def serving(address: str) -> bool:
    """Whether the router's public health check says SERVING."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=1.0)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def holds(path: Path, pid: int) -> bool:
    """Whether a process offers weights at a path. It returns at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return False
        theirs: int = struct.unpack("3i", found)[0]
        return theirs == pid


async def ended(children: list[Child], deadline: float) -> None:
    """Waits until all processes have ended, or a time on the monotonic clock has come."""
    while any(child.running for child in children) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
