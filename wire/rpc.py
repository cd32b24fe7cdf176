"""Internal RPC: gRPC with the MessagePack codec, one deliberate set of channel options.

A server is a table of ``Method``s; a client calls ``unary`` or ``stream`` by method name. Errors
travel as a gRPC status with the class name in trailing metadata and come out as the same class.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import msgspec

from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import (
    DeadlineExceeded,
    InternalError,
    PdmeshError,
    TooLarge,
    Unavailable,
    WorkerLost,
    error_from_wire,
)
from pdmesh.wire.messages import PROTOCOL_VERSION

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_PUBLIC_MESSAGE = 8 * 1024 * 1024
"""Bytes of one public request: a million token ids, or six megabytes of text. Larger ones are
refused with RESOURCE_EXHAUSTED before they are parsed; the connection stays usable."""

MAX_INTERNAL_MESSAGE = 64 * 1024 * 1024
"""Bytes of one internal message: token ids and hashes of the longest context fit many times."""

ERROR_KEY = "pdmesh-error"
VERSION_KEY = "pdmesh-protocol"

# Both ends agree: a client pings every 10 s, also between calls; a server accepts a ping every
# 5 s. A dead peer is noticed after 10 + 10 s (compare llm-d/llm-d-kv-cache#359).
_KEEPALIVE_CLIENT = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default, a minute, overrides the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_KEEPALIVE_SERVER = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its default, a minute, overrides the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def server_options(max_message: int) -> list[tuple[str, int]]:
    """gRPC server options: message limits, keepalive and room for bursts of new calls."""
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 200_000),
        *_KEEPALIVE_SERVER,
    ]


def channel_options(ahead: int | None = None) -> list[tuple[str, int]]:
    """gRPC channel options of every client in the mesh, the chat client included.

    Args:
        ahead: bytes that a peer may send in one stream before they are read (its HTTP/2 window); a
            larger message takes one round trip more. None: as many as the line can hold.
    """
    window = [("grpc.http2.lookahead_bytes", ahead), ("grpc.http2.bdp_probe", 0)] if ahead else []
    return [
        *window,
        ("grpc.max_receive_message_length", MAX_INTERNAL_MESSAGE),
        ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE),
        ("grpc.enable_retries", 0),
        # A channel has connections of its own: another one's back-off from a worker that died does
        # not hold up the first call to its successor at the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        *_KEEPALIVE_CLIENT,
    ]


@dataclass(frozen=True)
class Method:
    """One internal method: its request type, and a handler that answers once or streams."""

    name: str
    request: type[msgspec.Struct]
    unary: Callable[[Any], Awaitable[msgspec.Struct]] | None = None
    stream: Callable[[Any], AsyncIterator[msgspec.Struct]] | None = None


async def fail(context: grpc.aio.ServicerContext, error: PdmeshError) -> None:
    """Ends a call with the status of ``error``; never returns."""
    code = grpc.StatusCode[error.status]
    await context.abort(code, error.message, trailing_metadata=((ERROR_KEY, type(error).__name__),))


def _check_version(context: grpc.aio.ServicerContext) -> None:
    for key, value in context.invocation_metadata() or ():
        if key == VERSION_KEY and value != str(PROTOCOL_VERSION):
            raise error_from_wire(
                "Incompatible",
                f"peer speaks protocol {value}, this worker speaks {PROTOCOL_VERSION}",
            )


async def _report(context: grpc.aio.ServicerContext, method: Method, error: Exception) -> None:
    """Tells the caller what a handler raised; never returns."""
    if not isinstance(error, PdmeshError):
        log.error("%s failed", method.name, exc_info=error)
        error = InternalError(f"{method.name}: {error}")
    await fail(context, error)


def _wrap_unary(method: Method) -> grpc.RpcMethodHandler:
    handler = method.unary
    assert handler is not None

    async def call(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            _check_version(context)
            return encode(await handler(decode(data, method.request)))
        except Exception as error:  # noqa: BLE001 - the boundary: report it, keep serving
            await _report(context, method, error)
        return b""

    return grpc.unary_unary_rpc_method_handler(call)


async def _written(context: grpc.aio.ServicerContext, data: bytes) -> bool:
    """Writes one message of a stream; False where the caller has left meanwhile."""
    try:
        await context.write(data)
    except Exception as error:  # noqa: BLE001 - grpc has several, and names none
        if context.done():
            log.debug("the caller left while it was written to: %s", error)
            return False
        raise
    return True


def _wrap_stream(method: Method) -> grpc.RpcMethodHandler:
    handler = method.stream
    assert handler is not None

    async def call(data: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            _check_version(context)
            messages = handler(decode(data, method.request))
            try:
                async for message in messages:
                    if not await _written(context, encode(message)):
                        return
            finally:  # a call cancelled while it writes must end the handler at once
                if isinstance(messages, AsyncGenerator):
                    await messages.aclose()
        except Exception as error:  # noqa: BLE001 - the boundary: report it, keep serving
            await _report(context, method, error)

    return grpc.unary_stream_rpc_method_handler(call)


def add_service(server: grpc.aio.Server, service: str, methods: Sequence[Method]) -> None:
    """Registers ``methods`` under ``/pdmesh.internal.<service>/<name>``."""
    table = {m.name: _wrap_unary(m) if m.unary is not None else _wrap_stream(m) for m in methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(f"pdmesh.internal.{service}", table),)
    )


class Client:
    """Calls one peer's internal service over one channel.

    Args:
        address: ``host:port``.
        service: the name given to ``add_service``.
        ahead: see ``channel_options``.
    """

    calls = 0
    """Under way."""

    def __init__(self, address: str, service: str, ahead: int | None = None) -> None:
        self.address = address
        self._service = service
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(ahead))
        self._metadata = ((VERSION_KEY, str(PROTOCOL_VERSION)),)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Counts as a call: between tries of one the channel is not closed for being idle."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    async def unary(
        self, method: str, request: msgspec.Struct, answer: type[T], timeout: float | None = None
    ) -> T:
        """One request, one answer. Raises the error the peer raised, or WorkerLost."""
        call = self._channel.unary_unary(f"/pdmesh.internal.{self._service}/{method}")
        try:
            with self.kept():
                data = await call(encode(request), timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, method) from error
        except grpc.aio.UsageError as error:  # closed before
            raise self._closed(method) from error
        return decode(data, answer)

    async def stream(
        self, method: str, request: msgspec.Struct, answer: type[T], timeout: float | None = None
    ) -> AsyncGenerator[T, None]:
        """One request, many answers. Closing the iterator cancels the call at the peer."""
        stub = self._channel.unary_stream(f"/pdmesh.internal.{self._service}/{method}")
        try:
            call = stub(encode(request), timeout=timeout, metadata=self._metadata)
        except grpc.aio.UsageError as error:  # closed before
            raise self._closed(method) from error
        try:
            with self.kept():
                async for data in call:
                    yield decode(data, answer)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, method) from error
        finally:
            call.cancel()

    def _closed(self, method: str) -> WorkerLost:
        return WorkerLost(f"{self._service} worker at {self.address}, {method}: not connected")

    def _translate(self, error: grpc.aio.AioRpcError, method: str) -> PdmeshError:
        name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
        details = error.details() or error.code().name
        if isinstance(name, str):
            return error_from_wire(name, details)
        where = f"{self._service} worker at {self.address}, {method}: {details}"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(where)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLarge(where)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return WorkerLost(where)
        if error.code() is grpc.StatusCode.CANCELLED:
            return Unavailable(where)
        return InternalError(where)

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._channel.close()
