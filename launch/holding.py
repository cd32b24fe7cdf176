"""``pdmesh serve weights``: a process that holds a model's weights for the workers of a device.

It outlives its workers, so that one that starts again finds them at once; when it ends itself, its
workers end too, since memory of a device goes with the process that took it.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

from pdmesh.launch.topology import Topology
from pdmesh.registry.loading import LoadingLog
from pdmesh.wire.held_weights import HeldWeights
from pdmesh.wire.logs import event

log = logging.getLogger(__name__)


def hold(topology: Topology, name: str, path: Path, device: str) -> None:
    """Loads or makes the weights, then offers them until SIGTERM or Ctrl-C.

    Args:
        name: of this process.
        path: of the socket where they are offered.
        device: where they are to be, as this process knows it.

    Raises:
        ConfigError: they cannot be loaded, do not fit, or cannot be offered.
    """
    from pdmesh.kvtransfer.held_memory import held_memory
    from pdmesh.kvtransfer.weight_holder import WeightHolder
    from pdmesh.model.planning import check_room
    from pdmesh.model.served import Placing
    from pdmesh.model.shared_weights import Wanted, described, load_to_hold

    model = topology.model
    placing = Placing(device, model.precision)
    needed = check_room(topology.model_path, placing, model.mtp, model.dtype, topology.random)
    event(log, "memory planned", plan=needed)
    fp8 = placing.chosen == "fp8"
    dtype = "bfloat16" if fp8 else model.dtype
    wanted = Wanted(topology.model_path, fp8, dtype, model.mtp, topology.random)
    memory = held_memory(device)
    loading = LoadingLog(name, topology.model_path)
    tensors = load_to_hold(wanted, device, loading.progress)
    offered = memory.offer(list(tensors.values()))
    held = HeldWeights(
        model=wanted.identity(memory.device),
        tensors=described(tensors, offered.places),
        regions=offered.regions,
    )
    del tensors
    loading.loaded()
    holder = WeightHolder(path, held, offered)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: holder.stop())
    event(log, "holding weights", at=path, gb=f"{held.nbytes / 1e9:.3f}", device=memory.device)
    holder.run()
