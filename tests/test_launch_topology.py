"""The topology file: what it may say, and the one sentence when it says something else."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from pdmesh.launch.arguments import parser
from pdmesh.launch.checks import check_model, check_together
from pdmesh.launch.crew import Crew, Plan
from pdmesh.launch.restart import (
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    WINDOW_S,
    Death,
    restart_delay,
)
from pdmesh.launch.runtime import RunDir
from pdmesh.launch.topology import AUTO_DRAFTS, SECTIONS, Topology, load_topology
from pdmesh.wire.errors import ConfigError

EVERYTHING = """
[mesh]
name = "kitchen"
host = "127.0.0.2"
port = 9000
redis = "redis://10.0.0.5"
secret_file = "key"
lease_ttl_s = 2
drain_s = 7
step_timeout_s = 30
transports = ["tcp"]
log_level = "DEBUG"
[model]
path = "../model"
random_weights = true
weights_seed = 3
layers = 8
experts = 32
name = "chatty"
dtype = "bfloat16"
arithmetic = "exact"
page_size = 16
mtp = false
device = "cuda:1"
precision = "fp8"
latents = "fp8"
share_weights = true
[prefill]
workers = 2
pages = 64
threads = 3
chunk_tokens = 128
max_queue = 9
ep = 2
tp = 2
redundant_experts = 4
rebalance = false
microbatch_rows = 256
virtual_ranks = 4
metrics_port = 9200
[decode]
workers = 4
pages = 128
threads = 2
max_batch = 8
draft_tokens = "auto"
growth_tokens = 256
park_mb = 64
max_waiting = 7
ep = 4
tp = 2
redundant_experts = 8
rebalance = false
microbatch_rows = 256
virtual_ranks = 4
metrics_port = 9300
[router]
workers = 2
policy = "round_robin"
deadline_s = 1.5
max_attempts = 2
metrics_port = 9100
[kvcache]
eviction = "returns"
replica_hints = false
"""


def read(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return load_topology(path)


def test_everything_has_a_default(tmp_path):
    assert load_topology(None) == read(tmp_path, "") == Topology()
    assert (Topology().prefill.workers, Topology().decode.workers) == (1, 2)


def test_a_file_may_say_everything(tmp_path):
    topology = read(tmp_path, EVERYTHING)
    plain = Topology()
    for section in SECTIONS:
        mine, default = getattr(topology, section), getattr(plain, section)
        for setting in dataclasses.fields(mine):
            assert getattr(mine, setting.name) != getattr(default, setting.name), setting.name


def test_drafts_are_a_number_or_auto_and_none_without_the_mtp_module(tmp_path):
    assert Topology().draft_tokens == 1
    assert read(tmp_path, "[decode]\ndraft_tokens = 3").draft_tokens == 3
    assert read(tmp_path, '[decode]\ndraft_tokens = "auto"').draft_tokens == AUTO_DRAFTS
    assert read(tmp_path, "[model]\nmtp = false").draft_tokens == 0


def checkpoint(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[model]\nmtp = false\n[decode]\ndraft_tokens = 2",
            "[decode] draft_tokens: drafts come from the MTP module, which is off; ask for 0",
        ),
        (
            '[decode]\ndraft_tokens = "auto"',
            "[decode] draft_tokens: drafts come from an MTP module, and .*/model has none; ask for",
        ),
        (
            "[model]\npage_size = 128",
            "[model] page_size: a page of 128 tokens is longer than the model's context of 100; ",
        ),
        (
            '[kvcache]\neviction = "returns"\nreplica_hints = true',
            "[kvcache] replica_hints: eviction 'returns' does not look at copies elsewhere; leave",
        ),
        (
            "[mesh]\nport = 9000\n[router]\nmetrics_port = 9000",
            "[router] metrics_port: port 9000 is the public one; give the metrics another",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence_with_the_fix(tmp_path, text, sentence):
    model = checkpoint(tmp_path / "model", max_position_embeddings=100)
    topology = read(tmp_path, text).changed("model", "--model", path=model)
    with pytest.raises(ConfigError, match=re.escape(sentence).replace(r"\.\*", ".*")):
        check_together(topology)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[model]\nmtp = false",
        "[model]\nmtp = false\n[decode]\ndraft_tokens = 0",
        "[model]\npage_size = 64",
        '[kvcache]\neviction = "returns"',
        "[kvcache]\nreplica_hints = true",
    ],
)
def test_settings_that_go_together_pass_whatever_the_checkpoint_says(tmp_path, text):
    for config in ({}, {"max_position_embeddings": 64}, {"num_nextn_predict_layers": 1}):
        model = checkpoint(tmp_path / "model", **config)
        check_together(read(tmp_path, text).changed("model", "--model", path=model))


def started(topology: Topology) -> dict[str, argparse.Namespace]:
    """What the processes of a mesh are told, by name, as ``pdmesh serve`` reads it."""
    plan = Plan(topology, 7080, RunDir(Path("run")), {"prefill-0": 9200, "router": 9100})
    specs = [child.spec for child in Crew(plan, Path("key")).children]
    return {s.name: parser().parse_args(["serve", s.role, *s.arguments]) for s in specs}


def test_a_process_is_told_what_the_file_says(tmp_path):
    told = started(read(tmp_path, EVERYTHING.replace("mtp = false", "mtp = true")))
    holder = told.pop("weights")
    assert {(a.arithmetic, a.page_size) for a in told.values()} == {("exact", 16)}
    assert (holder.role, holder.precision, holder.device) == ("weights", "fp8", "cuda:1")
    assert holder.weights_socket == told["decode-3"].weights_socket == Path("run/weights.sock")
    prefill, decode = told["prefill-0"], told["decode-3"]
    assert (prefill.chunk_tokens, prefill.max_queue, prefill.metrics_port) == (128, 9, 9200)
    assert (decode.draft_tokens, decode.growth_tokens, decode.park_mb) == ("auto", 256, 64)
    assert (decode.max_waiting, decode.metrics_port) == (7, 0)
    assert (told["router"].metrics_port, told["router"].admin_file.name) == (9100, "router.admin")
    assert (prefill.drain_s, decode.drain_s) == (7, 7)
    assert (prefill.transports, decode.transports) == ("tcp", "tcp")
    for worker in (prefill, decode):
        assert (worker.eviction, worker.no_replica_hints) == ("returns", True)
    plain = started(Topology())["decode-0"]
    assert (plain.eviction, plain.no_replica_hints) == ("lru", False)


def test_a_checkpoint_without_an_mtp_module_needs_no_setting(tmp_path):
    topology = Topology().changed("model", "--model", path=checkpoint(tmp_path / "model"))
    check_together(topology)
    assert started(topology)["decode-0"].draft_tokens is None


def test_paths_are_relative_to_the_file(tmp_path):
    topology = read(tmp_path, EVERYTHING)
    assert topology.mesh.secret_file == tmp_path / "key"
    assert topology.model_path == tmp_path / "../model"


def test_a_whole_number_is_a_number(tmp_path):
    assert read(tmp_path, "[router]\ndeadline_s = 5").router.deadline_s == 5.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[prefil]", "there is no section 'prefil'; did you mean prefill? Allowed: mesh, model"),
        ("[zzz]", "there is no section 'zzz'; Allowed: mesh, model, prefill, decode, router"),
        ("mesh = 3", "mesh is 3; it must be a table [mesh]"),
        (
            "[prefill]\nworker = 2",
            "[prefill] there is no key 'worker'; did you mean workers? Allowed: workers, pages",
        ),
        (
            '[prefill]\nworkers = "two"',
            "[prefill] workers is 'two' (a string); it must be a whole number from 1 to 64",
        ),
        ("[decode]\nworkers = 0", "[decode] workers is 0; it must be a whole number from 1 to 64"),
        ("[decode]\nworkers = 1.5", "workers is 1.5; it must be a whole number from 1 to 64"),
        ("[decode]\nworkers = true", "workers is true; it must be a whole number from 1 to 64"),
        ("[mesh]\nport = 70000", "[mesh] port is 70000; it must be a whole number from 0 to 65535"),
        ("[router]\ndeadline_s = nan", "deadline_s is nan; it must be a number from 1 to 86400"),
        (
            '[mesh]\ntransports = ["tcp", "rdma"]',
            "[mesh] transports: there is no transport 'rdma'; allowed are cuda_ipc, shm, tcp, nixl",
        ),
        ("[mesh]\ntransports = []", "[mesh] transports: no transport is left; name at least one"),
        ("[mesh]\ntransports = 3", "transports is 3; it must be a list of transports, best first"),
        ("[model]\nmtp = 1", "[model] mtp is 1; it must be true or false"),
        (
            '[model]\ndtype = "float8"',
            "[model] dtype is 'float8'; it must be one of float32, bfloat16",
        ),
        (
            '[model]\narithmetic = "slow"',
            "[model] arithmetic is 'slow'; it must be one of fast, exact",
        ),
        (
            "[model]\npage_size = 48",
            "[model] page_size is 48; it must be one of 16, 32, 64, 128, 256, 512",
        ),
        ("[model]\npage_size = 64.0", "page_size is 64.0; it must be one of 16, 32, 64"),
        ("[model]\npage_size = true", "page_size is true; it must be one of 16, 32, 64"),
        (
            '[kvcache]\neviction = "lfu"',
            "[kvcache] eviction is 'lfu'; it must be one of lru, returns",
        ),
        ("[kvcache]\nreplica_hints = 1", "replica_hints is 1; it must be true or false"),
        (
            "[decode]\ndraft_tokens = 5",
            "[decode] draft_tokens is 5; it must be a whole number from 0 to 4, or auto",
        ),
        (
            '[decode]\ndraft_tokens = "some"',
            "draft_tokens is 'some' (a string); it must be a whole number from 0 to 4, or auto",
        ),
        ("[decode]\ndraft_tokens = -1", "draft_tokens is -1; it must be a whole number from 0"),
        ("[prefill]\nchunk_tokens = 0", "chunk_tokens is 0; it must be a whole number from 1"),
        ("[prefill]\nmax_queue = 0", "max_queue is 0; it must be a whole number from 1"),
        ("[decode]\ngrowth_tokens = -1", "growth_tokens is -1; it must be a whole number from 0"),
        ("[decode]\nmetrics_port = 65536", "metrics_port is 65536; it must be a whole number"),
        ('[mesh]\nname = "a b"', "[mesh] name is 'a b'; it must be 1 to 63 letters"),
        ('[mesh]\nname = "../x"', "name is '../x'; it must be 1 to 63 letters"),
        (
            '[mesh]\nhost = ""',
            "[mesh] host is ''; it must be a string that is not empty",
        ),
        ("[mesh]\nredis = []", "[mesh] redis is a list; it must be a string"),
        ("[model]\npath = 1", "[model] path is 1; it must be a path, as a string"),
        ("[mesh]\nname = 2026-01-01", "name is '2026-01-01' (a date)"),
        ("[mesh", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_the_file_the_key_and_what_is_allowed(
    tmp_path, text, sentence
):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    said = str(raised.value)
    assert "mesh.toml" in said
    assert sentence in said
    assert "\n" not in said


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load_topology(tmp_path / "none.toml")


def test_a_binary_file_is_one_sentence(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_topology(path)


def test_flags_override_the_file_under_the_same_rules(tmp_path):
    topology = read(tmp_path, "[mesh]\nport = 9000")
    assert topology.changed("mesh", "--port", port=None) is topology
    assert topology.changed("mesh", "--port", port=9001).mesh.port == 9001
    with pytest.raises(ConfigError, match=r"^--port is -1; it must be a whole number"):
        topology.changed("mesh", "--port", port=-1)


def test_a_setting_knows_where_it_comes_from(tmp_path):
    topology = read(tmp_path, "[mesh]\nport = 9000").changed("mesh", "--host", host="10.0.0.9")
    for key, origin in (("port", f"{tmp_path / 'mesh.toml'}: [mesh] port"), ("host", "--host")):
        with pytest.raises(ConfigError) as raised, topology.blamed("mesh", key):
            raise ConfigError("it is wrong")
        assert str(raised.value) == f"{origin}: it is wrong"
    with pytest.raises(ConfigError, match="^it is wrong$"), topology.blamed("mesh", "redis"):
        raise ConfigError("it is wrong")


def adapter(path: Path) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "holds no config.json"),
        (lambda path: adapter(path), r"holds a LoRA adapter \(adapter_config.json\); merge it"),
    ],
)
def test_a_wrong_checkpoint_directory_is_one_sentence(tmp_path, make, sentence):
    make(tmp_path / "model")
    with pytest.raises(ConfigError, match=sentence):
        check_model(tmp_path / "model")


def test_a_process_that_dies_once_in_a_while_is_always_started_again():
    deaths = [Death(WINDOW_S * 2 * number, ready=False) for number in range(100)]
    assert restart_delay(deaths, deaths[-1].at) == restart_delay([Death(0.0, ready=False)], 0.0)


def test_starts_that_fail_are_tried_again_slower_and_slower_and_then_no_more():
    failed = Death(0.0, ready=False)
    delays = [restart_delay([failed] * count, 1.0) for count in range(1, MAX_FAILED_STARTS + 1)]
    assert delays[-1] is None
    given = delays[:-1]
    assert all(before < after for before, after in zip(given, given[1:], strict=False))


def test_a_process_that_had_been_ready_is_started_again_however_often_it_is_killed():
    killed, failed = Death(0.0, ready=True), Death(0.0, ready=False)
    assert restart_delay([killed] * 100, 1.0) == MAX_DELAY_S
    assert restart_delay([failed] * (MAX_FAILED_STARTS - 1) + [killed], 1.0) == MAX_DELAY_S
    assert restart_delay([killed] + [failed] * MAX_FAILED_STARTS, 1.0) is None
