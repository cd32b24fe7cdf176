"""Prefill and decode workers together: tokens, pages, cancellations and faults on the decode side.

Everything is real but the processes: the model is small and random.
"""

import asyncio

import pytest
from worker_rig import PAGE, VOCAB, prompt_of, reference, rig, until

from pdmesh.wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    TransferFailed,
)
from pdmesh.wire.messages import ReleaseRequest
from pdmesh.wire.sampling import SamplingParams

LENGTHS = [k * PAGE + d for k in (1, 2, 3) for d in (-1, 0, 1)]


# ---- tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no-mtp"])
async def test_tokens_equal_the_reference_whatever_each_side_has_cached(mtp, transport):
    """Pages sent are the prompt's minus those held (compare vllm-project/vllm#50558)."""
    async with rig(mtp=mtp, transport=transport, prefills=2, decodes=2, pages=400) as mesh:
        for length in LENGTHS if transport == "tcp" else LENGTHS[3:6]:
            pages = -(-length // PAGE)
            for held in sorted({0, 1, length // PAGE} & set(range(length // PAGE + 1))):
                for cold_prefill in (True, False):
                    prompt = prompt_of(length, 10 * held + cold_prefill)
                    if held:
                        warm = prompt[: held * PAGE] + [3]
                        await mesh.ask(warm, 1, prefill=int(cold_prefill))
                        await mesh.read_nothing_left()
                    if not held and not cold_prefill:
                        await mesh.ask(prompt, 2, decode=1)
                    answer = await mesh.ask(prompt, 6)
                    case = (length, held, cold_prefill)
                    expected_held = held if held else 0
                    assert answer.tokens == reference(prompt, 6), case
                    assert answer.finish == "length"
                    assert answer.lease.cached_pages == expected_held, case
                    assert answer.first.pushed_pages == pages - expected_held, case
                    assert answer.first.cached_tokens <= length - 1
                    again = await mesh.ask(prompt, 6)
                    assert again.tokens == answer.tokens
                    assert again.first.pushed_pages == pages - length // PAGE
