"""Asks a mesh for the answers of a case, and has them moved about meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdmesh.launch.verify.cases import Case
from pdmesh.launch.verify.compare import Answer
from pdmesh.wire import chat_pb2
from pdmesh.wire.errors import Unavailable

ANSWER_TIMEOUT_S = 120.0

Disturb = Callable[[str, int], Awaitable[None]]
"""Called with the request's id and the place that was reached; done before the next place."""


@dataclass
class Asked:
    """All answers of one request, as far as they have come."""

    answers: list[Answer]
    workers: tuple[str, str] = ("", "")
    """Prefill and decode worker that the router named last."""
    attempts: int = 0
    problems: list[str] = field(default_factory=list)
    """What went wrong while it was moved about."""


async def ask(
    stub: Any,
    case: Case,
    request_id: str,
    tenant: str,
    *,
    stop: str = "",
    disturb: Disturb | None = None,
) -> Asked:
    """Streams the answers of ``case``; ``disturb`` runs beside it at each of the case's points.

    The points count the tokens of the first answer.

    Raises:
        Unavailable: the mesh ended the request with an error; the message says which.
    """
    reached = asyncio.Condition()
    asked = Asked([Answer() for _ in range(case.n)])
    moving = asyncio.create_task(_disturb(asked, reached, case, request_id, disturb))
    try:
        async for response in stub.StreamChat(
            _request(case, request_id, tenant, stop), timeout=ANSWER_TIMEOUT_S
        ):
            _take(asked, response)
            async with reached:
                reached.notify_all()
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"{error.code().name}: {error.details()}") from error
    finally:
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
    return asked


async def _disturb(
    asked: Asked, reached: asyncio.Condition, case: Case, request_id: str, disturb: Disturb | None
) -> None:
    if disturb is None:
        return
    for point in case.points:
        async with reached:
            await reached.wait_for(lambda: len(asked.answers[0].token_ids) >= point)  # noqa: B023
        try:
            await disturb(request_id, point)
        except Exception as error:  # noqa: BLE001 - told with the result
            asked.problems.append(str(error) or type(error).__name__)


def _request(case: Case, request_id: str, tenant: str, stop: str) -> chat_pb2.ChatRequest:
    fields = {**case.sampling, "max_tokens": case.max_tokens}
    request = chat_pb2.ChatRequest(
        sampling=chat_pb2.Sampling(**fields),
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=case.prompt,
    )
    if stop:
        request.sampling.stop.append(stop)
    if case.json_schema:
        request.response_format.json_schema = case.json_schema
    return request


def _take(asked: Asked, response: chat_pb2.ChatResponse) -> None:
    answer = asked.answers[response.index]
    answer.text += response.text
    answer.token_ids += response.token_ids
    answer.logprobs += [
        (entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in response.logprobs
    ]
    if response.finish_reason:
        answer.finish = response.finish_reason
    if response.HasField("timing"):
        timing = response.timing
        asked.workers = (timing.prefill_worker, timing.decode_worker)
        asked.attempts = timing.attempts
