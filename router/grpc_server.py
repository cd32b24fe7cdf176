"""The public gRPC service: messages in, checked; the answer out; every error with its status."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from pdmesh.router.answers import Event
from pdmesh.router.metrics import Metrics
from pdmesh.router.request import GenerateRequest, RequestParser, parse_message, request_id_of
from pdmesh.router.service import Service
from pdmesh.router.stream import Delta
from pdmesh.router.view import MeshView
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import DeadlineExceeded, InternalError, Overloaded, PdmeshError
from pdmesh.wire.logs import event
from pdmesh.wire.messages import TokenLogprobs
from pdmesh.wire.rpc import ERROR_KEY

log = logging.getLogger(__name__)
T = TypeVar("T")

SERVICE = "pdmesh.v1.ChatService"
RETRY_AFTER_KEY = "retry-after-ms"
"""Told to clients that are refused because the mesh is full."""


class ChatServer:
    """Handlers of ``ChatService``. They get raw bytes, so that every bad byte is answered here."""

    def __init__(
        self,
        parser: RequestParser,
        service: Service,
        view: MeshView,
        metrics: Metrics,
        *,
        max_context: int,
        default_timeout: float,
    ) -> None:
        self._parser = parser
        self._service = service
        self._view = view
        self._metrics = metrics
        self._max_context = max_context
        self._default_timeout = default_timeout
        self._health = HealthServicer()
        self._serving: bool | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the chat, health and reflection services."""
        handlers = {
            "StreamChat": grpc.unary_stream_rpc_method_handler(self.stream_chat),
            "ListModels": grpc.unary_unary_rpc_method_handler(self.list_models),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (SERVICE, health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def update_health(self) -> None:
        """SERVING while a prefill and a decode worker are ready, for ``""`` and the service."""
        serving = bool(self._view.ready("prefill") and self._view.ready("decode"))
        if serving == self._serving:
            return
        self._serving = serving
        event(log, "health", serving=serving)
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if serving else answer.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stream_chat(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        """Streams one answer."""
        received = time.monotonic()
        timeout = context.time_remaining()
        if timeout is None or not math.isfinite(timeout):
            timeout = self._default_timeout

        async def work() -> None:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + timeout):
                await self._stream(data, context, received, received + timeout)

        await _answer(context, work)

    async def _stream(
        self, data: bytes, context: grpc.aio.ServicerContext, received: float, deadline: float
    ) -> None:
        request = await self._parse(data, received, deadline)
        async with aclosing(self._service.generate(request)) as events:
            async for item in events:
                await context.write(_response(request, item).SerializeToString())

    async def _parse(self, data: bytes, received: float, deadline: float) -> GenerateRequest:
        request_id = ""
        try:
            message = parse_message(data, chat_pb2.ChatRequest)
            request_id = request_id_of(message)
            limit = self._view.context_limit(self._max_context)
            return await self._parser.parse(request_id, message, limit, received, deadline)
        except PdmeshError as error:
            self._metrics.requests.labels("invalid").inc()
            event(log, "refused", request=request_id, error=error.message)
            raise

    async def list_models(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The one model served, with its limits."""

        async def work() -> bytes:
            parse_message(data, chat_pb2.ListModelsRequest)
            card = chat_pb2.ModelCard(
                name=self._parser.model_name,
                vocab_size=self._parser.tokenizer.vocab_size,
                max_context=self._view.context_limit(self._max_context),
                prefill_workers=len(self._view.ready("prefill")),
                decode_workers=len(self._view.ready("decode")),
            )
            return chat_pb2.ListModelsResponse(models=[card]).SerializeToString()

        return await _answer(context, work) or b""


async def _answer(context: grpc.aio.ServicerContext, work: Callable[[], Awaitable[T]]) -> T | None:
    """Runs a handler; an error ends the call with its status. Never returns None in fact."""
    try:
        return await work()
    except PdmeshError as error:
        await _abort(context, error)
    except TimeoutError:
        await _abort(
            context, DeadlineExceeded("the deadline passed before the answer was complete")
        )
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: report it, keep serving
        log.exception("request failed")
        await _abort(context, InternalError(f"{type(error).__name__} in the router"))
    return None


async def _abort(context: grpc.aio.ServicerContext, error: PdmeshError) -> None:
    metadata = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER_KEY, str(round(error.retry_after_s * 1e3))))
    await context.abort(grpc.StatusCode[error.status], error.message, tuple(metadata))


def _response(request: GenerateRequest, item: Event) -> chat_pb2.ChatResponse:
    if isinstance(item, Delta):
        return chat_pb2.ChatResponse(
            request_id=request.request_id,
            index=item.index,
            text=item.text,
            token_ids=item.token_ids,
            logprobs=[_logprob(entry) for entry in item.logprobs],
        )
    return chat_pb2.ChatResponse(
        request_id=request.request_id,
        index=item.index,
        text=item.text,
        finish_reason=item.reason,
        usage=chat_pb2.Usage(**asdict(item.usage)) if item.usage else None,
        timing=chat_pb2.Timing(**asdict(item.timing)) if item.timing else None,
    )


def _logprob(entry: TokenLogprobs) -> chat_pb2.TokenLogprob:
    return chat_pb2.TokenLogprob(
        logprob=entry.logprob, top_token_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )
