"""vllm-project/vllm#36958: a rank was told of an end by another side's id, and kept its pages."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from kvtransfer_rig import PATIENCE, fin_of
from test_kvtransfer_reshard import SIZES, Group

from pdmesh.kvtransfer.cuda_ipc import CudaIpcListener
from pdmesh.kvtransfer.reshard import parts_to
from pdmesh.kvtransfer.shm import ShmListener
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.wire.errors import TransferFailed

FATES = ("whole", "whole", "a sender aborts", "the receivers leave", "nobody opens")


def whole(group, transfer_id, pages, parts):
    """Every page comes to the rank that needs it."""
    for part in parts:
        group.send(transfer_id, part, pages)
    for rank, parted in enumerate(group.parted):
        asyncio.run(parted.wait(transfer_id, PATIENCE))
        for page in (page for part in parts_to(parts, rank) for page in part.pages):
            assert torch.equal(group.stores[rank].tensor[7 - page], group.source.tensor[page])


def broken(group, transfer_id, pages, parts, rng, aborts):
    """Each sender sends a part of its pages, then the transfer ends from one side."""
    transfers = [group.open(transfer_id, part, pages) for part in parts]
    for part, transfer in zip(parts, transfers, strict=True):
        for page in part.pages[: rng.randrange(len(part.pages) + 1)]:
            transfer.push_pages(page, 1, [page])
    one = rng.randrange(len(parts))
    if aborts:
        transfers[one].abort("lost")
        with pytest.raises(TransferFailed, match="lost"):
            asyncio.run(group.parted[parts[one].receiver].wait(transfer_id, PATIENCE))
    end(group, transfer_id)
    for transfer in transfers:
        with pytest.raises(TransferFailed):
            transfer.finish(fin_of(transfer), PATIENCE)


def end(group, transfer_id):
    """All ranks of the receiving side let go."""
    for parted in group.parted:
        parted.cancel(transfer_id)


def all_free(group):
    """Whether no rank of either side has anything of any request."""
    return not any(receiver._arrivals for receiver in group.receivers) and not any(
        sender.num_transfers for sender in group.senders
    )


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("listener", [TcpListener, ShmListener, CudaIpcListener])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}to{size[1]}")
def test_no_rank_keeps_a_page_of_requests_that_came_or_were_aborted(size, listener, count):
    """vllm-project/vllm#36958: every number of ranks on either side, tokens as from one to one."""
    rng, group = random.Random(count), Group(*size, listener)
    try:
        for number in range(count):
            transfer_id, pages, fate = f"request-{number}", rng.randrange(9), rng.choice(FATES)
            for store in group.stores:
                store.tensor.zero_()
            parts = group.expect(transfer_id, pages)
            if fate == "whole":
                whole(group, transfer_id, pages, parts)
            elif fate != "nobody opens":
                broken(group, transfer_id, pages, parts, rng, fate == "a sender aborts")
            end(group, transfer_id)
            drained(group, number)
        assert group.problems() == []
    finally:
        group.close()


def drained(group, number):
    """Waits until nothing is left of any request."""
    for _ in range(int(PATIENCE / 0.05)):
        if all_free(group):
            return
        group.changed.wait(0.05)
        group.changed.clear()
    raise AssertionError(f"a rank kept pages after request {number}")
