"""A process that looks at this machine for ``pdmesh up`` and ends: a supervisor that looked itself
would hold memory of the device as long as the mesh runs.

Reads one JSON object (see ``machine.asked``) from standard input and prints one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Either a ``problem``, one sentence with the fix, or ``lines`` about what was planned."""
    import msgspec

    from pdmesh.model.device.memory import GB, check_all_fit
    from pdmesh.model.machine import remarks, this_machine
    from pdmesh.model.planning import memory_of, plan_pages
    from pdmesh.model.served import Placing
    from pdmesh.wire.errors import ConfigError
    from pdmesh.wire.random_weights import RandomWeights

    placing = Placing(asked["device"], asked["precision"], asked["latents"])
    random = msgspec.convert(asked["random"], RandomWeights | None)
    shared = {key: asked[key] for key in ("mtp", "page_size", "share", "dtype")}
    lines, plans = [], []
    try:
        for worker in asked["workers"]:
            sizes = {key: worker[key] for key in ("pages", "rows", "sequences", "ranks")}
            _, plan = plan_pages(
                Path(asked["path"]),
                placing,
                random=random,
                redundant=worker["redundant"],
                **shared,
                **sizes,
            )
            if plan is not None:
                plans.append((worker["count"], plan))
                each = f"each of {worker['count']} " if worker["count"] > 1 else ""
                lines.append(f"{each}{worker['role']} on {placing.device}: {plan.describe()}")
        check_all_fit(plans, memory_of(placing.device)[0] if plans else 0)
    except ConfigError as error:
        return {"problem": error.message}
    if plans:
        lines.append(f"{memory_of(placing.device)[0] / GB:.1f} GB are free now")
    if placing.device != "cpu":
        lines += remarks(this_machine(), placing.device, placing.chosen)
    return {"lines": lines}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
