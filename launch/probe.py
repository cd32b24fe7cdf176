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

_SIZES = ("role", "share", "pages", "rows", "sequences", "ranks", "redundant", "threshold")


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Either a ``problem``, one sentence with the fix, or ``lines`` about what was planned."""
    import msgspec

    from pdmesh.model.device.memory import GB
    from pdmesh.model.machine import remarks, this_machine
    from pdmesh.model.planning import memory_of, plan_pages
    from pdmesh.model.served import Placing
    from pdmesh.wire.errors import ConfigError
    from pdmesh.wire.random_weights import RandomWeights

    random = msgspec.convert(asked["random"], RandomWeights | None)
    shared = {key: asked[key] for key in ("mtp", "page_size", "dtype")}
    devices = list(dict.fromkeys(worker["device"] for worker in asked["workers"]))
    lines: list[str] = []
    try:
        for device in devices:
            placing, plans = Placing(device, asked["precision"], asked["latents"]), []
            for worker in asked["workers"]:
                if worker["device"] != device:
                    continue
                _, plan = plan_pages(
                    Path(asked["path"]),
                    placing,
                    random=random,
                    **shared,
                    weights="to hold" if asked["shared"] else "own",
                    **{key: worker[key] for key in _SIZES},
                )
                if plan is not None:
                    plans.append((worker["count"], plan))
                    each = f"each of {worker['count']} " if worker["count"] > 1 else ""
                    lines.append(f"{each}{worker['role']} on {device}: {plan.describe()}")
            if plans:
                free = memory_of(device)[0]
                _check_fit(plans, free, asked)
                lines.append(f"{free / GB:.1f} GB are free {_where(device, devices)}now")
    except ConfigError as error:
        return {"problem": error.message}
    if devices != ["cpu"]:
        lines += remarks(this_machine(), devices[0], placing.chosen)
    return {"lines": lines}


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
