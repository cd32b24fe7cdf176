"""Device models whose routed experts are spread over ranks of this process, and the one alone."""

from concurrent.futures import ThreadPoolExecutor

import torch
from device_cases import CPU, random_model

from pdmesh.kernels.expert_exchange import ExchangeSize
from pdmesh.kernels.symmetric import in_process_heaps
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.rank import DeviceRank
from pdmesh.model.device.sources import ModelSource
from pdmesh.model.parallel.nvshmem import NvshmemExperts
from pdmesh.model.parallel.placement import Placement
from pdmesh.model.parallel.replicas import ReplicaTable

PAGE = 16
SHAPE = {"hidden_size": 128, "n_routed_experts": 8, "num_hidden_layers": 3}


def moe_layers(config):
    count = config.num_hidden_layers + (1 if config.num_nextn_predict_layers else 0)
    return sum(config.is_moe_layer(n) for n in range(count))


def random_reference(seed=0, **changes):
    """A plain model, and the device model of it alone."""
    model = random_model(seed, **SHAPE | changes)
    return model, DeviceModel(model.config, build_weights(model.config, ModelSource(model), CPU))


def rank_of(
    model,
    heap,
    placement,
    tokens,
    host=True,
    timeout_s=30.0,
    most_copies=1,
    contiguous=False,
):
    """One rank of a plain model, where its heap is."""
    config, layers, device = model.config, range(len(placement.layers)), heap.device
    held = [placement.layers[n][heap.rank] for n in layers]
    weights = build_weights(config, ModelSource(model, device), device, held=held)
    slots = max(len(own) for layer in placement.layers for own in layer)
    ranks = placement.num_ranks
    shape = (ranks, slots, tokens, config.hidden_size, config.gate.top_k)
    size = ExchangeSize.contiguous(*shape) if contiguous else ExchangeSize(*shape, ranks * tokens)
    tables = [ReplicaTable.build(placement, n, device) for n in layers]
    more = {"lanes": 2, "timeout_s": timeout_s, "most_copies": most_copies, "host": host}
    exchange = NvshmemExperts(heap, tables, size, **more)
    return DeviceRank(DeviceModel(config, weights), exchange, placement)


def ranks_of(model, ranks, tokens=128, placement=None, device="cpu", **more):
    """All ranks of a plain model."""
    config = model.config
    placement = placement or Placement.even(moe_layers(config), config.n_routed_experts, ranks)
    return [rank_of(model, h, placement, tokens, **more) for h in in_process_heaps(ranks, device)]


def together(ranks, call):
    """`call(number, rank)` of all ranks at once, each on a thread; then whether all were there."""

    def run(number):
        with torch.inference_mode():
            return call(number, ranks[number])

    with ThreadPoolExecutor(len(ranks)) as pool:
        results = list(pool.map(run, range(len(ranks))))
    for rank in ranks:
        rank.exchange.check()
    return results


def in_turn(group, works, schedule):
    """Walks all ranks through a schedule item by item, on one thread: no wait is for nothing."""
    with torch.inference_mode():
        for item in schedule:
            for rank, work in zip(group, works, strict=True):
                rank._stages.run(item, work)
        results = [work.result() for work in works]
    for rank in group:
        rank.exchange.check()
    return results
