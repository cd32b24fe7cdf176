"""A router as a process: read the tokenizer, follow the registry, serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict

import grpc

from pdmesh.registry.client import RegistryView
from pdmesh.registry.host import Binding, bind
from pdmesh.router.account import Account
from pdmesh.router.admin import SERVICE, AdminService, write_address
from pdmesh.router.chooser import Chooser
from pdmesh.router.clients import WorkerClients
from pdmesh.router.config import RouterConfig
from pdmesh.router.defaults import sampling_defaults
from pdmesh.router.grpc_server import ChatServer
from pdmesh.router.handoff import Surroundings
from pdmesh.router.join import join_method
from pdmesh.router.metrics import Metrics
from pdmesh.router.moves import Moves
from pdmesh.router.request import RequestParser
from pdmesh.router.sampling import SamplingParser
from pdmesh.router.service import Service, ServiceConfig
from pdmesh.router.view import MeshView, Registry
from pdmesh.text.grammar_trial import GrammarTrial
from pdmesh.text.template import load_template
from pdmesh.text.tokenizer import load_tokenizer, read_json
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.logs import event
from pdmesh.wire.rpc import (
    MAX_INTERNAL_MESSAGE,
    MAX_PUBLIC_MESSAGE,
    add_service,
    server_options,
)
from pdmesh.wire.secret import read_secret

log = logging.getLogger(__name__)

COLLECTOR = (20_000, 20, 20)
"""Allocations, and collections of the younger generations, between collections."""


async def serve_router(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT, or until it is cancelled.

    Raises:
        ConfigError: checkpoint, secret, Redis URL or a port cannot be used.
    """
    registry = RegistryView(config.redis_url, config.mesh)
    router = Router(config, registry)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await registry.start()
    try:
        await router.start()
        settle()
        await stop.wait()
    finally:
        event(log, "stopping")
        await router.stop()
        await registry.close()


def settle() -> None:
    """What is loaded by now stays: the collector does not look at it again, and comes less often.

    Messages and states of requests are freed by their reference counts; what is in a cycle (a task
    with its exception) can wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR)


class Router:
    """A router over a registry that somebody else starts and closes.

    Raises:
        ConfigError: see ``serve_router``.
    """

    def __init__(self, config: RouterConfig, registry: Registry) -> None:
        rng = random.Random()
        tokenizer = load_tokenizer(config.tokenizer, config.model_path)
        event(log, "tokenizer_loaded", tokens=tokenizer.vocab_size, longest=tokenizer.longest_token)
        defaults = sampling_defaults(config.model_path, tokenizer.vocab_size)
        event(log, "sampling_defaults", **asdict(defaults))
        self._grammars = GrammarTrial(config.tokenizer)
        self._config = config
        self.metrics = Metrics()
        self.clients = WorkerClients()
        self.view = MeshView(registry, self.clients, config.model_name, self.metrics)
        account = Account(self.metrics, time.monotonic)
        around = Surroundings(self.view, self.clients, account, time.monotonic, config.silence_s)
        self.moves = Moves(around, rng)
        self.chooser = Chooser(rng, time.monotonic, config.policy)
        self._show_costs()
        self._chat = ChatServer(
            RequestParser(
                tokenizer=tokenizer,
                template=load_template(config.tokenizer, tokenizer),
                model_name=config.model_name,
                sampling=SamplingParser(tokenizer, config.default_max_tokens, rng, defaults),
                grammars=self._grammars,
            ),
            Service(
                tokenizer,
                self.view,
                self.clients,
                account,
                self.moves,
                self.chooser,
                ServiceConfig(read_secret(config.secret_file), config.max_attempts),
            ),
            self.view,
            self.metrics,
            max_context=_max_context(config),
            default_timeout=config.default_timeout,
        )
        self._server: grpc.aio.Server | None = None
        self._admin: grpc.aio.Server | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self.address = ""
        """host:port of the public service, once started."""
        self.admin_address = ""
        """host:port of the internal service, once started."""
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Binds the ports and serves. Raises ConfigError if a port is taken."""
        config = self._config
        server = grpc.aio.server(options=server_options(MAX_PUBLIC_MESSAGE))
        self._chat.register(server)
        add_service(server, "router", [join_method(config, self._page_formats)])
        self.address = bind(server, Binding(config.host, config.port))
        admin = grpc.aio.server(options=server_options(MAX_INTERNAL_MESSAGE))
        add_service(admin, SERVICE, AdminService(self.moves, self.chooser).methods())
        self.admin_address = bind(admin, Binding(config.host, config.admin_port))
        if config.metrics_port is not None:
            self.metrics_port, self._stop_metrics = self.metrics.serve(
                config.host, config.metrics_port
            )
        await self._chat.update_health()
        await admin.start()
        self._admin = admin
        if config.admin_file is not None:  # known before the first request can be under way
            await asyncio.to_thread(write_address, config.admin_file, self.admin_address)
        await server.start()
        self._server = server
        await self.view.start(config.poll_interval, self._polled)
        event(
            log,
            "ready",
            address=self.address,
            admin=self.admin_address,
            metrics_port=self.metrics_port,
        )

    async def _polled(self) -> None:
        await self._chat.update_health()
        self.moves.tick()
        self._refit()

    def _refit(self) -> None:
        if self.chooser.refit(self.view.statuses()):
            self._show_costs()

    def _show_costs(self) -> None:
        fitted = self.chooser.fitted
        self.metrics.fitted(fitted.costs.named(), fitted.samples)

    def _page_formats(self) -> list[PageFormat]:
        return [r.page_format for r in (*self.view.ready("prefill"), *self.view.ready("decode"))]

    async def stop(self) -> None:
        """Lets running requests finish for ``stop_grace`` seconds, then ends them."""
        if self._server is not None:
            await self._server.stop(self._config.stop_grace)
        if self._admin is not None:
            await self._admin.stop(None)
        await self.view.close()
        await self.clients.close()
        await self._grammars.close()
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)


def _max_context(config: RouterConfig) -> int:
    path = config.model_path / "config.json"
    known = (read_json(path) or {}).get("max_position_embeddings")
    if config.max_context is not None:
        return config.max_context
    if not isinstance(known, int):
        raise ConfigError(f"{path} holds no whole number max_position_embeddings; add it")
    return known
