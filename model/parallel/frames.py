"""What ranks of separate processes say to each other on a connection: frames with raw tensors.

A frame is ``<type: 1 byte> <header bytes: u32> <body bytes: u64> header body``; headers are
MessagePack, the body of a message is its tensors one after another, as they are in memory.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from math import prod
from typing import Protocol

import msgspec
import torch

from pdmesh.model.parallel.exchange import Channel, Message

PREFIX = struct.Struct("<BIQ")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 36
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.int32,
        torch.int64,
        torch.uint8,
    )
}


class BadFrame(Exception):
    """Bytes that no rank of this version sends."""


class FrameType(IntEnum):
    """Of a frame."""

    HELLO = 1
    BEGIN = 2
    MESSAGE = 3
    ALIVE = 4
    PLAN = 5


class Hello(msgspec.Struct, frozen=True):
    """The first frame each way: who this is, and what has to be the same on both sides."""

    group: str
    size: int
    rank: int
    digest: str


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of a message: its channel, and dtype and shape of each tensor."""

    kind: str
    step: int
    layer: int
    microbatch: int
    tensors: list[tuple[str, list[int]]]


class Source(Protocol):
    """What frames are read from."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Bytes read, at least one; 0 at the end."""


def pack(kind: FrameType, header: msgspec.Struct | None = None) -> bytes:
    """A frame without a body."""
    data = b"" if header is None else msgspec.msgpack.encode(header)
    return PREFIX.pack(kind, len(data), 0) + data


def pack_message(channel: Channel, message: Message) -> list[memoryview]:
    """A message, in pieces that point into its tensors."""
    whole = [tensor.detach().contiguous().cpu() for tensor in message]
    described = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in whole]
    header = msgspec.msgpack.encode(Envelope(*channel, described))
    bodies = [t.view(-1).view(torch.uint8).numpy().data for t in whole if t.numel()]
    size = sum(len(body) for body in bodies)
    return [memoryview(PREFIX.pack(FrameType.MESSAGE, len(header), size) + header), *bodies]


def unpack_message(header: bytes, body: bytearray) -> tuple[Channel, Message]:
    """What `pack_message` packed; the tensors share the memory of `body`.

    Raises:
        BadFrame: header and body do not fit each other.
    """
    try:
        envelope = msgspec.msgpack.decode(header, type=Envelope)
    except msgspec.DecodeError as error:
        raise BadFrame(f"malformed message: {error}") from error
    tensors, at = [], 0
    for name, shape in envelope.tensors:
        dtype = _DTYPES.get(name)
        if dtype is None or any(size < 0 for size in shape):
            raise BadFrame(f"a tensor of {name} {shape}")
        count = prod(shape)
        end = at + count * dtype.itemsize
        if end > len(body):
            raise BadFrame(f"a message of {len(body)} bytes has tensors of more")
        if count:
            tensors.append(torch.frombuffer(body, dtype=dtype, count=count, offset=at).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        at = end
    if at != len(body):
        raise BadFrame(f"a message of {len(body)} bytes has tensors of {at}")
    channel = Channel(envelope.kind, envelope.step, envelope.layer, envelope.microbatch)
    return channel, tuple(tensors)


def read_frame(source: Source) -> tuple[FrameType, bytes, bytearray]:
    """The next frame: type, header and body.

    Raises:
        EOFError: the stream has ended.
        BadFrame: it is none.
    """
    kind, header_size, body_size = PREFIX.unpack(_exactly(source, PREFIX.size))
    if header_size > MAX_HEADER or body_size > MAX_BODY:
        raise BadFrame(f"a frame of {header_size} + {body_size} bytes")
    try:
        frame = FrameType(kind)
    except ValueError as error:
        raise BadFrame(f"a frame of type {kind}") from error
    return frame, bytes(_exactly(source, header_size)), _exactly(source, body_size)


def _exactly(source: Source, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = source.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return data
