"""A process that looks at this machine for ``pdmesh up`` and ends: a supervisor that looked itself
would hold memory of the device as long as the mesh runs.

Reads one JSON object (see ``machine.asked``) from standard input and prints one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdmesh.model.device.memory import MemoryPlan
    from pdmesh.model.fitting import Fitted

_SIZES = ("role", "share", "pages", "sequences", "ranks", "redundant", "threshold")


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Either a ``problem``, one sentence with the fix, or ``lines`` about what was planned,
    ``prefill_rows`` that the largest step of any prefill worker may have, and the ``reason`` why
    these are fewer than were wanted, or ""."""
    from pdmesh.model.device.memory import GB
    from pdmesh.model.machine import remarks, this_machine
    from pdmesh.model.planning import memory_of
    from pdmesh.model.served import Placing
    from pdmesh.wire.errors import ConfigError

    devices = list(dict.fromkeys(worker["device"] for worker in asked["workers"]))
    lines: list[str] = []
    prefill: list[Fitted] = []
    try:
        for device in devices:
            workers = [worker for worker in asked["workers"] if worker["device"] == device]
            fitted = _fitted(asked, device, workers)
            for worker, found in zip(workers, fitted, strict=True):
                if worker["role"] == "prefill":
                    prefill.append(found)
                if found.plan is not None:
                    each = f"each of {worker['count']} " if worker["count"] > 1 else ""
                    lines.append(f"{each}{worker['role']} on {device}: {found.plan.describe()}")
            if any(found.plan is not None for found in fitted):
                free = memory_of(device)[0]
                lines.append(f"{free / GB:.1f} GB are free {_where(device, devices)}now")
    except ConfigError as error:
        return {"problem": error.message}
    if devices != ["cpu"]:
        placing = Placing(devices[0], asked["precision"], asked["latents"])
        lines += remarks(this_machine(), devices[0], placing.chosen)
    least = min(prefill, key=lambda found: found.rows)
    return {"lines": lines, "prefill_rows": least.rows, "reason": least.reason}


def _fitted(
    asked: Mapping[str, Any], device: str, workers: Sequence[Mapping[str, Any]]
) -> list[Fitted]:
    """What each kind of worker on a device has room for: where all together do not fit, with
    smaller steps."""
    from pdmesh.model.planning import memory_of
    from pdmesh.wire.errors import ConfigError

    choices = [list(worker["rows"]) for worker in workers]
    reason = ""
    while True:
        found = [
            _one(asked, device, worker, rows, reason)
            for worker, rows in zip(workers, choices, strict=True)
        ]
        plans = [
            (worker["count"], one.plan)
            for worker, one in zip(workers, found, strict=True)
            if one.plan is not None
        ]
        try:
            if plans:
                _check_fit(plans, memory_of(device)[0], asked)
            return found
        except ConfigError:
            now = [one.rows for one in found]
            smaller = [
                [rows for rows in own if rows < most] or [most]
                for own, most in zip(choices, now, strict=True)
            ]
            if smaller == [[most] for most in now]:
                raise
            largest = max(most for own, most in zip(smaller, now, strict=True) if own != [most])
            reason = reason or f"workers do not fit together beside steps of {largest} rows"
            choices = smaller


def _one(
    asked: Mapping[str, Any],
    device: str,
    worker: Mapping[str, Any],
    choices: Sequence[int],
    reason: str,
) -> Fitted:
    """What a worker has room for; `reason`: why larger steps are not among the choices."""
    from dataclasses import replace

    import msgspec

    from pdmesh.model.fitting import fit_steps, least_pages
    from pdmesh.model.planning import plan_pages
    from pdmesh.model.served import Placing
    from pdmesh.wire.random_weights import RandomWeights

    path, random = Path(asked["path"]), msgspec.convert(asked["random"], RandomWeights | None)
    found = fit_steps(
        choices,
        lambda: least_pages(path, random, asked["page_size"], worker["pages"]),
        lambda rows: plan_pages(
            path,
            Placing(device, asked["precision"], asked["latents"]),
            random=random,
            **{key: asked[key] for key in ("mtp", "page_size", "dtype")},
            weights="to hold" if asked["shared"] else "own",
            rows=rows,
            **{key: worker[key] for key in _SIZES},
        ),
    )
    return replace(found, reason=reason or found.reason)


def _check_fit(
    plans: Sequence[tuple[int, MemoryPlan]], free: int, asked: Mapping[str, Any]
) -> None:
    from pdmesh.model.device.memory import check_all_fit
    from pdmesh.wire.errors import ConfigError

    whole = all(worker["ranks"] == 1 for worker in asked["workers"])
    several = sum(count for count, _ in plans) > 1
    try:
        check_all_fit(plans, free)
    except ConfigError as error:
        if asked["shared"] or not (whole and several):
            raise
        raise ConfigError(f"{error}, or add --share-weights for one copy of the weights") from error


def _where(device: str, devices: Sequence[str]) -> str:
    return f"on {device} " if len(devices) > 1 else ""


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
