"""Frames between ranks: what is sent arrives, and what nobody sends is refused."""

import struct

import pytest
import torch

from pdmesh.model.parallel.exchange import Channel
from pdmesh.model.parallel.frames import (
    PREFIX,
    BadFrame,
    FrameType,
    Hello,
    pack,
    pack_message,
    read_frame,
    unpack_message,
)

CHANNEL = Channel("dispatch", 1 << 60, 3, -1)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn)


class Stream:
    """Bytes that come in pieces of any size."""

    def __init__(self, data, most=7):
        self.data, self.most = bytes(data), most

    def recv_into(self, buffer, /):
        piece = self.data[: min(len(buffer), self.most)]
        self.data = self.data[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_arrive_as_they_were_of_any_dtype_and_shape(dtype):
    sent = tuple(torch.arange(n * 5).reshape(n, 5).float().to(dtype) for n in (3, 0, 1))
    frame = b"".join(pack_message(CHANNEL, sent))
    kind, header, body = read_frame(Stream(frame))
    assert kind == FrameType.MESSAGE
    channel, got = unpack_message(header, body)
    assert channel == CHANNEL
    assert [t.shape for t in got] == [t.shape for t in sent]
    for one, other in zip(got, sent, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_message_without_a_tensor_is_one_too():
    _, header, body = read_frame(Stream(b"".join(pack_message(CHANNEL, ()))))
    assert unpack_message(header, body) == (CHANNEL, ())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", EOFError),
        (PREFIX.pack(3, 5, 0) + b"abc", EOFError),
        (PREFIX.pack(99, 0, 0), BadFrame),
        (PREFIX.pack(3, 1 << 30, 0), BadFrame),
        (PREFIX.pack(3, 0, 1 << 60), BadFrame),
    ],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken_for_it(data, error):
    with pytest.raises(error):
        read_frame(Stream(data))


def test_headers_that_do_not_fit_their_bytes_are_refused():
    frame = b"".join(pack_message(CHANNEL, (torch.ones(4),)))
    _, header, body = read_frame(Stream(frame))
    with pytest.raises(BadFrame, match="has tensors of more"):
        unpack_message(header, body[:-1])
    with pytest.raises(BadFrame, match="has tensors of 16"):
        unpack_message(header, body + b"x")
    with pytest.raises(BadFrame, match="malformed message"):
        unpack_message(b"\xc1", body)
    with pytest.raises(BadFrame, match="a tensor of float1"):
        unpack_message(header.replace(b"float32", b"float1\0"), body)


def test_a_frame_without_a_body_is_its_header():
    hello = Hello("g", 2, 1, "d")
    kind, header, body = read_frame(Stream(pack(FrameType.HELLO, hello), most=1))
    assert (kind, body) == (FrameType.HELLO, b"")
    assert header
    assert struct.calcsize("<BIQ") == PREFIX.size
