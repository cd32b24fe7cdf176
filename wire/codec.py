"""MessagePack encoding of the messages (msgspec; the wire format is plain MessagePack)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdmesh.wire.errors import InvalidRequest

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[object]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """One message as a MessagePack map."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message in ``data``, checked field by field; ``kind`` may be a union of tagged structs.

    Raises:
        InvalidRequest: the bytes are no MessagePack or do not fit ``kind``.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        value = decoder.decode(data)
    except msgspec.DecodeError as error:
        name = getattr(kind, "__name__", str(kind))
        raise InvalidRequest(f"malformed {name}: {error}") from error
    assert isinstance(value, kind)
    return value
