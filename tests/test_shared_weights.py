"""A model of mapped weights is the model that a worker would have loaded, or it is refused."""

from dataclasses import replace

import msgspec
import pytest
import torch
from checkpoints import random_checkpoint
from device_cases import ALIGNED
from model_cases import equal, one_slice, tokens_of

from pdmesh.kvtransfer.held_memory import HostMemory
from pdmesh.launch.topology import shipped_config, shipped_model
from pdmesh.model import planning
from pdmesh.model.batch import Batch
from pdmesh.model.device.loading import expected_weights, load_weights
from pdmesh.model.device.memory import check_all_fit, plan_memory, weight_bytes
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.planning import check_room, plan_pages
from pdmesh.model.random_weights import served_config
from pdmesh.model.served import Placing, load_served_model
from pdmesh.model.shared_weights import (
    Wanted,
    described,
    load_to_hold,
    named_tensors,
    shared_weights,
)
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.held_weights import HeldRegion, HeldWeights
from pdmesh.wire.random_weights import RandomWeights

SMALL = shipped_config("small")
RANDOM = RandomWeights(seed=3, layers=2, experts=8)
PLAIN = Wanted(SMALL, False, "float32", True, RANDOM)
FP8 = Wanted(SMALL, True, "bfloat16", True, RANDOM)


class Shared:
    """What a holder of these weights would offer, within this process."""

    device = "cpu"

    def __init__(self, wanted):
        tensors = load_to_hold(wanted, "cpu")
        self.memory = HostMemory()
        self.offered = self.memory.offer(list(tensors.values()))
        self.maps = 0
        self.held = HeldWeights(
            model=wanted.identity("cpu"),
            tensors=described(tensors, self.offered.places),
            regions=self.offered.regions,
        )

    def map(self):
        self.maps += 1
        return self.memory.map(self.held.regions, self.offered.fd)


@pytest.fixture(scope="module", params=["plain", "fp8"])
def case(request):
    wanted = PLAIN if request.param == "plain" else FP8
    return wanted, Shared(wanted)


def loaded(wanted, shared=None, device="cpu"):
    precision = "fp8" if wanted.fp8 else "plain"
    model, fmt = load_served_model(
        wanted.path,
        "m",
        dtype=wanted.dtype,
        placing=Placing(device, precision),
        mtp=wanted.mtp,
        page_size=16,
        arithmetic="fast",
        progress=lambda *_: None,
        random=wanted.random,
        shared=shared,
    )
    return model, fmt


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights_of(model):
    return named_tensors(model.weights if isinstance(model, DeviceModel) else model)


def check_same(given, expected):
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype, name
        assert given[name].shape == tensor.shape, name
        assert given[name].stride() == tensor.stride(), name
        assert torch.equal(bits(given[name]), bits(tensor)), name


def test_every_weight_is_the_one_that_the_worker_would_have_loaded(case):
    wanted, shared = case
    mapped, fmt = loaded(wanted, shared)
    own, own_fmt = loaded(wanted)
    assert fmt == own_fmt, "pages of the two may be exchanged"
    check_same(weights_of(mapped), weights_of(own))
    inside = {t.untyped_storage().data_ptr() for t in weights_of(mapped).values()}
    assert len(inside) == 1, "all of them lie in what was mapped"


def test_answers_are_those_of_a_model_that_loaded_its_own_to_the_last_bit(case):
    wanted, shared = case
    models = [loaded(wanted, shared)[0], loaded(wanted)[0]]
    tokens = tokens_of(40, vocab=4096)
    for form in ("mha", "absorbed"):
        batch = Batch.build([one_slice((2, 0, 1), 0, len(tokens))], [tokens], 16)
        found = [model.forward(batch, model.new_latents(3, 16), form) for model in models]
        assert equal(*found)


def test_the_shipped_model_is_mapped_as_it_is_read():
    wanted = Wanted(shipped_model(), False, "float32", True)
    shared = Shared(wanted)
    check_same(
        named_tensors(shared_weights(wanted, shared)), named_tensors(load_model(wanted.path))
    )


@pytest.mark.parametrize(
    "changes",
    [{}, ALIGNED, {"tie_word_embeddings": True}, {"q_lora_rank": None}, {"attention_bias": True}],
    ids=["plain", "aligned", "tied", "no-q-rank", "bias"],
)
def test_what_is_expected_of_a_checkpoint_is_what_reading_it_gives(tmp_path, changes):
    config = random_checkpoint(tmp_path, **changes).config
    read = named_tensors(load_weights(tmp_path, config, torch.device("cpu")))
    expected = named_tensors(expected_weights(tmp_path, config))
    forms = [
        {name: (t.dtype, t.shape, t.contiguous().stride()) for name, t in found.items()}
        for found in (read, expected)
    ]
    assert forms[0] == forms[1]
    wanted = Wanted(tmp_path, True, "bfloat16", True)
    check_same(named_tensors(shared_weights(wanted, Shared(wanted))), read)


@pytest.mark.parametrize(
    ("ours", "what"),
    [
        (replace(PLAIN, random=RandomWeights(seed=4, layers=2, experts=8)), "weights is 'random, "),
        (replace(PLAIN, random=RandomWeights(seed=3, layers=3, experts=8)), "weights is 'random, "),
        (replace(PLAIN, dtype="bfloat16"), "dtype is 'float32' there and 'bfloat16' here"),
        (replace(PLAIN, mtp=False), "mtp is True there and False here"),
        (FP8, "precision is 'plain' there and 'fp8' here"),
    ],
)
def test_weights_that_are_not_the_workers_are_refused_before_any_is_mapped(ours, what):
    shared = Shared(PLAIN)
    with pytest.raises(ConfigError, match=f"not this worker's: {what}") as caught:
        shared_weights(ours, shared)
    assert "\n" not in str(caught.value)
    assert not shared.maps


def test_weights_on_another_device_are_refused():
    shared = Shared(PLAIN)
    shared.device = "GPU-1"
    with pytest.raises(ConfigError, match="device is 'cpu' there and 'GPU-1' here"):
        shared_weights(PLAIN, shared)


def changed(held, number, **values):
    """`held` with another tensor in the place of one."""
    names = ("name", "dtype", "shape", "strides", "region", "offset")
    entry = held.tensors[number]
    fields = {name: getattr(entry, name) for name in names} | values
    tensors = list(held.tensors)
    tensors[number] = type(entry)(**fields)
    return msgspec.structs.replace(held, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"name": "other"}, "is missing there and"),
        ({"dtype": "bfloat16"}, r"is \[4096, \d+\] bfloat16, .* there and \[4096, \d+\] float32"),
        ({"shape": (1, 1)}, r"is \[1, 1\] float32, "),
        ({"strides": (1, 4096)}, r"strides \[1, 4096\] there and "),
        ({"offset": 1 << 40}, "have no place for embed_tokens"),
        ({"region": 3}, "have no place for embed_tokens"),
    ],
)
def test_tensors_of_another_form_are_refused_by_name(values, sentence):
    shared = Shared(PLAIN)
    shared.held = changed(shared.held, 0, **values)
    with pytest.raises(ConfigError, match=sentence) as caught:
        shared_weights(PLAIN, shared)
    assert "\n" not in str(caught.value)
    assert not shared.maps


def test_a_tensor_too_many_is_refused():
    shared = Shared(PLAIN)
    entry = msgspec.structs.replace(shared.held.tensors[0], name="more")
    shared.held = msgspec.structs.replace(shared.held, tensors=(*shared.held.tensors, entry))
    with pytest.raises(ConfigError, match=r"more is \[4096, .* there and missing here"):
        shared_weights(PLAIN, shared)


# ---- memory -----------------------------------------------------------------------------------

SIZES = {"mtp": True, "page_size": 16, "rows": 64, "sequences": 8}


def planned(weights, free, total, share=0.5, monkeypatch=None):
    monkeypatch.setattr(planning, "memory_of", lambda _: (free, total))
    return plan_pages(
        SMALL, Placing("cpu", "fp8"), share=share, pages=0, random=RANDOM, weights=weights, **SIZES
    )[1]


def test_weights_that_are_shared_are_counted_once(monkeypatch):
    needed = weight_bytes(served_config(SMALL, RANDOM))
    own = planned("own", 8 * 10**9, 10**10, monkeypatch=monkeypatch)
    before = planned("to hold", 8 * 10**9, 10**10, monkeypatch=monkeypatch)
    after = planned("held", 8 * 10**9 - needed, 10**10, monkeypatch=monkeypatch)
    assert (own.weights, own.shared) == (needed, 0)
    assert (before.weights, before.shared) == (0, needed)
    assert before == after, "before the holder starts and once it holds them: the same plan"
    assert before.budget == own.budget - int(needed * 0.5)
    tight = planned("to hold", 3 * 10**9, 10**10, 1.0, monkeypatch)
    assert tight.budget == 3 * 10**9 - needed, "what is free now has to take the weights as well"
    assert "weights shared (one copy of" in before.describe()
    assert "weights 0" in own.describe()


def test_two_workers_fit_where_only_one_copy_of_the_weights_does():
    own = plan_memory(150, 150, 0.5, 60, 5, 1, 0, 10**6)
    shared = plan_memory(150, 90, 0.5, 0, 5, 1, 0, 10**6, 60)
    assert shared.pages > own.pages
    with pytest.raises(ConfigError, match="does not fit beside 0.0 GB of shared weights"):
        plan_memory(150, 20, 0.5, 0, 50, 1, 0, 10**6, 130)
    check_all_fit([(2, shared)], 60 + 2 * (5 + 2))
    with pytest.raises(ConfigError, match="for one copy of the weights, and steps and two pages"):
        check_all_fit([(2, shared)], 60 + 2 * (5 + 2) - 1)


def test_a_holder_that_has_no_room_says_so_before_it_loads(monkeypatch):
    monkeypatch.setattr(planning, "memory_of", lambda _: (10**6, 10**10))
    with pytest.raises(ConfigError, match="do not fit: weights .* GB are free.*fewer --layers"):
        check_room(SMALL, Placing("cpu", "fp8"), True, "float32", RANDOM)
    monkeypatch.setattr(planning, "memory_of", lambda _: (10**10, 10**10))
    assert "twice that" in check_room(SMALL, Placing(), True, "float32", RANDOM)


def test_regions_count_as_large_as_they_are():
    held = HeldWeights(
        model=PLAIN.identity("cpu"), tensors=(), regions=(HeldRegion(b"a", 3), HeldRegion(b"b", 4))
    )
    assert held.nbytes == 7
