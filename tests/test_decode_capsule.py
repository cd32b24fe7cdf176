"""What a capsule may say, and what a sequence is after it was one."""

import msgspec
import pytest
import torch
from worker_rig import SECRET, VOCAB

from pdmesh.decode.admission import sampling_state
from pdmesh.decode.capsule import (
    adopted_sequence,
    capsule_message,
    capsule_of,
    check_capsule,
    complete_hashes,
    pending_bytes,
    whole_output,
)
from pdmesh.decode.limits import DecodeLimits
from pdmesh.wire.codec import decode, encode
from pdmesh.wire.errors import InvalidRequest
from pdmesh.wire.handoff import CapsuleMessage
from pdmesh.wire.hashes import PageFormat, page_hashes, root_hash
from pdmesh.wire.messages import StreamRequest
from pdmesh.wire.sampling import SamplingParams

FORMAT = PageFormat("tiny", "w", "float32", 8, 4, 1, 48)
LIMITS = DecodeLimits("here", FORMAT, VOCAB, 256, 4, SECRET, 60.0)
REQUEST = StreamRequest(
    lease_id="l",
    generation=1,
    request_id="r",
    attempt=1,
    token_ids=tuple(range(20)),
    first_token=7,
    sampling=SamplingParams(max_tokens=30, repetition_penalty=1.2, bad_words=((3, 4),)),
    output_offset=2,
    sample_index=1,
    tenant="t",
)
GOOD = CapsuleMessage(
    lease_id="there",
    request=REQUEST,
    output=(7, 8, 9, 10, 11, 12),
    computed=25,
    complete_pages=3,
    num_pages=4,
    num_rounds=2,
    pending_hidden=bytes(2 * 16),
    drafted=5,
    accepted=3,
)


def change(**fields):
    return msgspec.structs.replace(GOOD, **fields)


def ask(**fields):
    return change(request=msgspec.structs.replace(REQUEST, **fields))


def test_a_sequence_is_the_same_after_it_was_a_capsule():
    rows = torch.arange(8.0).reshape(2, 4)
    message = change(pending_hidden=rows.numpy().tobytes())
    check_capsule(LIMITS, message)
    state = sampling_state(LIMITS, REQUEST, message.output)
    hashes = complete_hashes(LIMITS, message)
    sequence = adopted_sequence(LIMITS, None, message, state, hashes)
    assert sequence.tokens == [*range(20), 7, 8, 9, 10, 11, 12]
    assert (sequence.computed, sequence.generated, sequence.room) == (25, 6, 24)
    assert torch.equal(sequence.pending, rows)
    assert pending_bytes(sequence) == message.pending_hidden
    assert state.position == 8
    assert whole_output(REQUEST, sequence.tokens) == (18, 19, 7, 8, 9, 10, 11, 12)
    root = root_hash(SECRET, FORMAT.fingerprint(), "t")
    assert hashes == page_hashes(SECRET, root, sequence.tokens, 8)[:3]
    again = capsule_message(sequence, "there", capsule_of(message))
    assert decode(encode(again), CapsuleMessage) == message


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (change(output=()), "0 output tokens"),
        (change(output=tuple(range(30)), computed=49, num_pages=7), "30 output tokens of at most"),
        (change(output=(*GOOD.output[:-1], VOCAB)), "output holds"),
        (change(output=(*GOOD.output[:-1], -1)), "output holds"),
        (change(computed=24), "24 computed positions"),
        (change(computed=26), "26 computed positions"),
        (change(num_pages=3), "3 pages for 25"),
        (change(num_pages=5), "5 pages for 25"),
        (change(num_rounds=0), "0 rounds"),
        (change(num_rounds=5), "5 rounds"),
        (change(complete_pages=4), "4 complete pages"),
        (change(complete_pages=-1), "-1 complete pages"),
        (change(pending_hidden=bytes(3 * 16)), "3 complete pages in 23"),
        (change(pending_hidden=b""), "does not fit this model"),
        (change(pending_hidden=bytes(17)), "does not fit this model"),
        (change(pending_hidden=bytes(26 * 16), complete_pages=0), "26 hidden states"),
        (ask(output_offset=20), "output_offset 20"),
        (ask(output_offset=-1), "output_offset -1"),
        (ask(token_ids=(*range(19), VOCAB)), "token_ids holds"),
        (ask(sampling=SamplingParams(max_tokens=30, temperature=-1.0)), "temperature"),
        (ask(sampling=SamplingParams(max_tokens=237)), "context of 256"),
    ],
)
def test_a_capsule_that_does_not_fit_is_refused(message, word):
    check_capsule(LIMITS, GOOD)
    with pytest.raises(InvalidRequest, match=word):
        check_capsule(LIMITS, message)


def test_hidden_states_come_only_where_mtp_is_on():
    without = DecodeLimits(
        "here", msgspec.structs.replace(FORMAT, mtp_layers=0), VOCAB, 256, 4, SECRET, 60.0
    )
    check_capsule(without, change(pending_hidden=b""))
    with pytest.raises(InvalidRequest, match="which is off"):
        check_capsule(without, GOOD)
