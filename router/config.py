"""Settings of a router process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdmesh.router.policies import DEFAULT_POLICY
from pdmesh.wire.random_weights import RandomWeights


@dataclass(frozen=True)
class RouterConfig:
    """Everything a router needs to start. Times in seconds, lengths in tokens."""

    model_path: Path
    """Checkpoint directory: the tokenizer and the chat template are read from it."""
    model_name: str
    secret_file: Path
    """Secret key of the page hashes; the same bytes on every process of a mesh."""
    redis_url: str
    mesh: str = "pdmesh"
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port; the log line of the event ``ready`` names it."""
    metrics_port: int | None = None
    """Port of the Prometheus endpoint, on ``host``; None: no endpoint."""
    max_context: int | None = None
    """Most tokens of prompt and answer together; None: the checkpoint's limit. A worker that
    serves less lowers it."""
    default_max_tokens: int = 1024
    default_timeout: float = 300.0
    """For clients that set no deadline."""
    policy: str = DEFAULT_POLICY
    """How workers are chosen: see ``pdmesh.router.policies``."""
    max_attempts: int = 3
    """Tries of one request on different workers, the first included."""
    poll_interval: float = 0.25
    stop_grace: float = 5.0
    """Time that running requests get to finish when the router stops."""
    silence_s: float = 10.0
    """A decode worker that sends nothing in a stream and does not answer otherwise for so long is
    lost. Longer than any step."""
    admin_port: int = 0
    """Port of the internal service (running answers, migration) on ``host``; 0: any free one."""
    admin_file: Path | None = None
    """The internal service's host:port is written here once it listens."""
    lease_ttl_s: float = 5.0
    """What a worker that joins is told, in seconds; the router itself holds no lease."""
    random: RandomWeights | None = None
    """As ``lease_ttl_s``: weights that workers make; None: they read the checkpoint."""
    tokenizer_path: Path | None = None
    """Where tokenizer and template are if not in ``model_path``."""

    @property
    def tokenizer(self) -> Path:
        """The directory of tokenizer and template."""
        return self.tokenizer_path or self.model_path
