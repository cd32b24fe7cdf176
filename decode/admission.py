"""What has to be right before a sequence joins the batch. Pure: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.model.sampler import SamplingState
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
    if not 0 <= request.output_offset < len(request.token_ids):
        raise InvalidRequest(
            f"output_offset is {request.output_offset}; it counts from 0 and leaves a prompt"
        )
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
    answers = entry.request.n
    if len(fin.first_tokens) != answers:
        raise TransferFailed(f"{len(fin.first_tokens)} first tokens came for {answers} answers")
    if fin.first_tokens[entry.answer] != request.first_token:
        raise TransferFailed("the first token differs between router and prefill worker")
    return DecodeSequence(
        entry=entry,
        request=request,
        tokens=[*request.token_ids, request.first_token],
        computed=len(request.token_ids),
        pending=_last_hidden(limits, fin),
        sampling=sampling_state(limits, request, (request.first_token,)),
        hashes=list(hashes),
    )


def sampling_state(
    limits: DecodeLimits, request: StreamRequest, output: Sequence[int]
) -> SamplingState:
    """The sampling state after ``output``, every token that followed ``request.token_ids``.

    Raises:
        InvalidRequest: its grammar is refused, or cannot be served here.
    """
    params, tokens = request.sampling, request.token_ids
    num_prompt = len(tokens) - request.output_offset
    grammar = None
    if params.grammar:
        if limits.grammars is None:
            raise InvalidRequest("this decode worker has no grammars for structured output")
        grammar = limits.grammars.compile(params.grammar)
    return SamplingState(
        params,
        tokens[:num_prompt],
        eos=request.eos_token_ids,
        index=request.sample_index,
        grammar=grammar,
        output=(*tokens[num_prompt:], *output),
    )


def _last_hidden(limits: DecodeLimits, fin: Fin) -> torch.Tensor | None:
    """[1, hidden], on the CPU; None where MTP is off."""
    rows = hidden_rows(limits, fin.last_hidden)
    if rows is not None and rows.shape[0] != 1:
        raise TransferFailed(f"prefill sent {rows.shape[0]} hidden states, MTP needs one")
    return rows


def hidden_rows(limits: DecodeLimits, data: bytes) -> torch.Tensor | None:
    """[k, hidden] from raw bytes in the model's dtype, on the CPU; None where MTP is off.

    Raises:
        TransferFailed: these are not the bytes of whole rows.
    """
    if limits.page_format.mtp_layers == 0:
        return None
    dtype: torch.dtype = getattr(torch, limits.page_format.dtype)
    row = limits.hidden_size * dtype.itemsize
    if not data or len(data) % row:
        raise TransferFailed(f"a hidden state of {len(data)} bytes came, MTP needs {row}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(-1, limits.hidden_size)
