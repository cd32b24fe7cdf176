"""Workers and a client of a router that speaks HTTP, each a process.

An answer is a stream of events of OpenAI's chat format, one for each token. The workers say no more
than SGLang's router wants to hear: ``GET /health``, ``/server_info`` and ``/model_info``, ``POST
/v1/chat/completions``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from router_load import TOKENS, Load

ROOT = Path(__file__).resolve().parent.parent
_END = b"\r\n0\r\n\r\n"


# ---- workers ------------------------------------------------------------------------------


def _event(choice: dict[str, object]) -> bytes:
    """An event of an answer, as a chunk of an HTTP body."""
    told = {
        "id": "0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "logprobs": None, "matched_stop": None, **choice}],
        "usage": None,
    }
    return _chunk(b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n")


def events_of(tokenizer: Any) -> list[bytes]:
    """An event for each of ``TOKENS``."""
    texts = [tokenizer.decode([token]) for token in TOKENS]
    return [_event({"delta": {"content": text}, "finish_reason": None}) for text in texts]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(eq=False)
class Workers:
    """Those of one process that step together."""

    step_ms: float
    events: list[bytes]
    """Of each of ``TOKENS``."""
    streams: dict[asyncio.WriteTransport, list[int]] = field(default_factory=dict)
    """With the next position and the end of each."""
    last: bytes = _event({"delta": {"content": ""}, "finish_reason": "length"})

    def begin(self, transport: asyncio.WriteTransport, tokens: int) -> None:
        transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if self.step_ms:
            self.streams[transport] = [0, tokens]
            self._step(transport)
        else:
            events = [self.events[n % len(self.events)] for n in range(tokens)]
            transport.writelines([*events, self.last, _chunk(b"data: [DONE]\n\n"), _END[2:]])

    def _step(self, transport: asyncio.WriteTransport) -> None:
        state = self.streams[transport]
        transport.write(self.events[state[0] % len(self.events)])
        state[0] += 1
        if state[0] == state[1]:
            del self.streams[transport]
            transport.writelines([self.last, _chunk(b"data: [DONE]\n\n"), _END[2:]])

    async def run(self) -> None:
        """Steps for ever."""
        due = time.perf_counter()
        while self.step_ms:
            due += self.step_ms / 1e3
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for transport in list(self.streams):
                self._step(transport)


class Served(asyncio.Protocol):
    """A connection to a worker; a prefill worker's answers are one token long."""

    def __init__(self, workers: Workers, prefills: bool) -> None:
        self._workers = workers
        self._prefills = prefills
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._workers.streams.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._read += data
        while b"\r\n\r\n" in self._read:
            head, _, rest = self._read.partition(b"\r\n\r\n")
            lines = [line.lower() for line in head.split(b"\r\n")]
            if not lines[0].endswith(b"http/1.1"):
                self._transport.close()  # a question whether this is HTTP/2
                return
            sizes = [int(v.split(b":")[1]) for v in lines if v.startswith(b"content-length:")]
            size = sum(sizes)
            if len(rest) < size:
                return
            body, self._read = rest[:size], rest[size:]
            if lines[0].startswith(b"get"):
                self._transport.write(_ABOUT)
            else:
                asked = json.loads(body)
                tokens = asked.get("max_completion_tokens") or asked["max_tokens"]
                self._workers.begin(self._transport, 1 if self._prefills else tokens)


_told = json.dumps({"served_model_name": "tiny", "is_generation": True}).encode()
_ABOUT = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_told),
    _told,
)


def serve(pipe: Connection, prefill: int, decode: int, step_ms: float) -> None:
    """A process of workers; tells their ports, those of the prefill workers first."""
    sys.path[:0] = [str(ROOT / ".pythonpath")]
    tokenizer = importlib.import_module("pdmesh.text.tokenizer")
    events = events_of(tokenizer.load_tokenizer(ROOT / "model" / "tiny"))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        paced = Workers(step_ms, events)
        at_once = Workers(0.0, events)
        kinds = [(at_once, True)] * prefill + [(paced, False)] * decode
        ports = []
        for workers, prefills in kinds:
            made = await loop.create_server(
                functools.partial(Served, workers, prefills), "127.0.0.1", 0, backlog=1024
            )
            ports.append(made.sockets[0].getsockname()[1])
        pipe.send(ports)
        steps = asyncio.create_task(paced.run())
        await asyncio.to_thread(pipe.recv)
        steps.cancel()

    asyncio.run(run())


# ---- client -------------------------------------------------------------------------------


class Asking(asyncio.Protocol):
    """A connection of the client, one answer at a time."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._got = bytearray()

    def ask(self, transport: asyncio.Transport, body: bytes) -> asyncio.Future[bytes]:
        self.answer = asyncio.get_running_loop().create_future()
        self._got = bytearray()
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        return self.answer

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._got.endswith(_END) and not self.answer.done():
            self.answer.set_result(bytes(self._got))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(f"the router hung up: {self._got!r}"))


def chunks_of(answer: bytes) -> list[bytes]:
    """The chunks of an answer's body."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(answer[:500])
    found, at = [], 0
    while size := int(rest[at : (end := rest.index(b"\r\n", at))], 16):
        found.append(rest[end + 2 : end + 2 + size])
        at = end + 4 + size
    return found


def texts_of(answer: bytes) -> list[str]:
    """Of each token of an answer."""
    events = b"".join(chunks_of(answer)).split(b"\n\n")[:-3]  # without the end, [DONE] and ""
    return [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events]


def client(pipe: Connection) -> None:
    """A process: asks for answers when told to, and counts what comes."""

    async def one(port: int, load: Load, stream: int) -> tuple[int, int, str]:
        loop = asyncio.get_running_loop()
        transport, asking = await loop.create_connection(Asking, "127.0.0.1", port)
        tokens = messages = 0
        told = b""
        for answer in range(load.answers):
            asked = {
                "model": "tiny",
                "messages": [{"role": "user", "content": load.prompt(stream, answer)}],
                "max_tokens": load.tokens,
                "ignore_eos": True,
                "stream": True,
            }
            told = await asking.ask(transport, json.dumps(asked).encode())
            chunks = chunks_of(told)
            messages += len(chunks)
            tokens += b"".join(chunks).count(b'"content":') - 1  # the last event has no token
        transport.close()
        return tokens, messages, "".join(texts_of(told))

    async def ask() -> None:
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            port, load = told
            counts = await asyncio.gather(*(one(port, load, n) for n in range(load.streams)))
            tokens, messages = (sum(c[i] for c in counts) for i in (0, 1))
            pipe.send((tokens, messages, counts[0][2]))

    asyncio.run(ask())
