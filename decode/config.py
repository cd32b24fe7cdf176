"""Settings of one decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DecodeConfig:
    """Everything a decode worker is told when it starts.

    ``pages`` is the size of its latent pool in pages; ``max_batch`` the most sequences in a step;
    ``lease_idle_s`` how long a reservation may see no write and no reader before it is drained;
    ``port`` 0 lets the system choose.
    """

    worker_id: str
    redis_url: str
    mesh: str
    secret_file: Path
    model_path: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 0
    transfer_host: str = "127.0.0.1"
    dtype: str = "float32"
    device: str = "cpu"
    mtp: bool = True
    pages: int = 256
    threads: int = 1
    lease_ttl_s: float = 5.0
    max_batch: int = 32
    lease_idle_s: float = 60.0
