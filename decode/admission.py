"""What has to be right before a sequence joins the batch. Pure: no clock, no sockets."""

from __future__ import annotations

import torch

from pdmesh.decode.leases import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence, LeaseEntry
from pdmesh.wire.errors import InvalidRequest, TransferFailed
from pdmesh.wire.hashes import page_hashes, root_hash
from pdmesh.wire.messages import Fin, ReserveRequest, StreamRequest
from pdmesh.wire.sampling import check_token_ids


def check_stream(
    limits: DecodeLimits, reserved: ReserveRequest, request: StreamRequest
) -> list[bytes]:
    """Hashes of the prompt's full pages, computed here: a wrong one must not enter a cache.

    Raises:
        InvalidRequest: the request is not the one that pages were reserved for, or no sequence
            can follow from it.
    """
    if len(request.token_ids) != reserved.num_prompt_tokens:
        raise InvalidRequest("the prompt differs from the one that was reserved for")
    if request.sampling.max_tokens > reserved.max_tokens:
        raise InvalidRequest("max_tokens exceeds what was reserved")
    if request.output_offset < 0:
        raise InvalidRequest(f"output_offset is {request.output_offset}; it counts from 0")
    check_token_ids(request.token_ids, limits.vocab_size, "token_ids")
    check_token_ids([request.first_token], limits.vocab_size, "first_token")
    request.sampling.validate(limits.vocab_size)
    if request.sampling.max_tokens < 2:
        raise InvalidRequest("max_tokens is used up by the first token")
    root = root_hash(limits.secret, limits.page_format.fingerprint(), request.tenant)
    hashes = page_hashes(limits.secret, root, request.token_ids, limits.page_format.page_size)
    if tuple(hashes) != reserved.hashes:
        raise InvalidRequest("the prompt's page hashes differ from those reserved for")
    return hashes


def new_sequence(
    limits: DecodeLimits, entry: LeaseEntry, request: StreamRequest, fin: Fin, hashes: list[bytes]
) -> DecodeSequence:
    """The sequence that begins with an arrived prompt and its first token.

    Raises:
        TransferFailed: what prefill sent with the pages does not fit the request or this model.
    """
    if fin.first_tokens != (request.first_token,):
        raise TransferFailed("the first token differs between router and prefill worker")
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops.update(request.eos_token_ids)
    return DecodeSequence(
        entry=entry,
        request=request,
        tokens=[*request.token_ids, request.first_token],
        computed=len(request.token_ids),
        pending=_last_hidden(limits, fin),
        stop_tokens=frozenset(stops),
        hashes=list(hashes),
    )


def _last_hidden(limits: DecodeLimits, fin: Fin) -> torch.Tensor | None:
    """[1, hidden], on the CPU; None where MTP is off."""
    if limits.page_format.mtp_layers == 0:
        return None
    dtype: torch.dtype = getattr(torch, limits.page_format.dtype)
    expected = limits.hidden_size * dtype.itemsize
    if len(fin.last_hidden) != expected:
        raise TransferFailed(
            f"prefill sent a hidden state of {len(fin.last_hidden)} bytes, MTP needs {expected}"
        )
    return torch.frombuffer(bytearray(fin.last_hidden), dtype=dtype).unsqueeze(0)
