"""One TOML file describes a mesh. Everything has a default; the file may say as little as it likes.

A wrong key, type, value or path is one sentence that names the file, the key and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pdmesh.kvcache.eviction import EvictionName
from pdmesh.kvtransfer.choice import DEFAULT_TRANSPORTS, TRANSPORTS
from pdmesh.launch.settings import check_value, shown, unknown
from pdmesh.prefill.config import AUTO_CHUNK
from pdmesh.router.policies import DEFAULT_POLICY, POLICY_NAMES
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.hashes import Arithmetic
from pdmesh.wire.ids import PAGE_SIZE
from pdmesh.wire.random_weights import RandomWeights

T = TypeVar("T")

SECTIONS = ("mesh", "model", "prefill", "decode", "router", "kvcache")
SHIPPED_CONFIGS = ("deepseek-v3", "small")
"""Configs without weights, for random ones; the first unless another is named."""
EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
PAGE_SIZES = (16, 32, 64, 128, 256, 512)
AUTO_PAGES = 0
"""``pages = "auto"``: what the device has room for."""
AUTO_DRAFTS = -1
"""``draft_tokens = "auto"``: as many as pay off, by what was accepted lately."""


def _number(
    default: float, low: float, high: float, text: str, words: Mapping[str, int] | None = None
) -> Any:
    """``words`` are names of numbers that may stand in their place."""
    limits = {"low": low, "high": high, "help": text, "words": words or {}}
    return field(default=default, metadata=limits)


def _choice(default: str | int, choices: tuple[str | int, ...], text: str) -> Any:
    return field(default=default, metadata={"choices": choices, "help": text})


def _plain(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class MeshSection:
    """``[mesh]``: what all processes share."""

    name: str = _plain("default", "name of the mesh")
    host: str = _plain("127.0.0.1", "address that the processes listen on")
    port: int = _number(0, 0, 65535, "public port; 0: 7080, or the next free one")
    redis: str = _plain("", "Redis URL; empty: the embedded store")
    secret_file: Path | None = _plain(None, "key of the page hashes; made if missing")
    lease_ttl_s: float = _number(5.0, 0.5, 3600, "seconds until a silent worker is dropped")
    drain_s: float = _number(
        30.0, 0, 86_400, "seconds that a worker told to end may take to finish"
    )
    step_timeout_s: float = _number(
        0.0, 0, 86_400, "seconds that a step may take; 0: 60 on a CUDA device, 600 on a CPU"
    )
    transports: tuple[str, ...] = _plain(
        DEFAULT_TRANSPORTS, "ways that pages may go, best first: " + ", ".join(TRANSPORTS)
    )
    log_level: str = _choice("INFO", ("DEBUG", "INFO", "WARNING", "ERROR"), "what is logged")


@dataclass(frozen=True)
class ModelSection:
    """``[model]``: the checkpoint."""

    path: Path | None = _plain(
        None, "Hugging Face checkpoint directory; the shipped model if unset"
    )
    random_weights: bool = _plain(
        False,
        "make weights for the config.json in path, or for a shipped config, instead of reading",
    )
    weights_seed: int = _number(0, 0, (1 << 31) - 1, "which random weights")
    layers: int = _number(0, 0, 1000, "layers of random weights; 0: as the config says")
    experts: int = _number(0, 0, 4096, "routed experts of a layer of theirs; 0: as the config says")
    name: str = _plain("", "name that clients ask for; empty: the directory's name")
    dtype: str = _choice("float32", ("float32", "bfloat16"), "arithmetic and KV memory")
    arithmetic: Arithmetic = _choice(
        "fast", ("fast", "exact"), "fast: prompts in MHA form; exact: all in absorbed form"
    )
    page_size: int = _choice(PAGE_SIZE, PAGE_SIZES, "tokens a page")
    mtp: bool = _plain(True, "draft tokens with the MTP module")
    device: str = _plain("cpu", "where workers compute: cpu, cuda, cuda:N or several")
    precision: str = _choice(
        "auto", ("auto", "plain", "fp8"), "of products; auto: fp8 on a CUDA device"
    )
    latents: str = _choice("plain", ("plain", "fp8"), "how pages keep latents")
    share_weights: bool = _plain(
        False, "one process on each device holds the weights, and its workers map them"
    )


@dataclass(frozen=True)
class WorkersSection:
    """What ``[prefill]`` and ``[decode]`` both say of their workers."""

    workers: int = _number(1, 1, 64, "number of processes")
    pages: int = _number(
        256, 2, 10_000_000, "pages of KV memory a worker; auto: what fits", {"auto": AUTO_PAGES}
    )
    threads: int = _number(0, 0, 1024, "threads a worker; 0: the cores, shared evenly")
    ep: int = _number(1, 1, 64, "workers that share the routed experts; 1: each has them all")
    tp: int = _number(1, 1, 64, "of them, workers that share a batch's attention heads")
    redundant_experts: int = _number(0, 0, 4096, "copies of experts besides, among those workers")
    rebalance: bool = _plain(True, "place shared experts anew as the load changes")
    microbatch_rows: int = _number(64, 1, 1_000_000, "rows from which on ranks overlap two halves")
    virtual_ranks: int = _number(1, 1, 1024, "ranks that share a worker's process; 1: it is one")
    metrics_port: int = _number(0, 0, 65535, "Prometheus endpoint of the first worker; 0: none")


@dataclass(frozen=True)
class PrefillSection(WorkersSection):
    """``[prefill]``: the workers that compute prompts."""

    chunk_tokens: int = _number(
        AUTO_CHUNK,
        1,
        1_000_000,
        "most tokens in one step, but at least a page; auto: 512 on a CPU, 4096 on a GPU",
        {"auto": AUTO_CHUNK},
    )
    max_queue: int = _number(1024, 1, 1_000_000, "prompts that may wait")


@dataclass(frozen=True)
class DecodeSection(WorkersSection):
    """``[decode]``: the workers that generate."""

    workers: int = _number(2, 1, 64, "number of processes")
    max_batch: int = _number(32, 1, 4096, "most sequences in one step")
    draft_tokens: int = _number(
        1, 0, 4, "MTP drafts a step and sequence; auto: as many as pay off", {"auto": AUTO_DRAFTS}
    )
    growth_tokens: int = _number(
        0, 0, 1_000_000, "tokens promised ahead of a running sequence; 0: all it may generate"
    )
    park_mb: int = _number(1024, 0, 10_000_000, "host memory for pages of preempted sequences, MiB")
    max_waiting: int = _number(1024, 0, 1_000_000, "reservations that may wait for pages")


@dataclass(frozen=True)
class RouterSection:
    """``[router]``: the public servers. Each is whole by itself: clients use any of them."""

    workers: int = _number(1, 1, 64, "replicas, each with an address of its own")
    policy: str = _choice(DEFAULT_POLICY, POLICY_NAMES, "how workers are chosen")
    deadline_s: float = _number(300.0, 1, 86_400, "for clients that set no deadline")
    max_attempts: int = _number(3, 1, 100, "tries of one request on different workers")
    metrics_port: int = _number(0, 0, 65535, "Prometheus endpoint of the first; 0: none")


@dataclass(frozen=True)
class KvcacheSection:
    """``[kvcache]``: what workers of both roles keep."""

    eviction: EvictionName = _choice("lru", EVICTIONS, "which cached pages go first")
    replica_hints: bool = _plain(True, "lru: old pages that others have too go before last copies")


@dataclass(frozen=True)
class Topology:
    """A whole mesh."""

    mesh: MeshSection = MeshSection()
    model: ModelSection = ModelSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    router: RouterSection = RouterSection()
    kvcache: KvcacheSection = KvcacheSection()
    origins: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False, repr=False)
    """Where the value of a (section, key) comes from, unless it is the default."""

    @property
    def model_path(self) -> Path:
        """The checkpoint directory; that of a ``config.json`` where weights are random."""
        path = self.model.path
        if not self.model.random_weights:
            return shipped_model() if path is None else path
        if path is None:
            return shipped_config(SHIPPED_CONFIGS[0])
        named = str(path) in SHIPPED_CONFIGS and not path.is_dir()
        return shipped_config(str(path)) if named else path

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        ending = "-random" if self.model.random_weights else ""
        return self.model.name or self.model_path.resolve().name + ending

    @property
    def random(self) -> RandomWeights | None:
        """The weights that are made; None where they are read."""
        model = self.model
        if not model.random_weights:
            return None
        return RandomWeights(seed=model.weights_seed, layers=model.layers, experts=model.experts)

    @property
    def tokenizer_path(self) -> Path:
        """The directory of the tokenizer: random weights for a bare config take the shipped one."""
        path = self.model_path
        bare = self.model.random_weights and not (path / "tokenizer.json").is_file()
        return shipped_model() if bare else path

    @property
    def draft_tokens(self) -> int:
        """MTP drafts a step and sequence; 0 without MTP, AUTO_DRAFTS for "auto"."""
        return self.decode.draft_tokens if self.model.mtp else 0

    def changed(self, section: str, source: str, **values: object) -> Topology:
        """A copy with the values that are not None, checked like those of a file.

        ``source`` says in errors where they come from, e.g. ``"--port"``.
        """
        given = {key: value for key, value in values.items() if value is not None}
        if not given:
            return self
        before = getattr(self, section)
        checked = {
            key: check_value(_field(before, key), value, source) for key, value in given.items()
        }
        origins = {**self.origins, **{(section, key): source for key in given}}
        changed: dict[str, Any] = {section: dataclasses.replace(before, **checked)}
        return dataclasses.replace(self, **changed, origins=origins)

    @contextlib.contextmanager
    def blamed(self, section: str, key: str) -> Iterator[None]:
        """Puts the origin of a setting before the sentence of a ConfigError within."""
        try:
            yield
        except ConfigError as error:
            origin = self.origins.get((section, key))
            if origin is None:
                raise
            raise ConfigError(f"{origin}: {error}") from error


def shipped_config(name: str) -> Path:
    """The directory of a ``config.json`` inside this package, one of SHIPPED_CONFIGS."""
    return Path(str(resources.files("pdmesh.model").joinpath("configs", name)))


def shipped_model() -> Path:
    """The directory of the checkpoint inside this package."""
    return Path(str(resources.files("pdmesh.model.tiny")))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_topology(path: Path | None) -> Topology:
    """The mesh that a file describes; the defaults without one. Paths are relative to the file.

    Raises:
        ConfigError: the file cannot be read, or says something that is not allowed.
    """
    if path is None:
        return Topology()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the topology file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse_topology(table, str(path), path.parent)


def parse_topology(table: Mapping[str, object], source: str, base: Path) -> Topology:
    """The mesh that a parsed TOML table describes.

    Args:
        table: section name to table.
        source: the file's name, for errors.
        base: what relative paths start from.
    """
    known = {f.name: f for f in dataclasses.fields(Topology) if f.name in SECTIONS}
    sections: dict[str, Any] = {}
    origins: dict[tuple[str, str], str] = {}
    for name, content in table.items():
        if name not in known:
            raise ConfigError(f"{source}: " + unknown("section", name, list(known)))
        if not isinstance(content, dict):
            raise ConfigError(f"{source}: {name} is {shown(content)}; it must be a table [{name}]")
        section = type(known[name].default)
        sections[name] = _section(section, name, content, source, base)
        origins |= {(name, key): f"{source}: [{name}] {key}" for key in content}
    return Topology(**sections, origins=origins)


def _section(kind: type[T], name: str, content: Mapping[str, object], source: str, base: Path) -> T:
    defaults = kind()
    values: dict[str, object] = {}
    names = [f.name for f in dataclasses.fields(defaults)]  # type: ignore[arg-type]  # a dataclass
    for key, value in content.items():
        if key not in names:
            raise ConfigError(f"{source}: [{name}] " + unknown("key", key, names))
        checked = check_value(_field(defaults, key), value, f"{source}: [{name}] {key}")
        values[key] = _placed(checked, base) if isinstance(checked, Path) else checked
    return dataclasses.replace(defaults, **values)  # type: ignore[type-var]  # a dataclass


def _placed(path: Path, base: Path) -> Path:
    """Relative to the file, unless it is the name of a shipped config and of nothing there."""
    named = str(path) in SHIPPED_CONFIGS and not (base / path).exists()
    return path if named else base / path


def _field(section: Any, key: str) -> dataclasses.Field[Any]:
    return next(f for f in dataclasses.fields(section) if f.name == key)
