"""Transfers over real TCP connections, with lost, slow, hostile and dying peers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from child_path import python_path
from kvtransfer_rig import FORMAT, PATIENCE, Proxy, Rig, fin_of, wide_format

from pdmesh.kvtransfer import frames
from pdmesh.kvtransfer.checks import checksum
from pdmesh.kvtransfer.frames import BadFrame, Hello, Kind, pack, pack_crcs, to_frame, write_header
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.kvtransfer.stream_link import send_all
from pdmesh.kvtransfer.tcp import TcpDialer, TcpListener
from pdmesh.kvtransfer.transport import Open, Write
from pdmesh.wire.codec import encode
from pdmesh.wire.errors import ConfigError, Incompatible, InvalidRequest, TransferFailed
from pdmesh.wire.messages import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def tcp_rig(page_format=FORMAT, proxy=None, **options):
    listener = TcpListener(page_format)
    if proxy is not None:
        options["route"] = proxy.route
    rig = Rig(listener, page_format, **options)
    try:
        yield rig
    finally:
        rig.close()
        if proxy is not None:
            proxy.close()
        rig.end()


def connect(rig: Rig) -> socket.socket:
    host, _, port = rig.receiver.addresses[0][1].rpartition(":")
    sock = socket.create_connection((host, int(port)), PATIENCE)
    sock.settimeout(PATIENCE)
    return sock


def closed_by_peer(sock: socket.socket) -> bool:
    """Reads until the peer closes (or resets); what it said before is dropped."""
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_pages_arrive_whole_over_tcp():
    with tcp_rig() as rig:
        lease = rig.lease(pages=(3, 1, 5), cached=1)
        transfer = rig.sender.open(lease)
        rig.push_all(transfer)
        rig.finish(transfer, token=11)
        assert transfer.settled
        fin = rig.wait()
        assert (fin.first_tokens, fin.num_writes, fin.last_hidden) == ((11,), 6, b"hidden")
        assert rig.arrived(lease, (3, 1, 5))
        assert rig.receiver.cancel("a")


def test_a_tensor_may_be_pushed_contiguous_or_not():
    with tcp_rig() as rig:
        lease = rig.lease(pages=(2,))
        transfer = rig.sender.open(lease)
        transfer.push(0, 0, rig.source.tensor[0, 0])
        transfer.push(0, 1, rig.source.tensor[0, 1].T.contiguous().T)
        rig.finish(transfer)
        assert rig.arrived(lease, (2,))


def test_no_pages_at_all_still_conclude():
    with tcp_rig() as rig:
        transfer = rig.sender.open(rig.lease(pages=(), cached=2))
        rig.finish(transfer)
        assert rig.wait().num_writes == 0


def test_two_transfers_share_one_connection_at_once():
    with tcp_rig() as rig:
        leases = [rig.lease("a", (0, 1, 2)), rig.lease("b", (3, 4, 5))]
        transfers = [rig.sender.open(lease) for lease in leases]
        for layer in range(2):
            for page in range(3):
                for transfer in transfers:
                    rig.push(transfer, page, layer)
        for transfer in reversed(transfers):
            rig.finish(transfer)
        assert rig.arrived(leases[0], (0, 1, 2))
        assert rig.arrived(leases[1], (3, 4, 5))
        assert len(rig.sender._links) == 1


def test_many_transfers_from_many_threads_all_arrive():
    with tcp_rig() as rig:
        failures: list[BaseException] = []

        def work(page: int) -> None:
            try:
                for round_number in range(1, 11):
                    lease = rig.lease(f"p{page}", (page,), generation=round_number)
                    transfer = rig.sender.open(lease)
                    rig.push_all(transfer)
                    rig.finish(transfer)
                    rig.wait(f"p{page}")
                    assert rig.arrived(lease, (page,))
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(page,)) for page in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert failures == []


def test_one_transfer_that_aborts_leaves_the_other_on_its_connection_alone():
    proxy = Proxy()
    with tcp_rig(wide_format(4096), proxy) as rig:
        kept, dropped = rig.lease("kept", (0, 1)), rig.lease("dropped", (2, 3))
        transfers = rig.sender.open(dropped), rig.sender.open(kept)
        proxy.hold()
        rig.push_all(transfers[0])
        rig.push_all(transfers[1])
        transfers[0].start_abort("cancelled")
        proxy.release()
        rig.finish(transfers[1])
        assert rig.arrived(kept, (0, 1))
        with pytest.raises(TransferFailed, match="the sender gave up: cancelled"):
            rig.wait("dropped")
        assert rig.receiver.cancel("dropped")


def test_a_cancel_by_the_receiver_stops_the_sender_and_no_later_write_lands():
    proxy = Proxy()
    with tcp_rig(wide_format(4096), proxy) as rig:
        transfer = rig.sender.open(rig.lease(pages=(2, 3, 4, 5)))
        proxy.hold()
        rig.push_all(transfer)
        assert rig.receiver.cancel("a"), "TCP writes are fenced at once"
        rig.target.tensor.fill_(5.0)
        proxy.release()
        with pytest.raises(TransferFailed, match="refused"):
            rig.finish(transfer)
        assert bool((rig.target.tensor == 5.0).all())


def test_a_sender_that_dies_in_the_middle_is_noticed_by_its_closed_connection():
    script = """
import sys, torch
from kvtransfer_rig import FORMAT
from pdmesh.kvtransfer.sender import TransferSender
from pdmesh.wire.codec import decode
from pdmesh.wire.messages import Lease
lease = decode(bytes.fromhex(sys.argv[1]), Lease)
transfer = TransferSender(FORMAT).open(lease)
transfer.push(0, 0, torch.ones(4, 3))
with transfer._changed:
    transfer._changed.wait_for(lambda: transfer._state.in_flight == 0)
print("pushed", flush=True)
sys.stdin.read()
"""
    with tcp_rig() as rig:
        lease = rig.lease(pages=(4, 5))
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", script, encode(lease).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path("tests"), "OMP_NUM_THREADS": "1"},
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"pushed\n"
            child.send_signal(signal.SIGKILL)
            with pytest.raises(TransferFailed, match="connection was lost after [01] of 4 writes"):
                rig.wait()
        assert rig.receiver.cancel("a")


def test_a_receiver_that_dies_fails_the_sender():
    with tcp_rig() as rig:
        transfer = rig.sender.open(rig.lease())
        rig.push(transfer, 0, 0)
        rig.receiver.close()
        with pytest.raises(TransferFailed):
            rig.finish(transfer)
        assert transfer.settled
        with pytest.raises(TransferFailed):
            rig.wait()


def test_an_acknowledgement_that_never_comes_ends_in_failure_and_frees_the_pages():
    proxy = Proxy()
    with tcp_rig(proxy=proxy) as rig:
        transfer = rig.sender.open(rig.lease())
        proxy.hold()
        rig.push_all(transfer)
        with pytest.raises(TransferFailed, match=r"no acknowledgement within 0\.05 s"):
            transfer.finish(fin_of(transfer), timeout=0.05)
        assert transfer.settled


def test_the_sender_connects_again_after_the_receiver_came_back_on_its_port():
    with tcp_rig() as rig:
        rig.finish(rig.sender.open(rig.lease(pages=())))
        port = int(rig.addresses[0][1].rpartition(":")[2])
        (link,) = rig.sender._links.values()
        rig.receiver.close()
        link.join()
        again = Rig(TcpListener(FORMAT, port=port))
        try:
            lease = again.lease("again", pages=(6,))
            transfer = rig.sender.open(lease)
            rig.push_all(transfer)
            rig.finish(transfer)
            assert again.arrived(lease, (6,))
        finally:
            rig.sender.close()
            again.close()


def test_nobody_listening_is_a_failed_transfer():
    with tcp_rig() as rig:
        lease = rig.lease()
        rig.receiver.close()
        with pytest.raises(TransferFailed, match="cannot be reached"):
            rig.sender.open(lease)


@pytest.mark.parametrize("offset_in_frame", [frames.HEADER_BYTES + 5, 80])
def test_a_flipped_bit_fails_the_transfer_and_installs_nothing(offset_in_frame):
    """In the payload it costs the transfer, in the header (here: the page) the connection."""
    hello = sum(map(len, pack(Kind.HELLO, encode(Hello(PROTOCOL_VERSION, FORMAT)))))
    opening = sum(map(len, to_frame(Open("a", 1))))
    flip_at = hello + opening + offset_in_frame

    def change(offset: int, data: bytearray) -> bytearray:
        if offset <= flip_at < offset + len(data):
            data[flip_at - offset] ^= 1
        return data

    proxy = Proxy(change)
    with tcp_rig(proxy=proxy) as rig:
        transfer = rig.sender.open(rig.lease())
        rig.push_all(transfer)
        with pytest.raises(TransferFailed):
            rig.finish(transfer)
        with pytest.raises(TransferFailed, match="checksum"):
            rig.wait()
        assert rig.receiver.cancel("a")
        assert rig.receiver.salvage("a") == 0


def test_a_peer_of_one_megabyte_per_second_gets_everything():
    proxy = Proxy(bytes_per_second=1_000_000)
    with tcp_rig(wide_format(2048), proxy) as rig:
        lease = rig.lease(pages=(0, 1, 2, 3))
        transfer = rig.sender.open(lease)
        rig.push_all(transfer)
        rig.finish(transfer)
        assert rig.arrived(lease, (0, 1, 2, 3))


def test_a_push_waits_while_the_queue_is_full_and_goes_on_when_there_is_room():
    fmt = wide_format(1 << 16)
    proxy = Proxy()
    with tcp_rig(fmt, proxy, dialers=[TcpDialer(max_queued_bytes=fmt.page_layer_bytes)]) as rig:
        lease = rig.lease(pages=tuple(range(8)))
        transfer = rig.sender.open(lease)
        proxy.hold()
        pusher = threading.Thread(target=rig.push_all, args=(transfer,))
        pusher.start()
        pusher.join(0.2)
        assert pusher.is_alive(), "16 MiB went into a connection that takes nothing"
        proxy.release()
        pusher.join(PATIENCE)
        rig.finish(transfer)
        assert rig.arrived(lease, range(8))


def test_an_abort_wakes_a_push_that_waits_behind_another_transfer():
    fmt = wide_format(1 << 16)
    proxy = Proxy()
    with tcp_rig(fmt, proxy, dialers=[TcpDialer(max_queued_bytes=fmt.page_layer_bytes)]) as rig:
        big, small = rig.lease("big", range(7)), rig.lease("small", (7,))
        first, second = rig.sender.open(big), rig.sender.open(small)
        proxy.hold()
        pushers = [threading.Thread(target=rig.push_all, args=(it,)) for it in (first, second)]
        pushers[0].start()
        pushers[0].join(0.2)
        pushers[1].start()
        second.abort("cancelled")
        pushers[1].join(PATIENCE)
        assert not pushers[1].is_alive()
        assert pushers[0].is_alive(), "the connection was to be full all the while"
        proxy.release()
        pushers[0].join(PATIENCE)
        rig.finish(first)
        assert rig.arrived(big, range(7))
        assert rig.receiver.cancel("small")


def test_an_abort_gives_up_the_connection_to_a_peer_that_takes_nothing():
    fmt = wide_format(1 << 20)
    proxy = Proxy()
    with tcp_rig(fmt, proxy, num_pages=1) as rig:
        transfer = rig.sender.open(rig.lease(pages=(0,)))
        (link,) = rig.sender._links.values()
        rig.wait_opened()
        proxy.hold()
        rig.push(transfer, 0, 0)
        with link._changed:
            assert link._changed.wait_for(lambda: not link._queue, PATIENCE)
        transfer.abort("cancelled", grace=0.05)
        assert transfer.settled, "16 MiB are under way and will never be taken"
        assert link.closed
        proxy.release()
        with pytest.raises(TransferFailed):
            rig.wait()


def test_a_kernel_that_takes_a_few_bytes_at_a_time_gets_them_all_in_order():
    class Trickle:
        def __init__(self) -> None:
            self.got = bytearray()

        def sendmsg(self, parts: list[memoryview]) -> int:
            taken = b"".join(parts)[:7]
            self.got += taken
            return len(taken)

    sock = Trickle()
    parts = [bytes([n]) * n for n in range(20)]
    send_all(sock, parts)
    assert sock.got == b"".join(parts)


JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "cut header": frames.MAGIC + b"\x01",
    "huge length": b"".join(pack(Kind.HELLO, b""))[:80] + b"\xff" * 16,
    "other version": frames.MAGIC + b"\x09" + bytes(frames.HEADER_BYTES),
    "first frame is no greeting": b"".join(to_frame(Open("a", 1))),
    "greeting without meaning": b"".join(pack(Kind.HELLO, b"\xc1")),
    "greeting of the wrong shape": b"".join(pack(Kind.HELLO, msgspec.msgpack.encode({"a": 1}))),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_on_the_port_closes_its_connection_with_one_line_and_hurts_nobody(name, caplog):
    caplog.set_level(logging.WARNING, "pdmesh.kvtransfer")
    with tcp_rig() as rig:
        lease = rig.lease()
        transfer = rig.sender.open(lease)
        rig.push(transfer, 0, 0)
        with connect(rig) as sock:
            sock.sendall(JUNK[name])
            with suppress(OSError):  # the peer may have closed already
                sock.shutdown(socket.SHUT_WR)
            assert closed_by_peer(sock)
        rig.push(transfer, 1, 0)
        for page, layer in ((2, 0), (0, 1), (1, 1), (2, 1)):
            rig.push(transfer, page, layer)
        rig.finish(transfer)
        assert rig.arrived(lease, (3, 1, 5))
        rig.wait()
    lines = [r for r in caplog.records if r.getMessage().startswith("connection_")]
    assert len(lines) == 1


def greeted(rig: Rig) -> socket.socket:
    sock = connect(rig)
    for part in pack(Kind.HELLO, encode(Hello(PROTOCOL_VERSION, FORMAT))):
        sock.sendall(part)
    reply = sock.recv(frames.HEADER_BYTES, socket.MSG_WAITALL)
    header = frames.parse_header(reply, 0)
    assert header.kind is Kind.WELCOME
    sock.recv(header.length, socket.MSG_WAITALL)
    return sock


def write_frame(lease_id: str, page: int, data: memoryview, generation: int = 1) -> bytes:
    write = Write(lease_id, generation, page, 0, (data,))
    return write_header(write) + bytes(data) + pack_crcs([checksum(data)])


def test_a_listener_is_closed_while_a_connection_is_just_accepted(monkeypatch):
    """The thread that greets it is known to who closes before it runs."""
    rig, failed = Rig(TcpListener(FORMAT)), []
    real = threading.Thread.start

    def closing():
        try:
            rig.receiver.close()
        except RuntimeError as error:
            failed.append(error)

    closer = threading.Thread(target=closing)

    def start(thread):
        if thread.name.startswith("kv-greet"):
            real(closer)
            closer.join(0.3)  # where it does not wait for this thread, it fails meanwhile
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with connect(rig) as sock:
        assert closed_by_peer(sock)
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert failed == []
    rig.end()


def test_a_greeted_peer_that_sends_junk_later_fails_only_its_own_leases():
    with tcp_rig() as rig:
        rig.lease("bad", (0,))
        good = rig.lease("good", (1,))
        transfer = rig.sender.open(good)
        with greeted(rig) as sock:
            sock.sendall(b"".join(to_frame(Open("bad", 1))))
            page = memoryview(bytes(FORMAT.page_layer_bytes))
            sock.sendall(write_frame("good", 0, page))
            sock.sendall(b"\x00" * 200)
            assert closed_by_peer(sock)
        with pytest.raises(TransferFailed, match="connection was lost after 0 of 2 writes"):
            rig.wait("bad")
        rig.push_all(transfer)
        rig.finish(transfer)
        assert rig.arrived(good, (1,)), "a stranger wrote into the lease"


def test_a_write_outside_of_the_lease_is_refused_and_fails_it():
    with tcp_rig() as rig:
        rig.lease("a", (1,))
        page = memoryview(b"\x01" * FORMAT.page_layer_bytes)
        with greeted(rig) as sock:
            sock.sendall(b"".join(to_frame(Open("a", 1))) + write_frame("a", 4_000_000, page))
            with pytest.raises(TransferFailed, match="not part of the lease"):
                rig.wait()
        assert rig.target.tensor.count_nonzero() == 0


def test_a_write_of_another_length_ends_its_connection():
    with tcp_rig() as rig:
        rig.lease("a", (1,))
        with greeted(rig) as sock:
            sock.sendall(b"".join(to_frame(Open("a", 1))))
            sock.sendall(write_frame("a", 0, memoryview(b"short")))
            with pytest.raises(TransferFailed, match="a WRITE frame of 9 bytes"):
                rig.wait()


def test_another_protocol_version_is_refused_naming_both():
    with tcp_rig() as rig, connect(rig) as sock:
        sock.sendall(b"".join(pack(Kind.HELLO, encode(Hello(PROTOCOL_VERSION + 6, FORMAT)))))
        header = frames.parse_header(sock.recv(frames.HEADER_BYTES, socket.MSG_WAITALL), 0)
        text = sock.recv(header.length, socket.MSG_WAITALL).decode()
        assert header.kind is Kind.REFUSED
        assert text == (
            f"the receiver speaks protocol version {PROTOCOL_VERSION},"
            f" the sender version {PROTOCOL_VERSION + 6}"
        )


def test_another_page_format_is_refused_at_the_handshake_naming_both():
    other = wide_format(8)
    with tcp_rig() as rig:
        address = rig.addresses[0][1]
        with pytest.raises(Incompatible, match="latent_width is 3 here and 8 there"):
            TcpDialer().dial(address, other, rig.sender)


def test_a_sender_of_another_page_format_refuses_the_lease_before_it_connects():
    with tcp_rig() as rig:
        sender = TransferSender(wide_format(8))
        with pytest.raises(Incompatible, match="latent_width is 8 here and 3 there"):
            sender.open(rig.lease())
        sender.close()


def test_something_else_that_listens_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransferFailed, match="is no page receiver"):
            TcpDialer().dial(address, FORMAT, TransferSender())
        thread.join(PATIENCE)


def test_an_address_that_cannot_be_bound_is_a_configuration_error():
    with tcp_rig() as rig:
        port = int(rig.addresses[0][1].rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen for pages on 127.0.0.1:{port}"):
            Rig(TcpListener(FORMAT, port=port))


def test_a_page_format_that_does_not_fit_the_store_is_a_configuration_error():
    with pytest.raises(ConfigError, match="the store 48"):
        Rig(TcpListener(wide_format(8)))


def test_senders_are_told_the_advertised_host():
    rig = Rig(TcpListener(FORMAT, host="0.0.0.0", advertise="127.0.0.1"))
    assert rig.addresses[0][1].startswith("127.0.0.1:")
    rig.finish(rig.sender.open(rig.lease(pages=())))
    rig.close()


def test_a_lease_id_that_does_not_fit_a_frame_is_refused():
    with pytest.raises(InvalidRequest, match="longer than 64 bytes"):
        to_frame(Open("x" * 65, 1))


def test_every_header_with_one_bit_flipped_is_rejected():
    page = memoryview(bytes(FORMAT.page_layer_bytes))
    header = write_header(Write("lease", 3, 7, 1, (page,)))
    assert frames.parse_header(header, FORMAT.page_layer_bytes).page == 7
    for bit in range(len(header) * 8):
        broken = bytearray(header)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            frames.parse_header(broken, FORMAT.page_layer_bytes)
