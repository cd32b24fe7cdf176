"""A prompt's layers neither ask the device for a number nor hand it one: the host runs ahead.

Tensors without memory play the device: nothing can be read back from them. The operations give
what they gave on a CPU, without its numbers.
"""

from dataclasses import replace

import pytest
import torch
from device_cases import ALIGNED, device_model, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pdmesh.kernels.backends import PLAIN, Backends, Choice
from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.device import layers
from pdmesh.model.device.building import build_weights
from pdmesh.model.device.full_width import full_width
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import RandomSource
from pdmesh.model.device.step import plan_step

NOWHERE = torch.device("meta")
PAGE = 16


class Repeated:
    """Operations that note what they give, and later give the same shapes again, nowhere."""

    def __init__(self):
        self.made = []

    def noting(self):
        def op(call):
            def made(*given, **named):
                self.made.append(call(*given, **named))
                return self.made[-1]

            return made

        return self._backends(lambda name, call: op(call))

    def again(self):
        results = iter(tree_map(nowhere, self.made))
        return self._backends(lambda name, call: lambda *given, **named: next(results))

    def _backends(self, call):
        return Backends([Choice(name, "", "", call(name, one)) for name, one in PLAIN.items()])


def nowhere(value):
    return value.to(NOWHERE) if isinstance(value, torch.Tensor) else value


class OnOneDevice(TorchDispatchMode):
    """Nothing of the host's goes into what is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert all(x.device == NOWHERE for x in given), f"{func} takes a tensor of the host"
        return func(*args, **(kwargs or {}))


def two_prompts(device):
    """One at its beginning and a later chunk of another."""
    items = [SequenceSlice((0, 1), 0, 20, 0), SequenceSlice((2, 3, 4), 16, 40, 16)]
    return Batch.build(items, [[7] * 20, [9] * 24], PAGE, device)


def computed(model, pool, device):
    """The layers that were told of, in order; planning comes before and may do what it likes."""
    step = plan_step(two_prompts(device), "mha", pool.shape[1], first_key=0)
    told = []
    step = model.layers.planned(step)
    _ = step.tokens, step.positions
    if device == NOWHERE:
        with OnOneDevice():
            model.run(step, pool, told.append)
    else:
        model.run(step, pool, told.append)
    return told


@pytest.mark.parametrize("most", [0, 512], ids=["sorted by expert", "room for all"])
def test_no_layer_of_a_prompt_waits_for_the_device(most, monkeypatch):
    monkeypatch.setattr(layers, "MASKED_ROWS", most)
    ops = Repeated()
    model = device_model(random_model(**ALIGNED), ops.noting())
    pool = model.new_latents(8, PAGE)
    wanted = computed(model, pool, model.device)
    weights = replace(model.weights, embedding=model.weights.embedding.to(NOWHERE))
    elsewhere = DeviceModel(model.config, weights, ops.again())
    assert computed(elsewhere, pool.to(NOWHERE), NOWHERE) == wanted == [0, 1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("rows", [128, 1024])
def test_no_layer_waits_with_the_kernels_of_a_device(rows):
    """What torch would wait for raises; a library that waits by itself is not seen."""
    device = torch.device("cuda")
    config = full_width(4, 16)
    model = DeviceModel(config, build_weights(config, RandomSource(device), device, mtp=False))
    pool = model.new_latents(32)
    items = [SequenceSlice(tuple(range(32)), rows, 2 * rows, rows)]
    batch = Batch.build(items, [[7] * rows], device=device)
    step = model.layers.planned(plan_step(batch, "mha", pool.shape[1], first_key=0))
    with torch.no_grad():
        model.run(step, pool)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.run(step, pool)
        finally:
            torch.cuda.set_sync_debug_mode("default")
