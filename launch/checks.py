"""Settings that cannot be as they are on this machine, do not go together, or not with the
checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pdmesh.launch.ports import refusal
from pdmesh.launch.random_weights import check_random, config_with
from pdmesh.launch.topology import SHIPPED_CONFIGS, Topology, WorkersSection
from pdmesh.wire.errors import ConfigError

_ANYWHERE = ("0.0.0.0", "::", "[::]")


def check_host(host: str) -> None:
    """Raises ConfigError if ``host`` is no address at which others can call this machine."""
    if host in _ANYWHERE:
        raise ConfigError(
            f"{host} is no address that other processes can call; give this host's own address"
        )
    reason = refusal(host, 0)
    if reason:
        raise ConfigError(
            f"cannot listen on {host!r}: {reason}; give an address of this machine, e.g. 127.0.0.1"
        )


def check_model(path: Path, weights: bool = False) -> None:
    """Raises ConfigError if ``path`` cannot be a checkpoint directory.

    Args:
        weights: whether it has to hold weights.
    """
    if str(path) in SHIPPED_CONFIGS and not path.exists():
        raise ConfigError(
            f"{path} is a config without weights, and there is no directory of that name; add "
            "--random-weights, or give a Hugging Face checkpoint directory"
        )
    if not path.exists():
        raise ConfigError(
            f"the model directory {path} does not exist; give a Hugging Face checkpoint directory"
        )
    if not path.is_dir():
        raise ConfigError(f"the model path {path} is a file; give the checkpoint's directory")
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} holds a LoRA adapter (adapter_config.json); merge it into its base model first"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the model directory {path} holds no config.json; give a Hugging Face checkpoint "
            "directory of a DeepSeek-V3-type model"
        )
    if weights and not any(path.glob("*.safetensors*")):
        from pdmesh.model.config import ModelConfig  # with torch: seconds

        ModelConfig.from_path(path)  # nobody is to fetch weights that are not served
        raise ConfigError(
            f"the model directory {path} holds a config.json and no weights (*.safetensors); fetch "
            "them, or add --random-weights to make some up"
        )


def check_together(topology: Topology) -> None:
    """Looks at a topology as a whole, before anything starts.

    Raises:
        ConfigError: one sentence with the fix.
    """
    config = config_with(topology, model_fields(topology.model_path))
    check_random(topology)
    check_device(topology, config)
    _check_drafts(topology, config)
    _check_page(topology, config)
    _check_eviction(topology)
    _check_experts(topology, config)
    _check_shared(topology)
    router, port = topology.router.metrics_port, topology.mesh.port
    if port and router == port:
        with topology.blamed("router", "metrics_port"):
            raise ConfigError(f"port {port} is the public one; give the metrics another")


def check_device(topology: Topology, config: Mapping[str, object]) -> None:
    """Raises ConfigError for a device, precision or latents that do not go with the rest."""
    model = topology.model
    if not re.fullmatch(r"cpu|cuda|cuda:\d+(,cuda:\d+)*", model.device):
        with topology.blamed("model", "device"):
            raise ConfigError(
                f"there is no device {model.device!r}; say cpu, cuda or cuda:N, or "
                "cuda:N,cuda:M,... for workers to take in turn"
            )
    if topology.mesh.transports == ("cuda_ipc",) and model.device == "cpu":
        with topology.blamed("mesh", "transports"):
            raise ConfigError(
                "cuda_ipc is for pages on a CUDA device, and these are on the CPU; add --device"
                " cuda, or name shm or tcp"
            )
    fp8 = model.precision == "fp8" or (model.precision == "auto" and model.device != "cpu")
    if model.latents == "fp8" and not fp8:
        with topology.blamed("model", "latents"):
            raise ConfigError(
                "FP8 latents go with FP8 precision; add --precision fp8, or leave latents plain"
            )
    if not fp8:
        return
    if model.arithmetic == "exact":
        with topology.blamed("model", "arithmetic"):
            raise ConfigError(
                "exact arithmetic gives a row the same bits in any batch, which FP8 products do "
                "not; use fast arithmetic, or --precision plain"
            )
    why = "--precision fp8" if model.precision == "fp8" else f"fp8 is what {model.device} computes"
    refused = (
        ("prefill", "virtual_ranks", "virtual ranks compute in plain precision, not in fp8"),
        ("decode", "virtual_ranks", "virtual ranks compute in plain precision, not in fp8"),
        ("prefill", "tp", "ranks in fp8 have all attention heads"),
        ("decode", "tp", "ranks in fp8 have all attention heads"),
    )
    for role, key, what in refused:
        if getattr(getattr(topology, role), key) > 1:
            with topology.blamed(role, key):
                raise ConfigError(f"{what} ({why}); leave it at 1, or add --precision plain")
    hidden = config.get("hidden_size")
    for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
        if section.ep > 1 and isinstance(hidden, int) and hidden % 128:
            with topology.blamed(role, "ep"):
                raise ConfigError(
                    f"ranks in fp8 send rows of whole blocks of 128, and this model's are {hidden} "
                    "wide; leave it at 1, or add --precision plain"
                )


def _check_shared(topology: Topology) -> None:
    if not topology.model.share_weights:
        return
    for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
        for key in ("ep", "virtual_ranks"):
            if getattr(section, key) > 1:
                with topology.blamed(role, key):
                    raise ConfigError(
                        "workers that share experts hold different weights each, so there is no "
                        "copy that all could map; leave it at 1, or leave --share-weights out"
                    )


def _check_drafts(topology: Topology, config: Mapping[str, object]) -> None:
    asked = ("decode", "draft_tokens") in topology.origins and topology.decode.draft_tokens != 0
    if not asked:
        return
    with topology.blamed("decode", "draft_tokens"):
        if not topology.model.mtp:
            raise ConfigError(
                "drafts come from the MTP module, which is off; ask for 0, or leave MTP on"
            )
        if config and not config.get("num_nextn_predict_layers"):
            raise ConfigError(
                f"drafts come from an MTP module, and {topology.model_path} has none; ask for 0"
            )


def _check_eviction(topology: Topology) -> None:
    asked = ("kvcache", "replica_hints") in topology.origins and topology.kvcache.replica_hints
    if asked and topology.kvcache.eviction != "lru":
        with topology.blamed("kvcache", "replica_hints"):
            raise ConfigError(
                f"eviction {topology.kvcache.eviction!r} does not look at copies elsewhere; leave "
                'this out, or take eviction = "lru"'
            )


def _check_page(topology: Topology, config: Mapping[str, object]) -> None:
    context, page_size = config.get("max_position_embeddings"), topology.model.page_size
    if isinstance(context, int) and page_size > context:
        with topology.blamed("model", "page_size"):
            raise ConfigError(
                f"a page of {page_size} tokens is longer than the model's context of {context}; "
                "give a smaller page_size"
            )


def _check_experts(topology: Topology, config: Mapping[str, object]) -> None:
    experts = config.get("n_routed_experts")
    for role, section in (("prefill", topology.prefill), ("decode", topology.decode)):
        copies = section.redundant_experts
        if copies and section.ep == 1:
            with topology.blamed(role, "redundant_experts"):
                raise ConfigError(
                    "there are copies of experts only where workers share them; "
                    "ask for 0, or for an ep of more than 1"
                )
        if section.ep > 1 and section.virtual_ranks > 1:
            with topology.blamed(role, "virtual_ranks"):
                raise ConfigError(
                    "ranks in one process are all of their group, and ep asks for a group of "
                    f"{section.ep} processes; ask for one of the two"
                )
        _check_heads(section, role, topology, config)
        asked = (("ep", section.ep, "workers"), ("virtual_ranks", section.virtual_ranks, "ranks"))
        for key, count, what in asked:
            if count == 1 or not config:
                continue
            with topology.blamed(role, key):
                _check_shares(topology, experts, copies, count, key, what)


def _check_heads(
    section: WorkersSection,
    role: str,
    topology: Topology,
    config: Mapping[str, object],
) -> None:
    heads = config.get("num_attention_heads")
    with topology.blamed(role, "tp"):
        if section.ep % section.tp:
            fitting = [n for n in range(1, section.ep + 1) if section.ep % n == 0]
            raise ConfigError(
                f"{section.ep} workers that share experts make no groups of {section.tp} that "
                "share attention heads: EP = DP x TP; ask for "
                f"tp = {', '.join(map(str, fitting))}"
            )
        if isinstance(heads, int) and heads % section.tp:
            raise ConfigError(
                f"{section.tp} workers cannot share {heads} attention heads evenly; ask for a "
                f"number that divides {heads}"
            )


def _check_shares(
    topology: Topology, experts: object, copies: int, count: int, key: str, what: str
) -> None:
    if not isinstance(experts, int) or experts < 1:
        raise ConfigError(
            f"{topology.model_path} has no routed experts to share; ask for {key} = 1"
        )
    if count > experts or (experts + copies) % count:
        fitting = [n for n in range(1, experts + 1) if (experts + copies) % n == 0]
        besides = f" and {copies} copies" if copies else ""
        raise ConfigError(
            f"{count} {what} cannot share {experts} experts{besides} evenly; "
            f"ask for one of {', '.join(map(str, fitting))}"
        )


def model_fields(model_path: Path) -> Mapping[str, object]:
    """The checkpoint's config.json; empty where it cannot be read, which others complain about."""
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
