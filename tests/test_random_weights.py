"""Weights that are made instead of read: the same in every process, others for other settings."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB

from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.launch.topology import SHIPPED_CONFIGS, shipped_config, shipped_model
from pdmesh.model.bindings import bindings
from pdmesh.model.config import ModelConfig, read_config
from pdmesh.model.device.full_width import DEEPSEEK_V3, full_width
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.device.sources import RandomSource
from pdmesh.model.expert_source import ModelExperts
from pdmesh.model.random_weights import (
    RandomExperts,
    RandomTensors,
    random_model,
    resized,
    served_config,
    served_fingerprint,
)
from pdmesh.model.served import Placing, load_served_model
from pdmesh.text.template import load_template
from pdmesh.text.tokenizer import load_tokenizer
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

SMALL = shipped_config("small")
SIZE = RandomWeights(layers=3, experts=8)
CONFIG = served_config(SMALL, SIZE)
NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, 5)


def test_a_tensor_depends_on_seed_and_name_alone():
    one, other = RandomTensors(5), RandomTensors(5)
    other.codes("model.layers.0.self_attn.o_proj.weight", (96, 64))
    first = one.codes(NAME, (128, 256)).float()
    assert torch.equal(first, other.codes(NAME, (128, 256)).float())
    assert not torch.equal(first, one.codes(NAME.replace("3", "4"), (128, 256)).float())
    assert not torch.equal(first, RandomTensors(6).codes(NAME, (128, 256)).float())


def test_products_of_unit_rows_have_unit_rows_and_no_two_rows_of_a_matrix_are_alike():
    tensors = RandomTensors(0)
    weight = tensors.dense(NAME, (2048, 1024), torch.float32)
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0)) @ weight.t()
    assert 0.95 < float(rows.std()) < 1.05
    assert abs(float(weight.mean())) < 0.01 / 32
    near = torch.corrcoef(tensors.dense("gate.weight", (256, 1024), torch.float32))
    assert float((near - torch.eye(256)).abs().max()) < 0.25


def test_norms_are_ones_and_biases_zeros(model):
    assert model.norm.unique().tolist() == [1.0]
    for gate in model.gates():
        assert gate.e_score_correction_bias.unique().tolist() == [0.0]
        assert gate.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_makes_the_experts_that_the_whole_model_has(dtype):
    whole = random_model(CONFIG, 5, dtype)
    without = random_model(CONFIG, 5, dtype, experts=False)
    assert without.blocks()[1].mlp.gate_up_proj.shape[0] == 0
    made, kept = RandomExperts(5, without), ModelExperts(whole)
    for layer in range(3):  # two, and the MTP layer's
        for left, right in zip(made.read(layer, (6, 1)), kept.read(layer, (6, 1)), strict=True):
            assert left.dtype == dtype
            assert torch.equal(left, right)


def test_the_model_in_fp8_and_the_plain_one_have_the_same_weights(model):
    source = RandomSource("cpu", 5)
    for binding in bindings(model):
        if binding.copy:
            continue
        if binding.matrix:
            made = dequantise_blocks(*source.matrix(binding.name, binding.shape))
            assert torch.allclose(made, binding.read(), rtol=1e-6, atol=0), binding.name
        else:
            made = source.plain(binding.name, binding.shape)
            assert torch.equal(made, binding.read().to(torch.bfloat16)), binding.name


def test_the_model_in_fp8_tells_how_many_tensors_it_makes():
    told = []
    made = DeviceModel.load(
        SMALL, progress=lambda name, done, total: told.append((done, total)), random=SIZE
    )
    assert told[-1] == (len(told), len(told))
    assert (made.config, made.weights.mtp is None) == (CONFIG, False)
    assert DeviceModel.load(SMALL, mtp=False, random=SIZE).weights.mtp is None


def test_the_first_layers_stay_dense_and_the_mtp_layer_comes_after_the_last():
    for layers, dense in ((1, 1), (2, 2), (3, 3), (8, 3), (61, 3)):
        config = resized(DEEPSEEK_V3, layers)
        assert config == full_width(layers)
        assert [config.is_moe_layer(i) for i in range(layers)] == [False] * dense + [True] * (
            layers - dense
        )
        assert config.is_moe_layer(layers)
    assert resized(DEEPSEEK_V3) == ModelConfig.from_hf(DEEPSEEK_V3) == full_width(61)


def test_another_number_of_experts_is_one_group():
    assert resized(DEEPSEEK_V3, 4, 256) == full_width(4)
    fewer = resized(DEEPSEEK_V3, 4, 32)
    assert (fewer.n_routed_experts, fewer.gate.num_groups, fewer.gate.top_k) == (32, 1, 8)
    with pytest.raises(ConfigError, match="num_experts_per_tok 8 is above the 4 experts"):
        resized(DEEPSEEK_V3, 4, 4)
    with pytest.raises(ConfigError, match="has no routed experts"):
        resized(DEEPSEEK_V3 | {"n_routed_experts": None}, 4, 4)


@pytest.mark.parametrize("name", SHIPPED_CONFIGS)
def test_the_shipped_configs_are_served(name):
    config = ModelConfig.from_path(shipped_config(name))
    assert config.num_nextn_predict_layers == 1
    assert config.vocab_size >= VOCAB


SETTINGS = [
    RandomWeights(),
    RandomWeights(seed=1),
    RandomWeights(layers=3),
    RandomWeights(experts=8),
    SIZE,
]


def test_pages_say_which_random_weights_made_them_and_workers_of_others_refuse_them(tmp_path):
    known = {served_fingerprint(SMALL, random) for random in SETTINGS}
    (tmp_path / "config.json").write_text(json.dumps(read_config(SMALL) | {"rope_theta": 500.0}))
    known.add(served_fingerprint(tmp_path, RandomWeights()))
    known.add(served_fingerprint(shipped_model(), None))
    assert len(known) == len(SETTINGS) + 2
    assert served_fingerprint(SMALL, RandomWeights(layers=4)) in known  # as the config says

    def fmt(seed):
        random = RandomWeights(seed=seed, layers=2)
        return load(random)[1]

    assert fmt(0) == fmt(0)
    assert fmt(0).fingerprint() != fmt(1).fingerprint()  # and so every page's hash
    difference = fmt(0).difference(fmt(1))
    assert "weights is 'random, seed 0, 2 layers, 16 experts: " in difference
    assert "and 'random, seed 1, 2 layers" in difference


def load(random, path: Path = SMALL, **changes):
    given = {
        "dtype": "float32",
        "placing": Placing(),
        "mtp": True,
        "page_size": 64,
        "arithmetic": "fast",
    }
    return load_served_model(
        path, "small-random", progress=lambda *_: None, random=random, **(given | changes)
    )


def test_the_mtp_layer_is_made_unless_it_is_left_out():
    made, fmt = load(SIZE)
    assert (made.mtp is None, fmt.num_layers, fmt.mtp_layers) == (False, 4, 1)
    made, fmt = load(SIZE, mtp=False)
    assert (made.mtp is None, fmt.num_layers, fmt.mtp_layers) == (True, 3, 0)


def test_text_goes_through_the_shipped_tokenizer_where_the_vocabulary_is_large_enough(tmp_path):
    tokenizer = load_tokenizer(shipped_model(), shipped_config("deepseek-v3"))
    assert tokenizer.vocab_size == 129280
    ids = load_template(shipped_model(), tokenizer).encode([{"role": "user", "content": "Hello!"}])
    assert ids == load_template(shipped_model(), load_tokenizer(shipped_model())).encode(
        [{"role": "user", "content": "Hello!"}]
    )
    assert max(ids) < VOCAB
    assert tokenizer.decode([100_000]) == ""
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    with pytest.raises(ConfigError, match="vocab_size of 1000 is less than the 4096 tokens"):
        load_tokenizer(shipped_model(), tmp_path)


@pytest.mark.gpu
def test_a_device_makes_the_numbers_that_a_cpu_makes():
    host, device = RandomTensors(7), RandomTensors(7, "cuda")
    for shape in ((2048, 7168), (7, 129), (1, 1), (300, 5)):
        made = device.codes(NAME, shape)
        assert made.device.type == "cuda"
        assert torch.equal(made.cpu().float(), host.codes(NAME, shape).float())
