"""A worker process with a lease and some pages, and nothing else: python registry_worker.py URL
MESH NAME SEED."""

from __future__ import annotations

import asyncio
import secrets
import sys
from hashlib import blake2b

from pdmesh.wire.hashes import OwnedPage, placed

PROMPTS = 20
TTL_S = 0.5


def prompts(seed: int) -> list[list[OwnedPage]]:
    """The chains that a worker of this seed owns."""
    return [
        placed([blake2b(f"{seed}/{p}/{i}".encode(), digest_size=16).digest() for i in range(p + 1)])
        for p in range(PROMPTS)
    ]


async def main(url: str, mesh: str, name: str, seed: int) -> None:
    from store_rig import record

    from pdmesh.registry.host import Binding, host_worker
    from pdmesh.registry.publisher import WorkerLease

    pages = [page for chain in prompts(seed) for page in chain]

    def lease(address: str):
        own = record(name, secrets.token_hex(4), address)
        return own, WorkerLease(url, mesh, own, snapshot=lambda: pages, ttl_s=TTL_S)

    async def nothing() -> None:
        pass

    await host_worker(Binding("127.0.0.1", 0), [], asyncio.Event().wait, lease, nothing)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
