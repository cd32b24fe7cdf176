"""The command line: exit codes and sentences."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import msgspec
import pytest
from child_path import python_path

from pdmesh.launch import cli, join, runtime
from pdmesh.launch.arguments import parser
from pdmesh.launch.chat import ChatOptions, _sentence, _timing
from pdmesh.launch.processes import router_spec, worker_spec
from pdmesh.launch.runtime import MeshInfo, RunDir, claim, find_mesh
from pdmesh.launch.topology import Topology, load_topology, shipped_config, shipped_model
from pdmesh.wire import chat_pb2
from pdmesh.wire.control import JoinInfo
from pdmesh.wire.errors import ConfigError, Unavailable
from pdmesh.wire.random_weights import RandomWeights


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PDMESH_REDIS", raising=False)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


INFO = MeshInfo(
    name="m",
    address="127.0.0.1:7080",
    redis_url="redis://127.0.0.1:1",
    model="tiny",
    supervisor_pid=1,
    pids={},
    logs="/logs",
)


OPERATING = ("scale", "restart", "drain", "answers", "migrate")
COMMANDS = ("up", "chat", "serve", "status", "version", *OPERATING)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_says_what_a_command_does(capsys, command):
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "usage: pdmesh" in out
    if command not in (("status",), ("version",)):
        assert "pdmesh up --chat" in out or f"pdmesh {command[0]}" in out.split("examples")[1]


SETTINGS = (
    *("--arithmetic", "--page-size", "--chunk-tokens", "--max-queue", "--draft-tokens"),
    *("--growth-tokens", "--park-mb", "--max-waiting", "--metrics-port"),
    *("--random-weights", "--layers", "--experts", "--weights-seed"),
)


def test_the_help_of_serve_names_every_setting_of_a_worker(capsys):
    _, out, _ = run(capsys, "serve", "--help")
    assert [flag for flag in SETTINGS if flag not in out] == []
    assert "tokens a page" in out


def test_version_names_the_protocol(capsys):
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert out.startswith("pdmesh ")
    assert "protocol" in out


RANDOM = ("--random-weights", "--model", "small")
VIRTUAL = "--decode-virtual-ranks: virtual ranks compute in plain precision, not in fp8"
HEADS = "ranks in fp8 have all attention heads"
BY_HAND = ("--redis", "redis://x", "--secret-file", "k", "--device", "cuda")
EP = ("--ep-ranks", "127.0.0.1:1,127.0.0.1:2", "--ep-rank", "0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "required: COMMAND"),
        (("upp",), "invalid choice: 'upp'"),
        (("up", "--prefil", "2"), "unrecognized arguments: --prefil"),
        (("up", "--prefill", "two"), "argument --prefill: invalid int value: 'two'"),
        (("up", "--prefill", "0"), "--prefill is 0; it must be a whole number from 1 to 64"),
        (("up", "--port", "70000"), "--port is 70000; it must be"),
        (("up", "--name", "../x"), "--name is '../x'"),
        (("up", "--model", "/no/such/model"), "/no/such/model does not exist"),
        (("up", "--topology", "/no/such.toml"), "cannot read the topology file /no/such.toml"),
        (("up", "--host", "192.0.2.1"), "192.0.2.1"),
        (("up", "--arithmetic", "slow"), "--arithmetic is 'slow'; it must be one of f"),
        (("up", "--page-size", "8192"), "--page-size is 8192; it must be one of 16, 32, 64, 128"),
        (("up", "--page-size", "big"), "argument --page-size: invalid int value: 'big'"),
        (("up", "--draft-tokens", "9"), "--draft-tokens is 9; it must be a whole number from 0 to"),
        (("up", "--draft-tokens", "x"), "--draft-tokens is 'x'; it must be a whole num"),
        (("up", "--no-mtp", "--draft-tokens", "2"), "--draft-tokens: drafts come from the MTP mod"),
        (("up", "--layers", "3"), "--layers: only random weights have layers that can be chosen"),
        (("up", "--experts", "8"), "--experts: only random weights have experts that can be"),
        (("up", "--weights-seed", "1"), "--weights-seed: only random weights have weights seed"),
        (("up", "--random-weights", "--layers", "-1"), "--layers is -1; it must be a whole number"),
        (("up", "--model", "small"), "--model: small is a config without weights, and there is no"),
        (
            ("up", "--random-weights", "--model", "smal"),
            "--model: the model directory smal does no",
        ),
        (("up", *RANDOM, "--prefill-ep", "3"), "3 workers cannot share 16 experts evenly; ask for"),
        (
            ("up", *RANDOM, "--experts", "8", "--decode-ep", "16"),
            "16 workers cannot share 8 expert",
        ),
        (("up", *RANDOM, "--experts", "3"), "num_experts_per_tok 4 is above the 3 experts"),
        (
            ("up", "--precision", "fp8", "--decode-ep", "2", "--decode-tp", "2"),
            f"--decode-tp: {HEADS} (--precision fp8); leave it at 1, or add --precision plain",
        ),
        (
            ("up", "--precision", "fp8", "--decode-virtual-ranks", "2"),
            f"{VIRTUAL} (--precision fp8); leave it at 1, or add --precision plain",
        ),
        (
            ("up", "--device", "cuda", "--arithmetic", "exact"),
            "--arithmetic: exact arithmetic gives a row the same bits in any batch, which FP8 "
            "products do not; use fast arithmetic, or --precision plain",
        ),
        (("up", "--latents", "fp8"), "--latents: FP8 latents go with FP8 precision; add --precisi"),
        (("serve", "decode", *BY_HAND, *EP, "--tp", "2"), f"--tp: {HEADS} (fp8 is what cuda com"),
        (
            ("serve", "prefill", *BY_HAND, "--virtual-ranks", "2"),
            "--virtual-ranks: virtual ranks c",
        ),
        (("serve", "decode", *BY_HAND, "--arithmetic", "exact"), "--arithmetic: exact arithmetic"),
        (("serve", "cook"), "invalid choice: 'cook'"),
        (("serve", "decode"), "no store given; add --redis URL"),
        (("serve", "decode", "--redis", "redis://x"), "no secret given; add --secret-file"),
        (
            ("serve", "decode", "--redis", "redis://x", "--secret-file", "k", "--host", "0.0.0.0"),
            "0.0.0.0 is no address that other processes can call",
        ),
        (("scale",), "required: ROLE=N"),
        (("scale", "decode"), "'decode' is no target; give prefill=N or decode=N, e.g. decode=3"),
        (("scale", "prefill=0"), "prefill=0: a mesh needs at least 1 prefill worker; ask for 1"),
        (("scale", "decode=2"), "no mesh is running on this machine; start one with: pdmesh up"),
        (("scale", "decode=2", "--mesh", "m"), "no mesh named 'm' is running on this machine"),
        (("restart",), "no mesh is running on this machine; start one with: pdmesh up"),
        (("drain", "decode-0"), "no mesh is running on this machine; start one with: pdmesh up"),
        (("drain",), "required: WORKER"),
        (("answers",), "no mesh is running on this machine; start one with: pdmesh up"),
        (("migrate", "4f"), "no mesh is running on this machine; start one with: pdmesh up"),
        (("migrate",), "required: REQUEST"),
        (("serve", "decode", "--join", "m"), "no mesh named 'm' is running on this machine"),
        (("serve", "decode", "--join", "10.0.0.1:7080"), "no secret given; copy the secret.key"),
        (("chat", "--address", "nowhere"), "'nowhere' is not HOST:PORT"),
        (("chat", "--prompt", "\udcff"), "--prompt is not UTF-8 text"),
        (("chat", "--system", "\udcff"), "--system is not UTF-8 text"),
        (("up", "--prompt", "\udcff"), "--prompt is not UTF-8 text"),
        (("chat", "--seed", "-1"), "--seed is -1; it must be a number from 0 to 18446744073709551"),
        (("chat", "--seed", str(2**64)), "--seed is 18446744073709551616; it must be a number"),
        (("chat", "--max-tokens", "-1"), "--max-tokens is -1; it must be a number from 1 to 1000"),
        (("chat", "--timeout", "-1"), "--timeout is -1.0; it must be a number from 0.001 to"),
        (("chat", "--timeout", "nan"), "--timeout is nan; it must be a number from 0.001 to"),
        (("chat", "--input-timeout", "-1"), "--input-timeout is -1.0; it must be a number from 0"),
        (("status", "--redis", "foo://x"), "is not understood"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert sentence in err
    lines = [line for line in err.splitlines() if not line.startswith("pdmesh: st")]
    assert len(lines) == 1
    assert lines[0].startswith("pdmesh: ")


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("model", "path", "nope", "nope does not exist; give a Hugging Face checkpoint directory"),
        ("mesh", "redis", "foo", "'foo' is not understood"),
        ("mesh", "redis", "redis://127.0.0.1:1", "127.0.0.1:1 does not answer"),
        ("mesh", "host", "192.0.2.1", "'192.0.2.1': Cannot assign requested address; give an a"),
        ("mesh", "host", "0.0.0.0", "0.0.0.0 is no address that other processes can call; give"),
        ("mesh", "host", "a\\u0000b", "that is no host name; give an address of this machine"),
        ("mesh", "secret_file", "no/key", "No such file or directory; give one in a folder that"),
        ("mesh", "secret_file", "mesh.toml", "bytes; 16 to 64 are needed"),
    ],
)
def test_what_a_file_sets_wrong_is_one_sentence_with_file_key_and_what_is_allowed(
    capsys, tmp_path, section, key, value, sentence
):
    path = tmp_path / "mesh.toml"
    path.write_text(f'[{section}]\n{key} = "{value}"\n# {"long " * 20}')
    code, out, err = run(capsys, "up", "--topology", str(path), "--prompt", "x")
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line != "pdmesh: stopping"]
    (line,) = [line for line in lines if not line.startswith("pdmesh: starting mesh")]
    assert line.startswith(f"pdmesh: {path}: [{section}] {key}: ")
    assert sentence in line


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--redis", "foo", "--redis: Redis URL 'foo' is not understood"),
        ("--secret-file", "/no/key", "--secret-file: cannot read the secret file /no/key: No such"),
        ("--host", "192.0.2.1", "--host: cannot listen on '192.0.2.1': "),
        ("--chunk-tokens", "0", "--chunk-tokens is 0; it must be a whole number from 1"),
        ("--max-queue", "0", "--max-queue is 0; it must be a whole number from 1"),
        ("--growth-tokens", "-1", "--growth-tokens is -1; it must be a whole number from 0"),
        ("--metrics-port", "-1", "--metrics-port is -1; it must be a whole number from 0 to 65535"),
        ("--page-size", "24", "--page-size is 24; it must be one of 16, 32"),
        ("--model", "/no/model", "--model: the model directory /no/model does not exist"),
    ],
)
def test_a_wrong_flag_of_one_process_is_named(capsys, tmp_path, flag, value, sentence):
    (tmp_path / "key").write_bytes(b"k" * 32)
    flags = {"--redis": "redis://127.0.0.1:1", "--secret-file": str(tmp_path / "key"), flag: value}
    role = "prefill" if flag in ("--chunk-tokens", "--max-queue") else "decode"
    code, _, err = run(capsys, "serve", role, *(part for pair in flags.items() for part in pair))
    assert code == 2
    assert err.startswith(f"pdmesh: {sentence}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["chat", "status"])
def test_without_a_mesh_it_says_how_to_start_one(capsys, command):
    code, _, err = run(capsys, command)
    assert code == 1
    assert err == "pdmesh: no mesh is running on this machine; start one with: pdmesh up\n"


def test_a_router_that_does_not_answer_is_one_sentence(capsys):
    code, _, err = run(capsys, "chat", "--address", "127.0.0.1:1", "--prompt", "hi")
    assert code == 1
    assert err == "pdmesh: no router answers at 127.0.0.1:1; start a mesh with: pdmesh up\n"


def test_standard_input_that_is_no_text_is_one_sentence(capsys, monkeypatch, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for errors in ("strict", "surrogateescape"):
        with (tmp_path / "bytes").open(encoding="utf-8", errors=errors) as given:
            monkeypatch.setattr("sys.stdin", given)
            code, _, err = run(capsys, "chat", "--address", "127.0.0.1:1")
        assert (code, err) == (2, "pdmesh: standard input is not UTF-8 text\n")


class _Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details", "sentence"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (12000019 vs. 8388608)",
            "the request is over 8 MiB, more than a router takes",
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room at d-0", "no room at d-0"),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            "no complete answer within 0.1 s; --timeout allows more",
        ),
        (grpc.StatusCode.INTERNAL, "", "the router answered INTERNAL"),
    ],
)
def test_what_a_chat_says_of_an_error(code, details, sentence):
    options = ChatOptions("127.0.0.1:1", timeout_s=0.1)
    assert _sentence(_Refusal(code, details), options) == sentence


def test_a_mesh_is_found_while_it_runs_and_not_after():
    with claim("m", explicit=True) as (_, folder):
        assert runtime.run_root().joinpath("m").is_dir()
        folder.write(INFO)
        assert find_mesh(None) == INFO
        assert find_mesh("m") == INFO
    assert (folder.path / "mesh.json").exists()  # as after kill -9: stale
    with pytest.raises(Unavailable, match="no mesh is running"):
        find_mesh(None)
    with pytest.raises(Unavailable, match="no mesh named 'm' is running"):
        find_mesh("m")


def test_a_second_mesh_gets_a_name_of_its_own_unless_one_was_asked_for():
    with claim("default", explicit=False) as (first, _):
        with claim("default", explicit=False) as (second, _):
            assert (first, second) == ("default", "default-2")
        with pytest.raises(ConfigError, match="'default' is running already"):
            claim("default", explicit=True).__enter__()


def test_of_several_meshes_the_default_is_meant_or_one_must_be_named():
    with claim("a", True) as (_, a), claim("b", True) as (_, b):
        a.write(INFO)
        b.write(INFO)
        with pytest.raises(Unavailable, match="choose one with --mesh: a, b"):
            find_mesh(None)
        with claim("default", True) as (_, default):
            default.write(MeshInfo(**{**_fields(INFO), "name": "default"}))
            assert find_mesh(None).name == "default"


def _fields(info: MeshInfo) -> dict:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_what_the_runtime_directory_holds_is_its_owners_alone():
    with claim("m", explicit=True) as (_, folder):
        folder.prepare()
        folder.write(INFO)
        secret = folder.secret(None)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert (folder.path / "mesh.json").stat().st_mode & 0o777 == 0o600
        assert secret.stat().st_mode & 0o777 == 0o600


def test_the_secret_is_made_once_and_fits_the_hash():
    with claim("m", explicit=True) as (_, folder):
        folder.prepare()
        first = folder.secret(None).read_bytes()
        assert 16 <= len(first) <= 64
        assert folder.secret(None).read_bytes() == first
    with claim("n", explicit=True) as (_, other):
        other.prepare()
        assert other.secret(None).read_bytes() != first


def test_a_runtime_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "pdmesh").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write the runtime directory"):
        claim("m", explicit=True).__enter__()


def test_a_half_written_description_is_no_mesh():
    with claim("m", explicit=True) as (_, folder):
        (folder.path / "mesh.json").write_text('{"name": ')
        assert RunDir(folder.path).read() is None


JOIN = JoinInfo(
    mesh="m",
    redis_url="redis://127.0.0.1:6379",
    model_name="tiny",
    dtype="bfloat16",
    arithmetic="exact",
    page_size=32,
    mtp=False,
    lease_ttl_s=2.0,
)


def asked(monkeypatch, info: JoinInfo) -> None:
    """The router at any address answers so."""

    async def answer(address, role, secret):
        return info

    monkeypatch.setattr(join, "_asked", answer)


def joined(tmp_path, address: str, model: Path | None = None) -> Topology:
    secret = tmp_path / "key"
    secret.write_bytes(b"k" * 32)
    return join.joined(Topology(), address, "decode", secret, model)


def test_a_worker_that_joins_is_as_the_mesh_is(monkeypatch, tmp_path):
    asked(monkeypatch, JOIN)
    topology = joined(tmp_path, "127.0.0.1:7080")
    mesh, model = topology.mesh, topology.model
    assert (mesh.name, mesh.redis, mesh.lease_ttl_s) == ("m", JOIN.redis_url, 2.0)
    assert (mesh.host, model.name, model.dtype) == ("127.0.0.1", "tiny", "bfloat16")
    assert (model.arithmetic, model.page_size, model.mtp) == ("exact", 32, False)


@pytest.mark.parametrize("store", ["redis://127.0.0.1:6379", "redis://localhost", "unix:///run/s"])
def test_a_store_of_another_machine_that_cannot_be_reached_is_said_so(monkeypatch, tmp_path, store):
    asked(monkeypatch, msgspec.structs.replace(JOIN, redis_url=store))
    with pytest.raises(ConfigError, match="the store of the mesh at 192.0.2.1:7080 listens on its"):
        joined(tmp_path, "192.0.2.1:7080")


def test_another_model_than_the_shipped_one_has_to_be_there(monkeypatch, tmp_path):
    asked(monkeypatch, msgspec.structs.replace(JOIN, model_name="chatty"))
    with pytest.raises(ConfigError, match="the mesh serves 'chatty', which is not the shipped mo"):
        joined(tmp_path, "127.0.0.1:7080")
    assert joined(tmp_path, "127.0.0.1:7080", tmp_path).model.name == "chatty"


def test_a_worker_that_joins_makes_the_weights_of_the_mesh(monkeypatch, tmp_path):
    random = RandomWeights(seed=4, layers=3)
    info = msgspec.structs.replace(JOIN, model_name="small-random", random=random)
    asked(monkeypatch, info)
    topology = joined(tmp_path, "127.0.0.1:7080")
    assert topology.random == random
    assert topology.model_path == shipped_config("small")
    assert topology.model_name == "small-random"
    named = msgspec.structs.replace(info, model_name="chatty")
    asked(monkeypatch, named)
    with pytest.raises(ConfigError, match="add --model DIR with its config.json"):
        joined(tmp_path, "127.0.0.1:7080")
    assert joined(tmp_path, "127.0.0.1:7080", tmp_path).random == random  # --model says where


@pytest.mark.parametrize(
    ("random", "flag", "key"),
    [
        (RandomWeights(), "--weights-seed", {"weights_seed": 1}),
        (RandomWeights(), "--layers", {"layers": 2}),
        (RandomWeights(), "--experts", {"experts": 8}),
        (None, "--random-weights", {"random_weights": True}),
    ],
)
def test_a_worker_of_other_weights_does_not_join(monkeypatch, tmp_path, random, flag, key):
    name = "tiny" if random is None else "small-random"
    asked(monkeypatch, msgspec.structs.replace(JOIN, model_name=name, random=random))
    topology = joined(tmp_path, "127.0.0.1:7080")
    other = topology.changed("model", flag, **key)
    with pytest.raises(ConfigError, match=f"^{flag} makes .* leave {flag} out"):
        join.check_joined(topology, other)


def test_a_file_may_name_a_shipped_config_and_random_weights(tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text('[model]\nrandom_weights = true\npath = "small"\nlayers = 3\n')
    topology = load_topology(path)
    assert topology.model_path == shipped_config("small")
    assert topology.random == RandomWeights(layers=3)
    assert topology.tokenizer_path == shipped_model()
    (tmp_path / "small").mkdir()
    assert load_topology(path).model_path == tmp_path / "small"
    (tmp_path / "small" / "tokenizer.json").touch()
    assert load_topology(path).tokenizer_path == tmp_path / "small"


def test_every_process_of_a_mesh_is_told_the_weights():
    topology = Topology().changed("model", "--random-weights", random_weights=True, layers=8)
    for spec in (
        router_spec(topology, "router", 1, Path("key"), Path("admin"), 0),
        worker_spec(topology, "prefill", "prefill-0", Path("key"), 0),
        worker_spec(topology, "decode", "decode-0", Path("key"), 0),
    ):
        given = parser().parse_args(["serve", spec.role, *spec.arguments])
        assert (given.random_weights, given.layers, given.experts) == (True, 8, 0)
        assert (given.weights_seed, given.model) == (0, shipped_config("deepseek-v3"))
        assert given.model_name == "deepseek-v3-random"


def test_a_checkpoint_without_weights_is_refused_with_the_way_out(capsys, tmp_path):
    config = (shipped_model() / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    code, _, err = run(capsys, "up", "--model", str(tmp_path))
    assert code == 2
    assert "no weights (*.safetensors); fetch them, or add --random-weights to make some up" in err


def test_weights_of_another_family_are_refused_before_anybody_fetches_them(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = run(capsys, "up", "--model", str(tmp_path))
    assert code == 2
    assert err == (
        "pdmesh: --model: model_type 'llama' is not served; deepseek_v2 and deepseek_v3 are\n"
    )


def test_only_a_file_is_told_the_type_of_a_string_that_is_no_number(capsys, tmp_path):
    path = tmp_path / "mesh.toml"
    path.write_text('[decode]\ndraft_tokens = "some"\n[model]\npage_size = 64\n')
    assert (
        "draft_tokens is 'some' (a string); it must"
        in run(capsys, "up", "--topology", str(path))[2]
    )
    path.write_text('[model]\npage_size = "64"\n')
    assert "page_size is '64' (a string); it must" in run(capsys, "up", "--topology", str(path))[2]
    assert "--draft-tokens is 'some'; it must" in run(capsys, "up", "--draft-tokens", "some")[2]


def test_a_process_of_a_mesh_ends_without_collecting_what_torch_has_made():
    program = """
import atexit, gc
from pdmesh.launch.cli import main
atexit.register(lambda: print(gc.get_freeze_count() > 0))
print(main(["serve", "decode", "--redis", "redis://127.0.0.1"]))
atexit.register(lambda: print(gc.get_freeze_count() > 0))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert done.stdout.split() == ["2", "False", "True"]


def test_the_time_to_the_first_token_is_not_taken_for_that_of_all_attempts():
    timing = chat_pb2.Timing(ttft_ms=10, queue_ms=1, prefill_ms=20, attempts=2)
    told = _timing(chat_pb2.ChatResponse(timing=timing))
    assert "first token 10 ms; over 2 attempts: queue 1, prefill 20; " in told
    timing.attempts = 1
    assert "first token 10 ms: queue 1, prefill 20; " in _timing(
        chat_pb2.ChatResponse(timing=timing)
    )
