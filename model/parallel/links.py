"""Connections between the ranks of a group, each in a process of its own: TCP, any host.

Every rank listens; of two ranks the one with the higher number dials, again and again until it is
there. A thread for each connection reads all that comes, so nobody's sending waits for anybody's
computing. A connection on which nothing came for a while (each side says at least that it is alive)
is closed: a process that stands still is lost like one that died.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from pdmesh.model.parallel.exchange import Channel, Message
from pdmesh.model.parallel.frames import (
    BadFrame,
    FrameType,
    Hello,
    pack,
    pack_message,
    read_frame,
    unpack_message,
)
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)

_REDIAL_S = 0.1
_HANDSHAKE_S = 5.0


@dataclass(frozen=True)
class Events:
    """What is told of a connection, each on the thread that reads it.

    Attributes:
        connected: there is one to this rank.
        word: the header of its frame of type BEGIN.
        plan: the header of its frame of type PLAN.
        message: one of its messages.
        lost: the connection is gone; nothing more comes by it.
    """

    connected: Callable[[int], None]
    word: Callable[[int, bytes], None]
    plan: Callable[[int, bytes], None]
    message: Callable[[int, Channel, Message], None]
    lost: Callable[[int, str], None]


class _Link:
    """One connection."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.sock = sock
        self.rank = rank
        self.heard = time.monotonic()
        self._sending = threading.Lock()

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Raises OSError where it is closed."""
        with self._sending:
            for piece in pieces:
                self.sock.sendall(piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Links:
    """All connections of one rank.

    Args:
        hello: who this rank is.
        addresses: "host:port" of every rank, in order; it listens at its own.
        events: see there.
        silence_s: seconds after which a silent connection is closed.
    """

    def __init__(
        self, hello: Hello, addresses: Sequence[str], events: Events, silence_s: float = 10.0
    ) -> None:
        self._hello = hello
        self._addresses = list(addresses)
        self._events = events
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = threading.Event()
        self._server: socket.socket | None = None
        self._refused: dict[int, str] = {}
        self.sent_bytes = 0
        """In messages, so far."""

    def start(self) -> None:
        """Begins to listen and to dial.

        Raises:
            ConfigError: the own address cannot be listened at.
        """
        host, port = _split(self._addresses[self._hello.rank])
        try:
            self._server = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            raise ConfigError(
                f"rank {self._hello.rank} cannot listen at "
                f"{self._addresses[self._hello.rank]}: {error.strerror or error}"
            ) from error
        self._spawn(self._accept, "ep-accept")
        self._spawn(self._watch, "ep-watch")
        for rank in range(self._hello.rank):
            self._spawn(partial(self._dial, rank), f"ep-dial-{rank}")

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        self._closed.set()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    def say(self, ranks: Sequence[int], word: msgspec.Struct) -> None:
        """Sends a BEGIN frame to some ranks; those that are lost hear nothing."""
        frame = pack(FrameType.BEGIN, word)
        for rank in ranks:
            self._send(rank, [frame])

    def tell(self, ranks: Iterable[int], plan: msgspec.Struct) -> None:
        """Sends a PLAN frame to some ranks."""
        frame = pack(FrameType.PLAN, plan)
        for rank in ranks:
            self._send(rank, [frame])

    def post(self, rank: int, channel: Channel, message: Message) -> None:
        """Sends a message, unless the rank is lost."""
        pieces = pack_message(channel, message)
        self.sent_bytes += sum(len(piece) for piece in pieces)
        self._send(rank, pieces)

    def drop(self, rank: int) -> None:
        """Closes the connection to a rank; it may come back."""
        with self._lock:
            link = self._links.get(rank)
        if link is not None:
            link.close()

    @property
    def refusals(self) -> dict[int, str]:
        """Ranks that were refused, or refused this one, and why."""
        return dict(self._refused)

    # ---- threads --------------------------------------------------------------------------

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _accept(self) -> None:
        server = self._server
        assert server is not None
        while not self._closed.is_set():
            try:
                sock, _ = server.accept()
            except OSError:
                return
            self._spawn(partial(self._serve, sock, None), "ep-link")

    def _dial(self, rank: int) -> None:
        address = _split(self._addresses[rank])
        while not self._closed.wait(_REDIAL_S):
            try:
                sock = socket.create_connection(address, _HANDSHAKE_S)
            except OSError:
                continue
            self._serve(sock, rank)

    def _serve(self, sock: socket.socket, expected: int | None) -> None:
        """A connection from its handshake to its end."""
        with sock:
            try:
                sock.settimeout(_HANDSHAKE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(pack(FrameType.HELLO, self._hello))
                rank = self._greeted(sock, expected)
                sock.settimeout(None)
            except (OSError, EOFError, BadFrame) as error:
                event(log, "rank_handshake_failed", logging.DEBUG, error=error)
                return
            if rank is None:
                return
            link = _Link(sock, rank)
            with self._lock:
                old = self._links.get(rank)
                if old is not None or self._closed.is_set():
                    refused = old  # its end is still being noticed
                else:
                    refused, self._links[rank] = None, link
            if refused is not None or self._closed.is_set():
                if refused is not None:
                    refused.close()
                return
            event(log, "rank_connected", rank=rank)
            self._events.connected(rank)
            why = self._read(link)
            if not self._closed.is_set():
                event(log, "rank_lost", logging.WARNING, rank=rank, reason=why)
            self._events.lost(rank, why)  # before another one to this rank can begin
            with self._lock:
                del self._links[rank]

    def _greeted(self, sock: socket.socket, expected: int | None) -> int | None:
        """The other's number; None, and noted, where it is not one to work with."""
        kind, header, _ = read_frame(sock)
        if kind != FrameType.HELLO:
            raise BadFrame(f"{kind.name} before HELLO")
        try:
            theirs = msgspec.msgpack.decode(header, type=Hello)
        except msgspec.DecodeError as error:
            raise BadFrame(f"malformed HELLO: {error}") from error
        why = self._mismatch(theirs, expected)
        if why is None:
            self._refused.pop(theirs.rank, None)
            return theirs.rank
        if self._refused.get(theirs.rank) != why:
            self._refused[theirs.rank] = why
            event(log, "rank_refused", logging.WARNING, rank=theirs.rank, reason=why)
        return None

    def _mismatch(self, theirs: Hello, expected: int | None) -> str | None:
        mine = self._hello
        if theirs.group != mine.group or theirs.size != mine.size:
            return (
                f"it belongs to group {theirs.group!r} of {theirs.size} ranks, "
                f"this one to {mine.group!r} of {mine.size}"
            )
        if theirs.digest != mine.digest:
            return "its model, arithmetic, wire format, largest step or placement is another one"
        right = theirs.rank == expected if expected is not None else theirs.rank > mine.rank
        if not right or theirs.rank >= mine.size:
            return f"rank {theirs.rank} answers where another one belongs"
        return None

    def _read(self, link: _Link) -> str:
        """Until the end of a connection; why it ended."""
        events, rank = self._events, link.rank
        try:
            while True:
                kind, header, body = read_frame(link.sock)
                link.heard = time.monotonic()
                if kind == FrameType.MESSAGE:
                    events.message(rank, *unpack_message(header, body))
                elif kind == FrameType.BEGIN:
                    events.word(rank, header)
                elif kind == FrameType.PLAN:
                    events.plan(rank, header)
        except (EOFError, OSError):
            return "its connection has ended"
        except BadFrame as error:
            return str(error)
        except Exception as error:
            log.exception("a frame of rank %d could not be taken", rank)
            return f"a mistake here: {error}"

    def _watch(self) -> None:
        """Says that this rank is alive, and closes what has been silent."""
        alive = [pack(FrameType.ALIVE)]
        while not self._closed.wait(self._silence_s / 4):
            with self._lock:
                links = list(self._links.values())
            for link in links:
                if time.monotonic() - link.heard > self._silence_s:
                    event(log, "rank_silent", logging.WARNING, rank=link.rank)
                    link.close()
                else:
                    self._spawn(partial(self._try, link, alive), "ep-alive")

    def _send(self, rank: int, pieces: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            link = self._links.get(rank)
        if link is not None:
            self._try(link, pieces)

    def _try(self, link: _Link, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            link.send(pieces)
        except OSError:
            link.close()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
