"""A running sequence as a message, and back: everything besides its pages. Pure."""

from __future__ import annotations

from pdmesh.decode.admission import hidden_rows
from pdmesh.decode.lease import LeaseEntry
from pdmesh.decode.limits import DecodeLimits
from pdmesh.decode.sequence import DecodeSequence
from pdmesh.kvcache.store import tensor_bytes
from pdmesh.kvtransfer.protocol.migration import MAX_ROUNDS, Answer, Capsule
from pdmesh.model.sampler import SamplingState
from pdmesh.wire.errors import InvalidRequest, TransferFailed
from pdmesh.wire.handoff import CapsuleMessage
from pdmesh.wire.hashes import PageHash, page_hashes, root_hash
from pdmesh.wire.messages import StreamRequest
from pdmesh.wire.sampling import check_token_ids


def answer_of(request: StreamRequest) -> Answer:
    """What does not change; the prompt is the user's, without tokens of the answer."""
    return Answer(
        request_id=request.request_id,
        prompt=request.token_ids[: _num_prompt(request)],
        sampling=request.sampling,
        sample_index=request.sample_index,
        eos_token_ids=request.eos_token_ids,
        tenant=request.tenant,
    )


def whole_output(request: StreamRequest, tokens: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    """The whole answer so far; ``tokens`` are those of the sequence, from the prompt on."""
    return tuple(tokens[_num_prompt(request) :])


def _num_prompt(request: StreamRequest) -> int:
    return len(request.token_ids) - request.output_offset


def pending_bytes(sequence: DecodeSequence) -> bytes:
    """Its hidden states that MTP still needs, raw; empty where MTP is off."""
    return b"" if sequence.pending is None else bytes(tensor_bytes(sequence.pending))


def capsule_message(sequence: DecodeSequence, lease_id: str, capsule: Capsule) -> CapsuleMessage:
    """What the target needs of a sequence that stands still.

    Args:
        lease_id: at the target.
        capsule: as the protocol has it, made when the sequence stopped.
    """
    return CapsuleMessage(
        lease_id=lease_id,
        request=sequence.request,
        output=tuple(sequence.tokens[len(sequence.request.token_ids) :]),
        computed=capsule.computed,
        complete_pages=len(sequence.hashes),
        num_pages=capsule.num_pages,
        num_rounds=capsule.num_rounds,
        pending_hidden=capsule.pending_hidden,
        drafted=sequence.drafted,
        accepted=sequence.accepted,
    )


def capsule_of(message: CapsuleMessage) -> Capsule:
    """The same for the protocol."""
    request = message.request
    return Capsule(
        answer=answer_of(request),
        output=whole_output(request, (*request.token_ids, *message.output)),
        computed=message.computed,
        num_pages=message.num_pages,
        num_rounds=message.num_rounds,
        pending_hidden=message.pending_hidden,
    )


def check_capsule(limits: DecodeLimits, message: CapsuleMessage) -> None:
    """Refuses what no sequence can go on from.

    Raises:
        InvalidRequest: numbers, tokens or sampling parameters do not fit together or this model.
    """
    request, output = message.request, message.output
    if not 0 <= request.output_offset < len(request.token_ids):
        raise InvalidRequest(f"a capsule has output_offset {request.output_offset}")
    check_token_ids(request.token_ids, limits.vocab_size, "token_ids")
    check_token_ids(output, limits.vocab_size, "output")
    request.sampling.validate(limits.vocab_size)
    if not 0 < len(output) < request.sampling.max_tokens:
        raise InvalidRequest(
            f"a capsule has {len(output)} output tokens of at most {request.sampling.max_tokens}"
        )
    if len(request.token_ids) + request.sampling.max_tokens > limits.max_context:
        raise InvalidRequest(f"a capsule exceeds the context of {limits.max_context} tokens")
    if not 0 < message.num_rounds <= MAX_ROUNDS + 1:
        raise InvalidRequest(f"a capsule has {message.num_rounds} rounds of pages")
    _check_pages(limits, message)


def _check_pages(limits: DecodeLimits, message: CapsuleMessage) -> None:
    computed = message.computed
    if computed != len(message.request.token_ids) + len(message.output) - 1:
        raise InvalidRequest(f"a capsule has {computed} computed positions, not all but the last")
    if message.num_pages != limits.pages(computed):
        raise InvalidRequest(f"a capsule has {message.num_pages} pages for {computed} positions")
    complete = computed
    if limits.page_format.mtp_layers:
        rows = _pending_rows(limits, message)
        if not 0 < rows <= computed:
            raise InvalidRequest(f"a capsule has {rows} hidden states for MTP")
        complete = computed + 1 - rows
    elif message.pending_hidden:
        raise InvalidRequest("a capsule has hidden states for MTP, which is off")
    if not 0 <= message.complete_pages * limits.page_format.page_size <= complete:
        raise InvalidRequest(
            f"a capsule has {message.complete_pages} complete pages in {complete} positions"
        )


def _pending_rows(limits: DecodeLimits, message: CapsuleMessage) -> int:
    try:
        rows = hidden_rows(limits, message.pending_hidden)
    except TransferFailed as error:
        raise InvalidRequest(f"a capsule does not fit this model: {error}") from error
    return 0 if rows is None else rows.shape[0]


def complete_hashes(limits: DecodeLimits, message: CapsuleMessage) -> list[PageHash]:
    """Hashes of the complete pages, computed here: a wrong one must not enter a cache."""
    size = limits.page_format.page_size
    tokens = (*message.request.token_ids, *message.output)[: message.complete_pages * size]
    root = root_hash(limits.secret, limits.page_format.fingerprint(), message.request.tenant)
    return page_hashes(limits.secret, root, tokens, size)


def adopted_sequence(
    limits: DecodeLimits,
    entry: LeaseEntry,
    message: CapsuleMessage,
    sampling: SamplingState,
    hashes: list[PageHash],
) -> DecodeSequence:
    """The sequence that goes on where a checked capsule ends."""
    return DecodeSequence(
        entry=entry,
        request=message.request,
        tokens=[*message.request.token_ids, *message.output],
        computed=message.computed,
        pending=hidden_rows(limits, message.pending_hidden),
        sampling=sampling,
        hashes=hashes,
        generated=len(message.output),
        drafted=message.drafted,
        accepted=message.accepted,
    )
