"""A caller of an internal service that leaves while it is written to."""

import asyncio
import logging
from types import SimpleNamespace

import grpc
import pytest

from pdmesh.wire.messages import Empty
from pdmesh.wire.rpc import Method, add_service


class Context:
    """A call whose write fails; ``gone`` says whether because its caller has left."""

    def __init__(self, gone):
        self.gone, self.aborted = gone, []

    def invocation_metadata(self):
        return ()

    async def write(self, data):
        raise grpc.aio.UsageError("RPC already finished.")

    def done(self):
        return self.gone

    async def abort(self, code, message, trailing_metadata):
        self.aborted.append((code, message))


def handler_of(stream):
    """What the server calls for a method that streams."""
    found = []
    server = SimpleNamespace(add_generic_rpc_handlers=lambda handlers: found.extend(handlers))
    add_service(server, "test", [Method("Count", Empty, stream=stream)])
    details = SimpleNamespace(method="/pdmesh.internal.test/Count", invocation_metadata=())
    return found[0].service(details).unary_stream


@pytest.mark.parametrize("gone", [True, False])
async def test_a_stream_whose_caller_has_left_ends_without_an_alarm(gone, caplog):
    closed = asyncio.Event()

    async def stream(request):
        try:
            for _ in range(3):
                yield Empty()
        finally:
            closed.set()

    context = Context(gone)
    with caplog.at_level(logging.ERROR):
        await handler_of(stream)(b"\x80", context)
    assert closed.is_set()
    assert bool(caplog.records) is not gone
    assert bool(context.aborted) is not gone
