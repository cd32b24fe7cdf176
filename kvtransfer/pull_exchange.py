"""Pulls of one worker, both sides: it lends cached pages and fetches those of others."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from pdmesh.kvcache.manager import KvManager
from pdmesh.kvcache.store import LatentStore
from pdmesh.kvtransfer.pull_attempt import Owner
from pdmesh.kvtransfer.pull_fetcher import PULL_S, PrefixFetcher
from pdmesh.kvtransfer.pull_lender import LOAN_S, PageLender
from pdmesh.kvtransfer.pull_reader import PageReader, PageServer
from pdmesh.kvtransfer.pull_tcp import TcpPageReader, TcpPageServer
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.messages import PageSource
from pdmesh.wire.pulls import Loan, LoanAnswer, LoanQuestion, LoanRequest
from pdmesh.wire.rpc import Client, Method

ASK_S = 1.0
"""Longest wait for one answer of an owner, seconds."""
_MAX_PEERS = 64
Transport = tuple[Callable[[PageLender], PageServer], PageReader]


class RpcOwner:
    """An owner behind its internal RPC service."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def lend(self, request: LoanRequest) -> Loan:
        return await self._client.unary("LendPages", request, Loan, timeout=ASK_S)

    async def renew(self, question: LoanQuestion) -> LoanAnswer:
        return await self._client.unary("RenewLoan", question, LoanAnswer, timeout=ASK_S)

    async def validate(self, question: LoanQuestion) -> LoanAnswer:
        return await self._client.unary("ValidateLoan", question, LoanAnswer, timeout=ASK_S)

    async def give_back(self, question: LoanQuestion) -> LoanAnswer:
        return await self._client.unary("ReturnLoan", question, LoanAnswer, timeout=ASK_S)


class Owners:
    """Connections to other workers, as many as are in use lately."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], Client] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def __call__(self, source: PageSource) -> Owner:
        """How ``source`` is asked."""
        key = (source.address, source.role)
        client = self._clients.pop(key, None) or Client(source.address, source.role)
        self._clients[key] = client
        if len(self._clients) > _MAX_PEERS:
            _, oldest = self._clients.popitem(last=False)
            closing = asyncio.get_running_loop().create_task(oldest.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return RpcOwner(client)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


class PrefixExchange:
    """What a worker needs to take part in pulls; use it on one event loop.

    Args:
        instance: of this process.
        transports: a server of this worker's pages and a reader into them, best first.
        owner_at: how a source is asked; by RPC unless a test says otherwise.
        ttl_s: seconds of a loan.
        timeout_s: longest wait for a pull; 0 pulls nothing, and lends all the same.
        on_room: called when pages may have become free.
    """

    def __init__(
        self,
        kv: KvManager,
        instance: str,
        page_format: PageFormat,
        transports: Sequence[Transport],
        *,
        owner_at: Callable[[PageSource], Owner] | None = None,
        ttl_s: float = LOAN_S,
        timeout_s: float = PULL_S,
        on_room: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lender = PageLender(kv, instance, page_format, ttl_s=ttl_s, clock=clock)
        self._servers = [make(self.lender) for make, _ in transports]
        self._owners = Owners()
        self.fetcher = PrefixFetcher(
            kv,
            instance,
            page_format,
            owner_at or self._owners,
            [reader for _, reader in transports],
            timeout_s=timeout_s,
            clock=clock,
        )
        if on_room is not None:
            self.lender.on_unpinned = on_room
            self.fetcher.on_room = on_room
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Lets pages be read.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self.lender.transports = tuple((server.name, server.start()) for server in self._servers)

    def methods(self) -> list[Method]:
        """What is served to other workers."""
        return [
            Method("LendPages", LoanRequest, unary=self.lend),
            Method("RenewLoan", LoanQuestion, unary=self.renew),
            Method("ValidateLoan", LoanQuestion, unary=self.validate),
            Method("ReturnLoan", LoanQuestion, unary=self.give_back),
        ]

    # ---- the owner's side, on the event loop ----------------------------------------------

    async def lend(self, request: LoanRequest) -> Loan:
        """See ``PageLender.lend``."""
        loan = self.lender.lend(request)
        self._expire()
        return loan

    async def renew(self, question: LoanQuestion) -> LoanAnswer:
        """See ``PageLender.renew``."""
        return self.lender.renew(question)

    async def validate(self, question: LoanQuestion) -> LoanAnswer:
        """See ``PageLender.validate``."""
        return self.lender.validate(question)

    async def give_back(self, question: LoanQuestion) -> LoanAnswer:
        """See ``PageLender.give_back``."""
        return self.lender.give_back(question)

    def _expire(self) -> None:
        """Ends loans whose time is over, and comes again when the next one's is."""
        if self._timer is not None:
            self._timer.cancel()
        left = self.lender.expire()
        loop = asyncio.get_running_loop()
        self._timer = None if left is None else loop.call_later(left + 1e-3, self._expire)

    # ---- both -----------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each; empty when all is well."""
        return self.lender.check_integrity()

    async def close(self) -> None:
        """Ends loans and fetches; no read is under way afterwards. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        await self.fetcher.close()
        self.lender.close()
        for server in self._servers:
            await asyncio.to_thread(server.close)
        await self._owners.close()


def tcp_transport(store: LatentStore, host: str) -> Transport:
    """Reads over TCP; pages of ``store`` are served at ``host``."""
    return lambda lender: TcpPageServer(store, lender, host), TcpPageReader(store)
