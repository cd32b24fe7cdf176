"""Settings that both kinds of workers have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdmesh.wire.hashes import Arithmetic
from pdmesh.wire.ids import PAGE_SIZE
from pdmesh.wire.random_weights import RandomWeights


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker of either kind is told when it starts.

    ``pages`` is the size of its latent pool in pages of ``page_size`` tokens; ``port`` 0 lets the
    system choose; ``metrics_port`` 0 means no Prometheus endpoint;
    ``random`` are weights to make for the ``config.json`` in ``model_path`` instead of reading
    them; ``tokenizer_path`` is the folder of the tokenizer, None: ``model_path``;
    ``device``, ``precision`` and ``latents`` are those of `Placing`; ``memory_share`` is the part
    of a device's memory that is this worker's, and ``pages`` 0 takes what there is room for;
    ``step_timeout_s`` how long a step may take before the worker leaves, 0: a minute on a CUDA
    device and ten on a CPU;
    ``ep_ranks`` the "host:port" of each rank of its expert-parallel group, empty if it computes
    alone, and ``ep_rank`` which of them it is, ``tp`` how many consecutive ones share a batch's
    attention heads, of which the first has the requests, ``redundant_experts`` copies of experts
    besides, and ``rebalance`` whether experts are placed anew as the load changes,
    ``microbatch_rows`` the rows of the largest batch from which on they compute in two halves;
    ``virtual_ranks`` how many ranks compute in its own process, 1 unless a large group is to be
    tried out;
    ``pull_s`` how long a prompt or a reservation may wait for cached pages of other workers, 0 for
    not at all; ``replica_hints`` whether it is asked which cached pages other workers have too;
    ``weights_from`` is the socket of a process that holds the weights, None: it loads its own;
    ``drain_s`` how long a worker that is told to end may take to finish what it has.
    """

    worker_id: str
    redis_url: str
    mesh: str
    secret_file: Path
    model_path: Path
    model_name: str
    random: RandomWeights | None = None
    tokenizer_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    transfer_host: str = "127.0.0.1"
    metrics_port: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    precision: str = "auto"
    latents: str = "plain"
    memory_share: float = 1.0
    step_timeout_s: float = 0.0
    arithmetic: Arithmetic = "fast"
    page_size: int = PAGE_SIZE
    mtp: bool = True
    pages: int = 256
    replica_hints: bool = True
    threads: int = 1
    lease_ttl_s: float = 5.0
    drain_s: float = 30.0
    pull_s: float = 2.0
    ep_rank: int = 0
    ep_ranks: tuple[str, ...] = ()
    tp: int = 1
    redundant_experts: int = 0
    rebalance: bool = True
    microbatch_rows: int = 64
    virtual_ranks: int = 1
    weights_from: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.tokenizer_path or self.model_path
