"""Pages of one prompt from several sender ranks to several receiver ranks, each page once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from cuda_ipc_rig import FakeDevice, device_store
from hypothesis import given
from hypothesis import strategies as st
from kvtransfer_rig import FORMAT, PATIENCE, fin_of, wait_over

from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.cuda_ipc import CudaIpcDialer, CudaIpcListener
from pdmesh.kvtransfer.parted import PartedReceiver
from pdmesh.kvtransfer.receiver import TransferReceiver
from pdmesh.kvtransfer.reshard import parts_from, parts_to, plan
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.shm import ShmListener
from pdmesh.kvtransfer.tcp import TcpListener
from pdmesh.wire.errors import InternalError, TransferFailed
from pdmesh.wire.messages import Lease

RANKS = st.sets(st.integers(0, 7), min_size=1, max_size=8).map(sorted)
SIZES = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)]


@given(st.text(max_size=8), st.integers(0, 20), st.integers(0, 60), RANKS, RANKS)
def test_each_page_is_sent_once_and_evenly_and_every_receiver_hears_of_the_end(
    transfer_id, first, more, senders, receivers
):
    parts = plan(transfer_id, first, first + more, senders, receivers)
    pages = [page for part in parts for page in part.pages]
    assert sorted(pages) == list(range(first, first + more))
    assert len({(part.sender, part.receiver) for part in parts}) == len(parts)
    assert {part.receiver for part in parts} == set(receivers)
    assert {part.sender for part in parts} <= set(senders)
    for side, ranks in (("sender", senders), ("receiver", receivers)):
        share = Counter(dict.fromkeys(ranks, 0))
        for part in parts:
            share[getattr(part, side)] += part.num_pages
        assert max(share.values()) - min(share.values()) <= 1


@given(st.text(max_size=8), st.integers(0, 60), RANKS, RANKS)
def test_both_sides_compute_the_same_and_ranks_find_their_own(
    transfer_id, pages, senders, receivers
):
    parts = plan(transfer_id, 0, pages, senders, receivers)
    assert parts == plan(transfer_id, 0, pages, list(senders), list(receivers))
    assert sum((parts_to(parts, rank) for rank in receivers), ()) == parts
    assert {part for rank in senders for part in parts_from(parts, rank)} == set(parts)


def test_different_transfers_begin_with_different_ranks():
    begin = {plan(f"t{number}", 0, 1, range(4), [0])[0].sender for number in range(40)}
    assert begin == {0, 1, 2, 3}


def test_a_side_without_ranks_or_with_one_twice_has_no_plan():
    for senders, receivers in (([], [0]), ([0], []), ([0, 0], [1]), ([1, 0], [1])):
        with pytest.raises(InternalError, match="no plan for ranks"):
            plan("t", 0, 4, senders, receivers)


class Group:
    """``num_senders`` ranks with the same pages, ``num_receivers`` ranks with a pool each."""

    def __init__(self, num_senders: int, num_receivers: int, listener) -> None:
        device = FakeDevice() if listener is CudaIpcListener else None
        dialers = None if device is None else [CudaIpcDialer(device)]
        offers = listener if device is None else partial(CudaIpcListener, memory=device)
        self.source = self._store(device)
        shape = self.source.tensor.shape
        self.source.tensor.copy_(torch.arange(1, 1 + shape.numel()).reshape(shape))
        self.senders = [TransferSender(FORMAT, dialers, self.source) for _ in range(num_senders)]
        self.stores = [self._store(device) for _ in range(num_receivers)]
        self.receivers = [TransferReceiver(store, [offers(FORMAT)]) for store in self.stores]
        self.drained: list[tuple[int, str]] = []
        self.changed = threading.Event()
        self.parted = [
            PartedReceiver(receiver, lambda one, rank=rank: self._drained(rank, one))
            for rank, receiver in enumerate(self.receivers)
        ]
        for receiver in self.receivers:
            receiver.start()

    def _store(self, device):
        if device is not None:
            return device_store(8, 2, 4, 3)
        return LatentStore(8, 2, 4, 3, torch.float32, shared=True)

    def _drained(self, rank: int, transfer_id: str) -> None:
        self.drained.append((rank, transfer_id))
        self.changed.set()

    def expect(self, transfer_id, pages, generation=1, senders=None):
        live = list(range(len(self.senders))) if senders is None else senders
        parts = plan(transfer_id, 0, pages, live, range(len(self.receivers)))
        for rank, parted in enumerate(self.parted):
            mine = parts_to(parts, rank)
            ids = {page: 7 - page for part in mine for page in part.pages}
            parted.expect(transfer_id, generation, mine, ids, 2)
        return parts

    def open(self, transfer_id, part, pages, generation=1):
        lease = Lease(
            lease_id=part.lease_id(transfer_id),
            generation=generation,
            instance=f"decode-{part.receiver}",
            cached_pages=0,
            num_pages=pages,
            transports=self.receivers[part.receiver].addresses,
            page_format=FORMAT,
        )
        return self.senders[part.sender].open(lease)

    def send(self, transfer_id, part, pages, generation=1):
        transfer = self.open(transfer_id, part, pages, generation)
        for page in part.pages:
            transfer.push_pages(page, 1, [page])
        transfer.finish(fin_of(transfer), PATIENCE)

    def problems(self) -> list[str]:
        both = [*self.receivers, *self.senders]
        return [problem for one in both for problem in one.check_integrity()]

    def close(self) -> None:
        for one in [*self.senders, *self.receivers]:
            one.close()


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}to{size[1]}")
def group(request):
    kinds = (TcpListener, ShmListener, CudaIpcListener)
    made = Group(*request.param, kinds[SIZES.index(request.param) % len(kinds)])
    yield made
    made.close()
    for sender in made.senders:
        wait_over(sender)
    assert made.problems() == []


def test_every_page_is_where_its_rank_needs_it_and_nothing_is_left_in_use(group):
    for pages in (0, 1, 5, 8):
        parts = group.expect(f"t{pages}", pages)
        for part in parts:
            group.send(f"t{pages}", part, pages)
        for rank, parted in enumerate(group.parted):
            fins = asyncio.run(parted.wait(f"t{pages}", PATIENCE))
            mine = [page for part in parts_to(parts, rank) for page in part.pages]
            assert sum(fin.num_writes for fin in fins) == 2 * len(mine)
            for page in mine:
                assert torch.equal(group.stores[rank].tensor[7 - page], group.source.tensor[page])
            assert parted.cancel(f"t{pages}")
    assert all(not receiver._arrivals for receiver in group.receivers)
    assert all(receiver.dropped == 0 for receiver in group.receivers), "an unknown request"


def test_an_abort_reaches_every_rank_by_its_own_id_and_survivors_send_again(group):
    parts = group.expect("t", 8)
    transfers = [group.open("t", part, 8) for part in parts]
    for part, transfer in zip(parts, transfers, strict=True):
        for page in part.pages[:1]:
            transfer.push_pages(page, 1, [page])
    transfers[0].abort("its rank is lost")
    with pytest.raises(TransferFailed, match="its rank is lost"):
        asyncio.run(group.parted[parts[0].receiver].wait("t", PATIENCE))
    waiting = [rank for rank, parted in enumerate(group.parted) if not parted.cancel("t")]
    for part, transfer in zip(parts, transfers, strict=True):
        with pytest.raises(TransferFailed, match=f"lease {part.lease_id('t')}"):
            transfer.finish(fin_of(transfer), PATIENCE)
    while len(group.drained) < len(waiting):
        group.changed.wait(PATIENCE)
        group.changed.clear()
    assert sorted(group.drained) == [(rank, "t") for rank in waiting]
    live = [rank for rank in range(len(group.senders)) if rank != parts[0].sender] or [0]
    again = group.expect("t", 8, 2, live)
    assert {part.sender for part in again} <= set(live)
    for part in again:
        group.send("t", part, 8, 2)
    for rank, parted in enumerate(group.parted):
        asyncio.run(parted.wait("t", PATIENCE))
        for part in parts_to(again, rank):
            for page in part.pages:
                assert torch.equal(group.stores[rank].tensor[7 - page], group.source.tensor[page])
        assert parted.cancel("t")
    assert all(not receiver._arrivals for receiver in group.receivers)


def test_whole_leading_pages_of_all_parts_are_salvaged():
    group = Group(2, 1, TcpListener)
    parts = group.expect("t", 6)
    transfers = {part.sender: group.open("t", part, 6) for part in parts}
    sender_of = {page: part.sender for part in parts for page in part.pages}
    for page in (0, 1, 2, 4):
        transfers[sender_of[page]].push_pages(page, 1, [page])
    for transfer in transfers.values():
        with transfer._changed:
            assert transfer._changed.wait_for(
                lambda one=transfer: not one._state.in_flight, PATIENCE
            ), "the pages were to be sent before the abort"
        transfer.abort("enough")
    with pytest.raises(TransferFailed):
        asyncio.run(group.parted[0].wait("t", PATIENCE))
    for part in parts:
        with pytest.raises(TransferFailed):
            asyncio.run(group.receivers[0].wait(part.lease_id("t"), PATIENCE))
    assert group.parted[0].cancel("t")
    assert group.parted[0].salvage("t", parts, 0) == 3
    group.close()
