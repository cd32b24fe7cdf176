"""How a worker places a model: precision, page format, pages, captured rows, refusals."""

import os

import msgspec
import pytest
import torch
from checkpoints import random_checkpoint

from pdmesh.decode.capturing import captured_rows
from pdmesh.kernels.fp8 import dequantise_blocks
from pdmesh.launch.checks import check_together
from pdmesh.launch.processes import worker_spec
from pdmesh.launch.ranks import whole_groups
from pdmesh.launch.serve import _own_device
from pdmesh.launch.topology import Topology, shipped_model
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.model import DeviceModel
from pdmesh.model.parallel.device_heap import check_nvshmem
from pdmesh.model.parallel.serving import Ranks, join_ranks
from pdmesh.model.planning import plan_pages
from pdmesh.model.served import Placing, load_served_model, store_dtype
from pdmesh.model.weights import load_model
from pdmesh.wire.errors import ConfigError

SHIPPED = shipped_model()
LOAD = {"dtype": "float32", "mtp": True, "page_size": 64, "arithmetic": "fast"}


def load(placing, **changes):
    return load_served_model(
        SHIPPED, "tiny", placing=placing, progress=lambda *_: None, **LOAD | changes
    )


@pytest.mark.parametrize(
    ("placing", "chosen"),
    [
        (Placing(), "plain"),
        (Placing("cuda"), "fp8"),
        (Placing("cuda:1"), "fp8"),
        (Placing("cuda", "plain"), "plain"),
        (Placing("cpu", "fp8"), "fp8"),
    ],
)
def test_fp8_is_the_precision_of_a_cuda_device_unless_another_is_asked_for(placing, chosen):
    assert placing.chosen == chosen


def test_workers_of_another_precision_or_another_form_of_latents_refuse_each_other():
    plain = load(Placing(), dtype="bfloat16")[1]
    fp8, packed = (load(p)[1] for p in (Placing("cpu", "fp8"), Placing("cpu", "fp8", "fp8")))
    formats = (plain, fp8, packed)
    assert len({f.fingerprint() for f in formats}) == 3
    assert plain.difference(fp8) == "precision is 'plain' here and 'fp8' there"
    assert "latent_width is 576 here and 656 there" in (fp8.difference(packed) or "")
    four_scales = msgspec.structs.replace(packed, layout=fp8.layout)
    assert packed.difference(four_scales) == "layout is 2 here and 1 there"
    assert (fp8.page_layer_bytes, packed.page_layer_bytes) == (64 * 1152, 64 * 656)
    assert [store_dtype(f) for f in formats] == [torch.bfloat16, torch.bfloat16, torch.uint8]


def test_a_checkpoint_in_fp8_is_kept_bit_for_bit():
    model = DeviceModel.load(SHIPPED)
    reference = load_model(SHIPPED)
    weights = model.weights.layers[0].attention
    rows = weights.first_rows
    first = dequantise_blocks(*weights.first.weight)
    mine = reference.layers[0].self_attn.qkv_a_proj.weight
    assert torch.equal(first[:rows], mine[:rows])
    assert torch.equal(first[weights.latent_at :], mine[rows:])
    assert not bool(first[rows : weights.latent_at].any())
    experts = model.weights.layers[1].mlp
    whole = torch.stack([dequantise_blocks(v, s) for v, s in zip(*experts.gate_up, strict=True)])
    assert torch.equal(whole, reference.layers[1].mlp.gate_up_proj)


def test_a_checkpoint_that_is_not_whole_is_refused_with_all_that_is_wrong(tmp_path):
    random_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        DeviceModel.load(tmp_path)


def test_exact_arithmetic_and_packed_latents_of_other_widths_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="exact arithmetic"):
        load(Placing("cpu", "fp8"), arithmetic="exact")
    with pytest.raises(ConfigError, match="go with FP8 precision"):
        load(Placing("cpu", "plain", "fp8"))


TWO = ("127.0.0.1:1", "127.0.0.1:2")


async def test_a_model_in_fp8_alone_is_called_itself():
    model, fmt = load(Placing("cpu", "fp8"))
    assert await join_ranks(model, fmt, Ranks(0, (), "g", 1.0)) == (model, None)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (Ranks(0, (), "g", 1.0, virtual=2), "virtual ranks compute in plain precision"),
        (Ranks(0, TWO, "g", 1.0, tp=2, most_rows=4), "ranks in fp8 have all attention heads"),
        (Ranks(2, TWO, "g", 1.0, most_rows=4), "no rank 2 among 2 ranks"),
    ],
)
def test_ranks_in_fp8_that_cannot_be_are_refused_with_what_to_do(ranks, message):
    with pytest.raises(ConfigError, match=message):
        ranks.spread(ModelConfig.from_path(SHIPPED), True)


def test_a_rank_in_fp8_loads_its_own_experts_only():
    config = ModelConfig.from_path(SHIPPED)
    spread = Ranks(1, TWO, "g", 1.0, redundant=2, most_rows=4).spread(config, True)
    rank = load(Placing("cpu", "fp8"), spread=spread)[0]
    whole = load(Placing("cpu", "fp8"))[0]
    layers = [*range(1, config.num_hidden_layers), -1]
    for layer, held in zip(layers, spread.held, strict=True):
        mine, all_of_them = (
            (m.weights.layers[layer] if layer > 0 else m.weights.mtp.layer).mlp
            for m in (rank, whole)
        )
        assert len(held) == mine.gate_up.values.shape[0] == 17
        for one, every in ((mine.gate_up, all_of_them.gate_up), (mine.down, all_of_them.down)):
            bits = every.values.view(torch.uint8)[list(held)]
            assert torch.equal(one.values.view(torch.uint8), bits)
            assert torch.equal(one.scales, every.scales[list(held)])


def test_a_worker_on_a_cpu_has_the_pages_that_were_asked_for():
    given = {"mtp": True, "page_size": 64, "share": 1.0, "rows": 512, "sequences": 32}
    assert plan_pages(SHIPPED, Placing(), pages=7, **given) == (7, None)
    assert plan_pages(SHIPPED, Placing(), pages=0, **given) == (256, None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="was asked for, and"):
            plan_pages(SHIPPED, Placing("cuda"), pages=0, **given)


@pytest.mark.parametrize(
    ("drafts", "mtp", "rows"),
    [
        (0, True, ((1,), ())),
        (1, True, ((2,), (2,))),
        (3, True, ((4,), (1, 4))),
        (-1, True, ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))),
        (1, False, ((1,), ())),
    ],
)
def test_the_numbers_of_rows_that_steps_have_are_captured(drafts, mtp, rows):
    assert captured_rows(drafts, mtp) == rows


def arguments(topology):
    return worker_spec(topology, "decode", "decode-0", SHIPPED / "key", 0).arguments


def told(topology, flag):
    given = arguments(topology)
    return given[given.index(flag) + 1]


def test_workers_share_a_device_evenly_and_take_the_pages_that_fit():
    topology = Topology()
    assert told(topology, "--pages") == "256"
    assert "--memory-share" not in arguments(topology)
    cuda = topology.changed("model", "--device", device="cuda")
    check_together(cuda)
    assert (told(cuda, "--pages"), told(cuda, "--memory-share")) == ("auto", "0.3333")
    asked = cuda.changed("decode", "--pages", pages=99)
    assert told(asked, "--pages") == "99"


def test_ranks_share_a_device_with_all_other_workers():
    cuda = Topology().changed("model", "--device", device="cuda")
    ranks = whole_groups(cuda.changed("decode", "--decode-ep", ep=4))
    check_together(ranks)
    assert told(ranks, "--memory-share") == "0.2000"
    both = whole_groups(ranks.changed("prefill", "--prefill-ep", ep=4))
    check_together(both)
    assert told(both, "--memory-share") == "0.1250"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_of_a_model_whose_rows_are_no_whole_blocks_are_refused(tmp_path, role):
    random_checkpoint(tmp_path)
    topology = Topology().changed("model", "--precision", precision="fp8", path=tmp_path)
    with pytest.raises(ConfigError, match=f"{role}-ep: .*this model's are 64 wide"):
        check_together(topology.changed(role, f"--{role}-ep", ep=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_ranks_on_gpus_where_there_is_no_nvshmem_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="exchange rows through NVSHMEM"):
        check_nvshmem()


def test_workers_take_several_devices_in_turn_each_with_its_own_share():
    devices = "cuda:0,cuda:2"
    topology = Topology().changed("model", "--device", device=devices)
    topology = whole_groups(topology.changed("decode", "--decode-ep", ep=4))
    check_together(topology)
    specs = [
        worker_spec(topology, role, name, SHIPPED / "key", 0).arguments
        for role, name in (("prefill", "prefill-0"), *(("decode", f"decode-{n}") for n in range(4)))
    ]
    placed = [
        tuple(given[given.index(flag) + 1] for flag in ("--device", "--memory-share"))
        for given in specs
    ]
    first, second = ("cuda:0", "0.3333"), ("cuda:2", "0.5000")
    assert placed == [first, first, second, first, second]


@pytest.mark.parametrize(
    ("visible", "device", "ranks", "seen"),
    [
        (None, "cuda", True, None),
        (None, "cuda:1", False, "1"),
        ("4,5,6", "cuda:1", False, "5"),
        ("4,5,6", "cuda:1", True, "5,4,6"),
        ("4,5,6", "cuda:0", True, "4,5,6"),
    ],
)
def test_a_worker_sees_its_device_first_and_others_only_as_a_rank(
    monkeypatch, visible, device, ranks, seen
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _own_device(device, ranks) == "cuda"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


def test_a_worker_by_hand_has_one_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="computes on one device, not on cuda:0,cuda:1"):
        _own_device("cuda:0,cuda:1", False)
    with pytest.raises(ConfigError, match="there is no cuda:1: CUDA_VISIBLE_DEVICES names 0"):
        _own_device("cuda:1", False)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", {"device": "gpu"}, "no device 'gpu'; say cpu, cuda or cuda:N, or cuda:N,cuda:M"),
        ("model", {"device": "cuda", "arithmetic": "exact"}, "exact arithmetic"),
        ("model", {"latents": "fp8"}, "FP8 latents go with FP8 precision"),
        ("decode", {"virtual_ranks": 2}, "virtual ranks compute in plain precision"),
        ("prefill", {"ep": 2, "tp": 2}, "ranks in fp8 have all attention heads"),
        ("decode", {"ep": 2, "tp": 2}, "ranks in fp8 have all attention heads"),
        ("mesh", {"transports": ("cuda_ipc",)}, "cuda_ipc is for pages on a CUDA device"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_starts(
    section, changes, message
):
    topology = Topology()
    if section != "model":
        topology = topology.changed("model", "--precision", precision="fp8")
    with pytest.raises(ConfigError, match=message):
        check_together(topology.changed(section, "file", **changes))
