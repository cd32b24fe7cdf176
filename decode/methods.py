"""The calls by which answers move between decode workers, and from the router about that."""

from __future__ import annotations

from pdmesh.decode.worker import DecodeWorker
from pdmesh.wire.handoff import (
    AdoptRequest,
    CapsuleMessage,
    ChecksumsRequest,
    ContinueRequest,
    DecideRequest,
    MigrateRequest,
    RoundRequest,
)
from pdmesh.wire.rpc import Method


def migration_methods(worker: DecodeWorker) -> list[Method]:
    """Both roles: every worker may be source and target."""
    return [
        Method("Migrate", MigrateRequest, unary=worker.migrations.migrate),
        Method("Decide", DecideRequest, unary=worker.migrations.decide),
        Method("Continue", ContinueRequest, stream=worker.continue_),
        Method("Adopt", AdoptRequest, unary=worker.adoptions.adopt),
        Method("AdoptRound", RoundRequest, unary=worker.adoptions.adopt_round),
        Method("Capsule", CapsuleMessage, unary=worker.adoptions.capsule),
        Method("Checksums", ChecksumsRequest, unary=worker.checksums),
    ]
