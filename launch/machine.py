"""Whether this machine can compute what a topology asks for, before any process of it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdmesh.decode.config import step_rows as decode_rows
from pdmesh.launch.processes import device_of, environment
from pdmesh.launch.topology import AUTO_PAGES, Topology, WorkersSection
from pdmesh.prefill.config import AUTO_CHUNK, STEP_PROMPTS, chunk_choices
from pdmesh.prefill.config import step_rows as prefill_rows
from pdmesh.wire.errors import ConfigError

Probe = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_PROBE_S = 120.0


def check_machine(topology: Topology, probe: Probe | None = None) -> tuple[Topology, list[str]]:
    """Asks for devices, packages and memory where workers are to compute on a device, or to make
    weights; the shipped way on a CPU asks nothing.

    Args:
        probe: answers ``asked(topology)``; by default a process that ends then.

    Returns:
        The topology, with the tokens of a prefill step where the device was to choose them, so that
        all workers have the same; and lines about the memory that each worker will have, and about
        what is missing but not needed.

    Raises:
        ConfigError: they cannot; one sentence with the fix.
    """
    if topology.model.device == "cpu" and topology.random is None:
        return topology, []
    found = (probe or _process)(asked(topology))
    if "problem" in found:
        key = "random_weights" if topology.model.device == "cpu" else "device"
        with topology.blamed("model", key):
            raise ConfigError(found["problem"])
    lines, rows = list(found["lines"]), found.get("prefill_rows")
    device, told = topology.model.device, topology.prefill.chunk_tokens != AUTO_CHUNK
    if rows is None or told or device == "cpu":
        return topology, lines
    choices = chunk_choices(AUTO_CHUNK, device, topology.prefill.ep)
    chunk = next(c for c in choices if prefill_rows(c, topology.model.page_size) == rows)
    why = found["reason"] or f"what {device} wants"
    lines.append(f"prefill steps have up to {chunk} tokens: {why}")
    return topology.changed("prefill", "the device", chunk_tokens=chunk), lines


def asked(topology: Topology) -> dict[str, Any]:
    """What the probe is asked, as JSON: the model, and what the workers of a role on each device
    need."""
    model = topology.model
    sections = (("prefill", topology.prefill), ("decode", topology.decode))
    placed = Counter(
        (role, device_of(topology, f"{role}-{index}"))
        for role, section in sections
        for index in range(section.workers)
    )
    return {
        "path": str(topology.model_path),
        "random": None if topology.random is None else msgspec.to_builtins(topology.random),
        "precision": model.precision,
        "latents": model.latents,
        "dtype": model.dtype,
        "mtp": model.mtp,
        "page_size": model.page_size,
        "shared": model.share_weights,
        "workers": [
            {"device": device, "count": count, "share": _share(device, placed)}
            | _role(topology, role, device)
            for (role, device), count in placed.items()
        ],
    }


def _share(device: str, placed: Mapping[tuple[str, str], int]) -> float:
    """Of a device's memory: even among all workers that are on it."""
    here = sum(count for (_, other), count in placed.items() if other == device)
    return 1.0 if device == "cpu" else 1.0 / here


def _role(topology: Topology, role: str, device: str) -> dict[str, Any]:
    section: WorkersSection = getattr(topology, role)
    told = (role, "pages") in topology.origins or topology.model.device == "cpu"
    if role == "prefill":
        chunks = chunk_choices(topology.prefill.chunk_tokens, device, section.ep)
        rows = [prefill_rows(chunk, topology.model.page_size) for chunk in chunks]
    else:
        rows = [decode_rows(topology.decode.max_batch, topology.draft_tokens)]
    return {
        "role": role,
        "pages": section.pages if told else AUTO_PAGES,
        "rows": rows,
        "sequences": STEP_PROMPTS if role == "prefill" else topology.decode.max_batch,
        "ranks": section.ep,
        "redundant": section.redundant_experts,
        "threshold": section.microbatch_rows,
    }


def _process(question: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pdmesh.launch.probe"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            env=environment("", 1),
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"this machine's device did not answer within {_PROBE_S:.0f} s; see nvidia-smi"
        ) from None
    try:
        found: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"this machine's device could not be looked at: {words[-1]}") from None
    return found
