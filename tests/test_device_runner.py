"""A decode runner over captured steps, with MTP drafts: tokens and pages of the reference."""

import pytest
import test_decode_runner as rig
import torch
from device_cases import exact_model, stored

from pdmesh.decode.capturing import captured_rows
from pdmesh.model.device.graphs import plain_capture
from pdmesh.model.reference import generate_reference
from pdmesh.wire.sampling import SamplingParams

NEW = 12


class Called:
    """A device model that is called as a module is."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *arguments):
        return self._model.forward(*arguments)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_answers_of_captured_steps_are_those_of_the_reference(drafts, monkeypatch):
    reference = stored(rig.tiny_model(41))
    device = exact_model(reference)
    monkeypatch.setattr(rig, "MODEL", Called(device))
    prompts = rig.PROMPTS[16]
    params = SamplingParams(temperature=0.0, max_tokens=NEW)
    run = rig.Run(prompts, params, page=16, drafts=drafts)
    device.capture(
        run.latents,
        captured_rows(drafts, True)[0],
        4,
        captured_rows(drafts, True)[1],
        plain_capture,
    )
    replays = []
    for graphs in device._graphs[0]:
        monkeypatch.setattr(graphs, "run", counting(graphs.run, replays))
    run.finish()
    assert run.tokens == [[*p, *generate_reference(reference, p, NEW)] for p in prompts]
    assert len(replays) == len(run.steps)  # no step was computed without a graph
    nobody = [0, 1, len(run.latents) - 1]
    assert bool((run.latents[nobody] == rig.GUARD).all())
    assert not any(bool(torch.isnan(run.published(i)).any()) for i in range(len(prompts)))


def counting(call, calls):
    def counted(*arguments):
        calls.append(1)
        return call(*arguments)

    return counted
