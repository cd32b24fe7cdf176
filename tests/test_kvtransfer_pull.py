"""Pulls between workers that only have pages: what comes, and what does not when a step breaks."""

import asyncio
import socket
import threading
from contextlib import suppress

import grpc
import msgspec
import pytest
import torch
from pull_rig import ALWAYS, FORMAT, PATIENCE, SIZE, chain, contents, pair, until

from pdmesh.kvtransfer.pull_costs import PullCosts
from pdmesh.kvtransfer.pull_exchange import Owners
from pdmesh.kvtransfer.pull_loopback import ReadFaults
from pdmesh.kvtransfer.pull_reader import ReadOrder, Stop, WrongBytes
from pdmesh.kvtransfer.pull_tcp import TcpPageReader
from pdmesh.registry.metrics import WorkerMetrics
from pdmesh.registry.pull_metrics import PullMetrics
from pdmesh.wire.errors import DeadlineExceeded, InternalError, TransferFailed, WorkerLost
from pdmesh.wire.messages import WorkerStatus
from pdmesh.wire.pulls import LoanRequest
from pdmesh.wire.rpc import MAX_INTERNAL_MESSAGE, add_service, server_options

TRANSPORTS = pytest.mark.parametrize("transport", ["loopback", "tcp", "shm", "cuda_ipc"])


class Hold:
    """Blocks reads before a page until it is let go."""

    def __init__(self, page):
        self.page = page
        self.entered = threading.Event()
        self._gate = threading.Event()

    def __call__(self, page):
        if page == self.page:
            self.entered.set()
            assert self._gate.wait(PATIENCE)

    async def begun(self):
        assert await asyncio.to_thread(self.entered.wait, PATIENCE)

    def let_go(self):
        self._gate.set()


def hold_reads(mesh, page, **faults):
    hold = Hold(page)
    mesh.reader.reader.faults = ReadFaults(before_page=hold, **faults)
    return hold


def later(coroutine):
    return asyncio.ensure_future(coroutine)


def cached(worker, hashes):
    return worker.kv.match(hashes)


# ---- what comes ---------------------------------------------------------------------------


@TRANSPORTS
async def test_a_prefix_of_another_worker_is_cached_afterwards_bit_for_bit(transport):
    hashes = chain(6)
    async with pair(transport=transport) as mesh:
        mesh.owner.compute(hashes)
        assert await mesh.fetch(hashes) == 6
        held = mesh.reader.kv.reserve(hashes, 6, 6)
        expected = torch.stack([contents(page_hash) for page_hash in hashes])
        assert torch.equal(mesh.reader.store.tensor[held.pages], expected)
        held.release()
        assert mesh.reader.fetcher.pages == 6
        await until(lambda: not mesh.owner.lender.held)
    assert mesh.way.calls == ["lend", "validate", "give_back"]


@TRANSPORTS
async def test_only_the_pages_that_are_missing_are_read(transport):
    hashes = chain(6)
    async with pair(transport=transport) as mesh:
        mesh.owner.compute(hashes[:5])
        mesh.reader.compute(hashes[:2])
        assert await mesh.fetch(hashes) == 3
        assert cached(mesh.reader, hashes) == 5
        assert not mesh.reader.wrong_pages(hashes)


async def test_nobody_is_asked_where_nothing_is_to_be_gained():
    hashes = chain(4)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        fetch = mesh.reader.fetcher.fetch
        own = msgspec.structs.replace(mesh.owner.source(4), instance="reader")
        assert await fetch(hashes, ()) == 0
        assert await fetch(hashes, (own,)) == 0, "a worker does not read from itself"
        assert await fetch(hashes, mesh.sources(4), within_s=0.0) == 0
        mesh.reader.fetcher.costs = PullCosts(tokens=1e9, seconds=1.0)
        assert await fetch(hashes, mesh.sources(4)) == 0, "computing is faster"
        mesh.reader.fetcher.costs = ALWAYS
        mesh.reader.compute(hashes[:3])
        assert await fetch(hashes, mesh.sources(3)) == 0, "nobody claims more than is here"
        assert not mesh.way.calls


async def test_the_owner_that_claims_most_is_asked_first_and_the_next_one_for_the_rest():
    hashes = chain(6)
    async with pair(owners=2) as mesh:
        mesh.owners[0].compute(hashes[:6])
        mesh.owners[1].compute(hashes[:3])
        sources = (mesh.owners[0].source(4), mesh.owners[1].source(6))
        assert await mesh.reader.fetcher.fetch(hashes, sources) == 6
        assert [mesh.ways[name].calls[0] for name in "ba"] == ["lend", "lend"]
        assert not mesh.reader.wrong_pages(hashes)


async def test_ten_prompts_with_one_prefix_are_one_fetch():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        hold = hold_reads(mesh, 2)
        prompts = [hashes[:4], *(hashes + (bytes([n]),) for n in range(9))]
        asking = [later(mesh.reader.fetcher.fetch(p, mesh.sources(6))) for p in prompts]
        await hold.begun()
        hold.let_go()
        brought = await asyncio.gather(*asking)
        assert mesh.way.calls.count("lend") <= 2, "the first wanted fewer pages than the others"
        assert cached(mesh.reader, hashes) == 6
        assert brought == [4, *[6] * 9]


# ---- what goes wrong ----------------------------------------------------------------------


async def dies(mesh):
    mesh.way.lost = True


def refuses(mesh):
    async def evict():
        mesh.owner.evict()

    mesh.way.before["lend"] = evict


def dies_before_the_loan(mesh):
    mesh.way.lost = True


def dies_before_validation(mesh):
    mesh.way.before["validate"] = lambda: dies(mesh)


def fails_inside(mesh):
    async def fail():
        raise InternalError("boom")

    mesh.way.before["lend"] = fail


def names_too_few_places(mesh):
    mesh.way.after["lend"] = lambda loan: msgspec.structs.replace(loan, page_ids=(0,))


def lends_more_than_was_asked(mesh):
    mesh.way.after["lend"] = lambda loan: msgspec.structs.replace(
        loan, num_pages=7, page_ids=tuple(range(7))
    )


def offers_an_unknown_transport(mesh):
    mesh.way.after["lend"] = lambda loan: msgspec.structs.replace(
        loan, transports=(("carrier-pigeon", "roof:1"),)
    )


def is_another_process_when_it_validates(mesh):
    async def restart():
        mesh.owner.lender._loans.clear()

    mesh.way.before["validate"] = restart


def loses_the_connection(mesh):
    mesh.reader.reader.faults = ReadFaults(lost_at=3)


def sends_wrong_bytes(mesh):
    mesh.reader.reader.faults = ReadFaults(wrong_bytes=frozenset({5}))


def has_a_broken_transport(mesh):
    def boom(page):
        raise RuntimeError("boom")

    mesh.reader.reader.faults = ReadFaults(before_page=boom)


FAULTS = {
    refuses: "refused",
    dies_before_the_loan: "lost",
    dies_before_validation: "lost",
    fails_inside: "refused",
    names_too_few_places: "refused",
    lends_more_than_was_asked: "refused",
    offers_an_unknown_transport: "no_transport",
    is_another_process_when_it_validates: "invalid",
    loses_the_connection: "lost",
    sends_wrong_bytes: "checksum",
    has_a_broken_transport: "lost",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_an_owner_that(fault):
    """... costs a computation and nothing else; the prompt's own cached pages stay."""
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        mesh.reader.compute(hashes[:1])
        fault(mesh)
        assert await mesh.fetch(hashes) == 0
        assert dict(mesh.reader.fetcher.failures) == {FAULTS[fault]: 1}
        assert cached(mesh.reader, hashes) == 1
        mesh.reader.compute(hashes)
        mesh.clock.now += 11.0
        mesh.owner.lender.expire()
        if fault is is_another_process_when_it_validates:
            mesh.owner.kv._live.pop().release()


@pytest.mark.parametrize("fault", [dies_before_the_loan, sends_wrong_bytes, refuses])
async def test_the_next_owner_is_asked_once(fault):
    hashes = chain(6)
    async with pair(owners=3) as mesh:
        for owner in mesh.owners:
            owner.compute(hashes)
        fault(mesh)
        expected = 0 if fault is sends_wrong_bytes else 6  # it is the reader's own wire
        assert await mesh.fetch(hashes) == expected
        assert mesh.ways["b"].calls
        assert not mesh.ways["c"].calls
        mesh.clock.now += 11.0
        mesh.owner.lender.expire()


async def test_an_owner_that_could_not_be_reached_is_left_alone_for_a_while():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        now = [0.0]
        mesh.reader.fetcher._clock = lambda: now[0]
        dies_before_the_loan(mesh)
        await mesh.fetch(hashes)
        mesh.way.lost = False
        assert await mesh.fetch(hashes) == 0
        assert mesh.way.calls.count("lend") == 1
        now[0] = 10.0
        assert await mesh.fetch(hashes) == 6


@pytest.mark.parametrize("method", ["lend", "validate"])
async def test_a_question_that_gets_no_answer_is_asked_again(method):
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)

        async def first_lost():
            if mesh.way.calls.count(method) == 1:
                raise DeadlineExceeded("no answer")

        mesh.way.before[method] = first_lost
        assert await mesh.fetch(hashes) == 6
        assert mesh.way.calls.count(method) == 2


@pytest.mark.parametrize("method", ["lend", "validate"])
async def test_an_owner_that_never_answers_is_waited_for_a_bounded_time(method):
    hashes = chain(6)
    async with pair(timeout_s=0.05) as mesh:
        mesh.owner.compute(hashes)
        answered = asyncio.Event()
        mesh.way.before[method] = answered.wait
        assert await mesh.fetch(hashes) == 0
        assert dict(mesh.reader.fetcher.failures) == {"timeout": 1}
        await until(lambda: not mesh.reader.kv.num_reservations)
        answered.set()
        await until(lambda: mesh.way.calls.count("give_back") >= 1)


async def test_where_the_reader_has_no_room_nobody_is_asked():
    hashes = chain(6)
    async with pair(pages=8) as mesh:
        mesh.owner.compute(hashes)
        other = mesh.reader.kv.reserve((), 0, 4)
        assert await mesh.fetch(hashes) == 0
        assert not mesh.way.calls
        assert dict(mesh.reader.fetcher.failures) == {"no_room": 1}
        other.release()
        assert await mesh.fetch(hashes) == 6


async def test_a_prompt_longer_than_the_pool_gets_what_fits():
    hashes = chain(6)
    async with pair(pages=4) as mesh:
        mesh.owner.compute(hashes)
        assert await mesh.fetch(hashes) == 4
        assert not mesh.reader.wrong_pages(hashes)


async def test_waiters_for_a_fetch_that_fails_do_not_try_again_one_by_one():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        hold = hold_reads(mesh, 0, lost_at=1)
        asking = [later(mesh.fetch(hashes)) for _ in range(10)]
        await hold.begun()
        hold.let_go()
        assert await asyncio.gather(*asking) == [0] * 10
        assert mesh.way.calls.count("lend") == 1


# ---- readers that leave -------------------------------------------------------------------


async def test_pages_of_a_cancelled_fetch_are_not_used_again_before_the_read_has_ended():
    hashes = chain(6)
    async with pair(pages=8) as mesh:
        mesh.owner.compute(hashes)
        hold = hold_reads(mesh, 3)
        asking = later(mesh.fetch(hashes))
        await hold.begun()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: mesh.reader.fetcher.failures["cancelled"] == 1)
        assert mesh.reader.kv.reserve((), 0, 3) is None, "a read may still write to six pages"
        assert mesh.reader.fetcher.active == 1
        hold.let_go()
        await until(lambda: mesh.reader.kv.available == 8)
        assert cached(mesh.reader, hashes) == 0


async def test_a_fetch_goes_on_while_anybody_waits_for_it():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        hold = hold_reads(mesh, 3)
        asking = [later(mesh.fetch(hashes)) for _ in range(3)]
        await hold.begun()
        asking[0].cancel()
        asking[1].cancel()
        await asyncio.wait(asking[:2])
        hold.let_go()
        assert await asking[2] == 6


async def test_the_end_of_a_reader_waits_for_its_reads():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        hold = hold_reads(mesh, 3)
        asking = later(mesh.fetch(hashes))
        await hold.begun()
        closing = later(mesh.reader.exchange.close())
        assert await asking == 0
        await asyncio.sleep(0)
        assert not closing.done()
        hold.let_go()
        await closing
        assert mesh.reader.kv.available == 16
        assert await mesh.fetch(hashes) == 0


# ---- loans that end under a read ----------------------------------------------------------


def owner_reuses_its_pages_during_the_read(mesh):
    """The loan's time passes while page 3 is read; the owner's pages get other contents."""

    def before_page(page):
        if page == 3:
            mesh.clock.now += 11.0
            mesh.owner.lender.expire()
            mesh.owner.evict()
            mesh.owner.compute(chain(6, b"q"))

    mesh.reader.reader.faults = ReadFaults(before_page=before_page)


async def test_contents_that_changed_under_a_slow_read_are_never_used():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        owner_reuses_its_pages_during_the_read(mesh)
        assert await mesh.fetch(hashes) == 0
        assert cached(mesh.reader, hashes) == 0
        assert dict(mesh.reader.fetcher.failures) == {"invalid": 1}


async def test_without_validation_they_would_be():
    """Shows that the test above can fail: the same, and an owner that says yes to all."""
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        owner_reuses_its_pages_during_the_read(mesh)
        mesh.way.after["validate"] = lambda answer: msgspec.structs.replace(answer, valid=True)
        assert await mesh.fetch(hashes) == 6
        assert len(mesh.reader.wrong_pages(hashes)) == 3


async def test_a_loan_is_renewed_while_a_read_takes_long():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        mesh.owner.lender._ttl_s = 0.03
        hold = hold_reads(mesh, 3)
        asking = later(mesh.fetch(hashes))
        await hold.begun()
        await until(lambda: mesh.way.calls.count("renew") >= 3)
        hold.let_go()
        assert await asking == 6


async def test_a_renewal_that_comes_too_late_ends_the_read():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        mesh.owner.lender._ttl_s = 0.03
        hold = hold_reads(mesh, 3)

        async def too_late():
            mesh.clock.now += 1.0

        mesh.way.before["renew"] = too_late
        asking = later(mesh.fetch(hashes))
        assert await asking == 0, "known before the read has ended"
        assert dict(mesh.reader.fetcher.failures) == {"invalid": 1}
        hold.let_go()


async def test_renewals_that_are_lost_do_no_harm():
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        mesh.owner.lender._ttl_s = 0.03
        hold = hold_reads(mesh, 3)

        async def lost():
            raise WorkerLost("gone")

        mesh.way.before["renew"] = lost
        asking = later(mesh.fetch(hashes))
        await until(lambda: mesh.way.calls.count("renew") >= 2)
        hold.let_go()
        assert await asking == 6


async def test_the_owner_ends_loans_by_itself():
    """The reader has died; a timer on the owner's loop gives the pages back."""
    hashes = chain(6)
    async with pair() as mesh:
        mesh.owner.compute(hashes)
        mesh.owner.lender._ttl_s = 0.02
        await mesh.owner.exchange.lend(
            LoanRequest(loan_id="dead", page_format=FORMAT, hashes=hashes)
        )
        assert mesh.owner.kv.available == 10
        mesh.clock.now += 1.0
        await until(lambda: mesh.owner.kv.available == 16)


# ---- the wire -----------------------------------------------------------------------------


async def order_at(mesh, hashes, **changes):
    """A loan of ``hashes``, and an order to read it into the reader's pages 0, 1, ..."""
    loan = await mesh.owner.exchange.lend(
        LoanRequest(loan_id="loan", page_format=FORMAT, hashes=hashes)
    )
    fields = {
        "loan_id": "loan",
        "address": loan.transports[0][1],
        "first_page": 0,
        "page_ids": loan.page_ids,
        "destinations": tuple(range(len(hashes))),
    }
    return ReadOrder(**(fields | changes))


async def read(mesh, order):
    await asyncio.to_thread(mesh.reader.reader.read, order, Stop())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loan_id": "other"}, "page 0 is not lent by loan 'other'"),
        ({"loan_id": "x" * 65}, "longer than 64 bytes"),
        ({"first_page": 5}, "page 5 is not lent"),
    ],
)
async def test_pages_that_are_not_lent_are_not_served(change, words):
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(chain(4))
        order = await order_at(mesh, chain(4), **change)
        with pytest.raises(TransferFailed, match=words):
            await read(mesh, order)
        mesh.clock.now += 11.0
        mesh.owner.lender.expire()


async def test_a_lapsed_loan_is_not_served():
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(chain(4))
        order = await order_at(mesh, chain(4))
        await read(mesh, order)
        mesh.clock.now += 11.0
        with pytest.raises(TransferFailed, match="is not lent"):
            await read(mesh, order)
        mesh.owner.lender.expire()


class Flipping:
    """A page server's network that changes one byte."""

    def __init__(self, address, at):
        self.target, self.at = address, at
        self.address = ""
        self.over = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        await self.over.wait()
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader, writer):
        host, _, port = self.target.rpartition(":")
        up, down = await asyncio.open_connection(host, int(port))
        passing = later(self._pass(reader, down))
        seen = 0
        try:
            while data := bytearray(await up.read(1 << 16)):
                if seen <= self.at < seen + len(data):
                    data[self.at - seen] ^= 1
                seen += len(data)
                writer.write(data)
        finally:
            passing.cancel()
            for end in (writer, down):
                end.close()
            self.over.set()

    async def _pass(self, reader, down):
        while data := await reader.read(1 << 16):
            down.write(data)


PAGE_BYTES = FORMAT.page_layer_bytes * FORMAT.num_layers


@pytest.mark.parametrize("at", [0, 5, 10, 14, 22, 26, 28, 500, 27 + PAGE_BYTES, 40 + PAGE_BYTES])
async def test_a_byte_that_changes_on_the_way_is_noticed(at):
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(chain(4))
        order = await order_at(mesh, chain(4))
        async with Flipping(order.address, at) as network:
            order = await order_at(mesh, chain(4), address=network.address)
            with pytest.raises(WrongBytes):
                await read(mesh, order)
        mesh.clock.now += 11.0
        mesh.owner.lender.expire()


async def test_bytes_that_are_no_request_end_their_connection_and_nothing_else():
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(chain(4))
        address = mesh.owner.lender.transports[0][1]
        host, _, port = address.rpartition(":")
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"PDPL" + bytes(200)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(junk)
            with suppress(OSError):  # it may be cut at the first byte that is wrong
                writer.write_eof()
                await reader.read()
            writer.close()
        assert await mesh.fetch(chain(4)) == 4


async def test_a_stopped_read_ends_at_once():
    """The owner accepts and says nothing."""
    async with pair(transport="tcp") as mesh:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            order = ReadOrder("loan", f"127.0.0.1:{silent.getsockname()[1]}", 0, (0,), (0,))
            stop = Stop()
            reading = later(asyncio.to_thread(mesh.reader.reader.read, order, stop))
            stop.ask()
            with pytest.raises(TransferFailed, match="stopped"):
                await asyncio.wait_for(reading, PATIENCE)


async def test_a_dead_owner_is_a_failed_read():
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(chain(6))
        mesh.way.after["lend"] = lambda loan: msgspec.structs.replace(
            loan, transports=(("tcp", "127.0.0.1:1"),)
        )
        assert await mesh.fetch(chain(6)) == 0
        assert dict(mesh.reader.fetcher.failures) == {"lost": 1}


def test_only_addresses_with_a_port_are_reached():
    reader = TcpPageReader.__new__(TcpPageReader)
    assert reader.reaches("host:12")
    assert not reader.reaches("shm:/pool")


async def served(exchange):
    """A gRPC server for ``exchange``, and its address."""
    server = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
    port = server.add_insecure_port("127.0.0.1:0")
    add_service(server, "decode", exchange.methods())
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_owners_are_asked_by_rpc_and_a_killed_one_costs_little():
    hashes = chain(6)
    async with pair(transport="tcp") as mesh:
        mesh.owner.compute(hashes)
        server, address = await served(mesh.owner.exchange)
        owners = Owners()
        mesh.reader.fetcher._owner_at = owners
        source = msgspec.structs.replace(mesh.owner.source(6), address=address)
        assert await mesh.reader.fetcher.fetch(hashes, (source,)) == 6
        await until(lambda: not mesh.owner.lender.held)
        mesh.reader.kv.clear()
        await server.stop(grace=0.0)
        assert await mesh.reader.fetcher.fetch(hashes, (source,)) == 0
        assert dict(mesh.reader.fetcher.failures) == {"lost": 1}
        await owners.close()


# ---- what it is worth ---------------------------------------------------------------------


def test_pulling_pays_where_it_is_faster_than_computing():
    costs = PullCosts(overhead_s=0.01, bytes_per_s=1e6, measured_at=0.0, tokens=1000.0, seconds=1.0)
    assert costs.pull_s(10_000, 0.0) == pytest.approx(0.02)
    assert costs.compute_s(SIZE) == pytest.approx(0.016)
    assert not costs.worth(1, 10_000, SIZE, 0.0)
    assert costs.worth(4, 10_000, SIZE, 0.0), "the overhead is paid once"
    assert not costs.worth(0, 10_000, SIZE, 0.0)


def test_what_was_measured_counts_more_the_newer_it_is():
    costs = PullCosts().after_step(100, 1.0)
    for _ in range(30):
        costs = costs.after_step(100, 1.0).after_read(1_000_000, 1.0, 50.0)
    assert costs.compute_s(100) == pytest.approx(1.0, rel=0.01)
    assert costs.bandwidth(50.0) == pytest.approx(1e6, rel=0.1)
    assert costs.bandwidth(1000.0) == pytest.approx(5e8, rel=0.1), "a slow time is forgotten"


async def test_pulls_are_counted_by_how_they_went():
    hashes = chain(6)
    async with pair() as mesh:
        status = WorkerStatus(
            worker_id="w-0",
            instance="reader",
            role="prefill",
            state="ready",
            page_format=FORMAT,
            pool=mesh.reader.kv.status(),
            queued=0,
            running=0,
        )
        metrics = WorkerMetrics("tiny", "w-0", lambda: status)
        mesh.reader.fetcher.observe = PullMetrics(metrics).observe
        mesh.owner.compute(hashes)
        assert await mesh.fetch(hashes) == 6
        mesh.reader.kv.clear()
        loses_the_connection(mesh)
        assert await mesh.fetch(hashes) == 0
        assert metrics.value("pdmesh_pulled_pages_total") == 6
        assert metrics.value("pdmesh_pulled_bytes_total") == 6 * PAGE_BYTES
        assert metrics.value("pdmesh_pull_duration_seconds_count") == 1
        assert metrics.value("pdmesh_pull_failures_total", reason="lost") == 1
