"""Checkpoints: what is written is read back, and what is wrong is named before anything serves."""

import json
import shutil

import pytest
import torch
from model_cases import TINY, V2, tiny_model, tokens_of, yarn
from safetensors.torch import load_file, save_file

from pdmesh.kernels.fp8 import dequantise_blocks, quantise_blocks
from pdmesh.model.bindings import bindings
from pdmesh.model.weights import fingerprint, load_model, save_checkpoint
from pdmesh.wire.errors import ConfigError

SHAPES = {
    "plain": {},
    "no q_lora, bias": {"q_lora_rank": None, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "softmax": V2 | {"topk_method": "group_limited_greedy"},
    "every second layer": {"moe_layer_freq": 2, "num_hidden_layers": 4},
    "yarn": {"rope_scaling": yarn(attention_factor=1.2, truncate=False)},
}


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("shard", [1 << 30, 20_000])
def test_a_saved_model_is_read_back_bit_for_bit(name, shard, tmp_path):
    model = tiny_model(**SHAPES[name])
    save_checkpoint(model, tmp_path, max_shard_bytes=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == 20_000)
    back = load_model(tmp_path)
    assert back.config == model.config
    left, right = model.state_dict(), back.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_checkpoint_has_the_published_names_one_tensor_an_expert(tmp_path):
    model = tiny_model()
    save_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, shape in {
        "model.embed_tokens.weight": (131, 64),
        "lm_head.weight": (131, 64),
        "model.layers.0.mlp.gate_proj.weight": (96, 64),
        "model.layers.1.self_attn.q_a_proj.weight": (40, 64),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": (48, 64),
        "model.layers.1.self_attn.kv_b_proj.weight": (4 * 44, 32),
        "model.layers.2.mlp.experts.7.down_proj.weight": (64, 24),
        "model.layers.2.mlp.gate.e_score_correction_bias": (8,),
        "model.layers.3.eh_proj.weight": (64, 128),
        "model.layers.3.shared_head.norm.weight": (64,),
    }.items():
        assert tuple(stored[name].shape) == shape, name
    heads = stored["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 44, 32)
    assert torch.equal(heads[:, :24], model.blocks()[1].self_attn.k_b_proj)
    assert torch.equal(heads[:, 24:], model.blocks()[1].self_attn.v_b_proj)


def test_fp8_keeps_embedding_head_norms_and_routers_and_survives_a_second_save(tmp_path):
    # 176 x 32, 131 rows, 288 columns: partial last blocks.
    model = tiny_model(hidden_size=288, q_lora_rank=136, moe_intermediate_size=132)
    save_checkpoint(model, tmp_path / "a", fp8=True, max_shard_bytes=150_000)
    once = load_model(tmp_path / "a", dtype=torch.float32)
    assert once.config.fp8
    for block, saved in zip(model.blocks(), once.blocks(), strict=True):
        assert torch.equal(block.input_norm.bfloat16(), saved.input_norm.bfloat16())
        exact = block.self_attn.o_proj.weight
        assert torch.equal(
            dequantise_blocks(*quantise_blocks(exact)), saved.self_attn.o_proj.weight
        )
    assert torch.equal(model.embed_tokens.bfloat16().float(), once.embed_tokens)
    left, right = model.gates()[0], once.gates()[0]
    assert torch.equal(left.e_score_correction_bias, right.e_score_correction_bias)
    assert torch.equal(left.weight.bfloat16().float(), right.weight)
    save_checkpoint(once, tmp_path / "b", fp8=True)
    twice = load_model(tmp_path / "b")
    for key, value in once.state_dict().items():
        assert (twice.state_dict()[key] - value).abs().max() <= 1e-6 * value.abs().max(), key
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_weights_are_cast_and_routers_stay_float32(tmp_path):
    save_checkpoint(tiny_model(), tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.gates()[0].weight.dtype == torch.float32
    assert model.gates()[0].e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_any_float_type_is_read(checkpoint, stored, loaded):
    edit(checkpoint, lambda t: t.update({name: value.to(stored) for name, value in t.items()}))
    assert {t.dtype for t in load_file(checkpoint / "model.safetensors").values()} == {stored}
    model = load_model(checkpoint, dtype=loaded)
    exact, read = tiny_model().state_dict(), model.state_dict()
    assert exact.keys() == read.keys()
    for name, value in exact.items():
        want = value.to(stored).to(read[name].dtype)
        assert torch.equal(read[name], want), name
    assert model.dtype == loaded
    assert model.gates()[0].weight.dtype == torch.float32


def test_a_smaller_checkpoint_replaces_the_shards_of_a_larger_one(tmp_path):
    save_checkpoint(tiny_model(num_hidden_layers=4), tmp_path, max_shard_bytes=20_000)
    save_checkpoint(tiny_model(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_model(tmp_path).config.num_hidden_layers == 3


def test_progress_is_told_of_every_tensor(tmp_path):
    save_checkpoint(tiny_model(), tmp_path)
    seen = []
    load_model(tmp_path, progress=lambda name, done, total: seen.append((name, done, total)))
    assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] == seen[-1][2]


def test_the_mtp_layer_can_be_left_out(tmp_path):
    save_checkpoint(tiny_model(), tmp_path)
    model = load_model(tmp_path, mtp=False)
    assert model.mtp is None
    assert model.num_latent_layers == 3


@pytest.fixture
def checkpoint(tmp_path):
    save_checkpoint(tiny_model(), tmp_path)
    return tmp_path


def edit(path, change, file="model.safetensors"):
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file)


def test_everything_wrong_with_the_tensors_is_listed_in_one_error(checkpoint):
    def change(tensors):
        del tensors["model.layers.1.self_attn.o_proj.weight"]
        tensors["model.layers.9.surprise"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(63)
        tensors["lm_head.weight"] = torch.zeros(131, 64, dtype=torch.int32)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64).to(torch.float8_e4m3fn)

    edit(checkpoint, change)
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint)
    for phrase in (
        "missing model.layers.1.self_attn.o_proj.weight",
        "extra model.layers.9.surprise",
        "model.norm.weight is [63], not [64]",
        "lm_head.weight has dtype I32",
        "model.layers.0.mlp.up_proj.weight is FP8, but config.json has no quantization_config",
    ):
        assert phrase in caught.value.message


def test_fp8_scales_that_are_missing_or_misshapen_are_named(tmp_path):
    save_checkpoint(tiny_model(), tmp_path, fp8=True)

    def change(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(2, 2)
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.ones(96, 64)

    edit(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    for phrase in (
        "missing model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.layers.0.mlp.down_proj.weight_scale_inv is [2, 2], not [1, 1]",
        "extra model.layers.0.mlp.gate_proj.weight_scale_inv",
    ):
        assert phrase in caught.value.message


def test_fp8_matrices_that_no_block_grid_divides_are_read_as_stored(tmp_path):
    """vllm-project/vllm#33327: sizes around a block, 192, 576, and less than one."""
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 132,
        "q_lora_rank": 124,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_nextn_predict_layers": 0,
    }
    save_checkpoint(tiny_model(**sizes), tmp_path, fp8=True)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = {binding.name: binding.read() for binding in bindings(load_model(tmp_path))}
    shapes = set()
    for name, scales in stored.items():
        if name.endswith("_scale_inv"):
            matrix = name.removesuffix("_scale_inv")
            n, k = stored[matrix].shape
            shapes.add((n, k))
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
            assert torch.equal(loaded[matrix], stored[matrix].float() * spread), matrix
    assert {(132, 192), (192, 132), (124, 192), (576, 192), (24, 192)} <= shapes


def test_a_copy_of_the_embedding_in_the_mtp_layer_must_be_a_copy(checkpoint):
    name = "model.layers.3.embed_tokens.weight"
    edit(checkpoint, lambda t: t.update({name: t["model.embed_tokens.weight"].clone()}))
    load_model(checkpoint)
    edit(checkpoint, lambda t: t[name].add_(1.0))
    with pytest.raises(ConfigError, match="must hold the same numbers"):
        load_model(checkpoint)


@pytest.mark.parametrize("keep", [4, 200, -100])
def test_a_truncated_file_is_one_clear_sentence(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="is not a complete safetensors file"):
        load_model(checkpoint)


def test_a_wrong_directory_or_file_is_one_clear_sentence(checkpoint, tmp_path):
    def refusal(path):
        with pytest.raises(ConfigError) as caught:
            load_model(path)
        assert "\n" not in caught.value.message
        return caught.value.message

    assert "is not a directory with a model" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{ not json")
    assert "cannot be read" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[1]")
    assert "does not hold a JSON object" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(TINY))
    assert "has neither model.safetensors nor" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(tmp_path / "empty")


def test_an_index_that_names_absent_files_or_is_broken_is_refused(tmp_path):
    save_checkpoint(tiny_model(), tmp_path, max_shard_bytes=100_000)
    first = next(iter(sorted(tmp_path.glob("model-*.safetensors"))))
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"lacks weight files of its index: {first.name}"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        load_model(tmp_path)


def test_a_fingerprint_changes_with_one_bit_of_the_weights_or_one_field(checkpoint, tmp_path):
    original = fingerprint(checkpoint)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, copy / name)
    assert fingerprint(copy) == original
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"transformers_version": "9"}))
    assert fingerprint(copy) == original, "a field that changes no result does not count"
    (copy / "config.json").write_text(json.dumps(raw | {"routed_scaling_factor": 2.0}))
    assert fingerprint(copy) != original
    (copy / "config.json").write_text(json.dumps(raw))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert fingerprint(copy) != original


def test_generation_from_a_saved_model_equals_generation_before(checkpoint):
    from pdmesh.model.reference import generate_reference

    before = generate_reference(tiny_model(), tokens_of(70), 12)
    assert generate_reference(load_model(checkpoint), tokens_of(70), 12) == before
