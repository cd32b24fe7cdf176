"""How many tokens a prefill step may have where nobody says: what suits the device, if it fits."""

import contextlib

import pytest

from pdmesh.launch import probe
from pdmesh.launch.arguments import parser
from pdmesh.launch.machine import asked, check_machine
from pdmesh.launch.processes import worker_spec
from pdmesh.launch.serve import _settings
from pdmesh.launch.topology import Topology, load_topology, shipped_config
from pdmesh.model import planning
from pdmesh.model.fitting import fit_steps, least_pages
from pdmesh.model.machine import Machine
from pdmesh.prefill.config import AUTO_CHUNK, PrefillConfig, chunk_choices
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

H200 = Machine(
    "2.11.0", "13.0", 2 * (("NVIDIA H200", (9, 0)),), triton=True, compiler=True, nvcc=True
)
GB = 10**9
LARGE = 200 * GB
FULL = {"random_weights": True, "layers": 8, "mtp": False}


# ---- the device -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "ranks", "choices"),
    [
        ("cpu", 1, (512,)),
        ("cpu", 4, (512,)),
        ("cuda", 1, (4096, 2048, 1024, 512)),
        ("cuda:3", 1, (4096, 2048, 1024, 512)),
        ("cuda", 2, (2048, 1024, 512)),
        ("cuda", 3, (1024, 512)),
        ("cuda", 8, (512,)),
        ("cuda", 64, (512,)),
    ],
)
def test_the_device_says_how_large_a_step_is_and_ranks_share_it(device, ranks, choices):
    assert chunk_choices(AUTO_CHUNK, device, ranks) == choices


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [1, 512, 100_000])
def test_a_number_that_was_given_stays(device, given):
    assert chunk_choices(given, device, 4) == (given,)


# ---- file, flag, both -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "flag", "chunk"),
    [
        (None, None, AUTO_CHUNK),
        (None, "auto", AUTO_CHUNK),
        (None, "300", 300),
        ('"auto"', None, AUTO_CHUNK),
        ("128", None, 128),
        ("128", "300", 300),
        ("128", "auto", AUTO_CHUNK),
        ('"auto"', "300", 300),
    ],
)
def test_the_flag_comes_before_the_file_and_both_before_the_device(tmp_path, file, flag, chunk):
    given = ["--redis", "redis://127.0.0.1:1", "--secret-file", str(tmp_path / "key")]
    if file is not None:
        (tmp_path / "mesh.toml").write_text(f"[prefill]\nchunk_tokens = {file}\n")
        given += ["--topology", str(tmp_path / "mesh.toml")]
    given += [] if flag is None else ["--chunk-tokens", flag]
    topology = _settings(parser().parse_args(["serve", "prefill", *given]))
    assert topology.prefill.chunk_tokens == chunk


@pytest.mark.parametrize(("file", "told"), [("64", "64"), ('"auto"', "auto"), (None, "auto")])
def test_a_worker_is_told_a_number_or_to_choose(tmp_path, file, told):
    path = tmp_path / "mesh.toml"
    path.write_text("" if file is None else f"[prefill]\nchunk_tokens = {file}\n")
    arguments = worker_spec(load_topology(path), "prefill", "prefill-0", path, 0).arguments
    assert arguments[arguments.index("--chunk-tokens") + 1] == told


def test_settings_and_topology_have_the_same_default():
    assert PrefillConfig.chunk_tokens == Topology().prefill.chunk_tokens == AUTO_CHUNK


# ---- memory -----------------------------------------------------------------------------------


def fitting(pages_beside, choices=(40, 20, 10, 5), least=100):
    """With so many pages beside steps of each size; None: it does not fit."""

    def plan(rows):
        if pages_beside[rows] is None:
            raise ConfigError(f"no room beside {rows}")
        return pages_beside[rows], None

    return fit_steps(choices, lambda: least, plan)


def test_a_step_is_as_large_as_leaves_enough_pages():
    found = fitting({40: 100})
    assert (found.rows, found.pages, found.reason) == (40, 100, "")
    found = fitting({40: 99, 20: 101})
    assert (found.rows, found.pages) == (20, 101)
    assert "40 rows would leave 99 pages, and a prompt" in found.reason
    found = fitting({40: None, 20: 1, 10: 500})
    assert (found.rows, found.reason) == (10, "the model does not fit beside steps of 40 rows")


def test_the_smallest_step_is_taken_with_whatever_pages_it_leaves_or_refused():
    assert fitting({40: None, 20: 3, 10: 5, 5: 8}).pages == 8
    with pytest.raises(ConfigError, match="no room beside 5"):
        fitting({40: None, 20: None, 10: None, 5: None})


def test_where_there_is_no_choice_nobody_asks_what_is_enough():
    found = fit_steps((7,), lambda: pytest.fail("it asks"), lambda rows: (2, None))
    assert (found.rows, found.pages, found.reason) == (7, 2, "")


def test_enough_is_what_was_asked_for_or_a_prompt_of_the_whole_context():
    config, random = shipped_config("deepseek-v3"), RandomWeights(layers=8)
    assert least_pages(config, random, 64, 0) == 163_840 // 64
    assert least_pages(config, random, 64, 9) == 9


def on_h200(monkeypatch, free, total=LARGE):
    """With so much memory, of which a row of a step takes a MB."""
    monkeypatch.setattr(planning, "step_bytes", lambda config, rows, *_, **__: rows * 10**6)
    for module in ("planning", "machine"):
        monkeypatch.setattr(f"pdmesh.model.{module}.this_machine", lambda: H200)
    monkeypatch.setattr(planning, "memory_of", lambda _: (free, total))


def mesh(device="cuda", model=FULL, **sections):
    topology = Topology().changed("model", "a flag", device=device, **model)
    for name, values in ({"decode": {"workers": 1}} | sections).items():
        topology = topology.changed(name, "a flag", **values)
    return topology


def chosen(topology):
    """What all prefill workers are told, and what is said of it."""
    topology, lines = check_machine(topology, probe.answer)
    return topology.prefill.chunk_tokens, " ".join(lines)


def over(sizes, of):
    """By size, what is chosen there; sizes at which the mesh is refused are left out."""
    found = {}
    for size in sizes:
        with contextlib.suppress(ConfigError):
            found[size] = of(size)
    return found


ALL = {512, 1024, 2048, 4096}


def test_a_large_gpu_has_steps_of_4096_tokens_and_its_workers_are_told(monkeypatch):
    on_h200(monkeypatch, LARGE)
    topology, lines = check_machine(mesh(), probe.answer)
    assert "prefill steps have up to 4096 tokens: what cuda wants" in lines
    arguments = worker_spec(topology, "prefill", "prefill-0", shipped_config("small"), 0).arguments
    assert arguments[arguments.index("--chunk-tokens") + 1] == "4096"


def test_a_gpu_with_less_room_has_smaller_steps_before_anything_is_refused(monkeypatch):
    def on(total, **sections):
        on_h200(monkeypatch, total, total)
        return chosen(mesh(**sections))

    sizes = range(130 * GB, LARGE, GB // 2)
    found = over(sizes, on)
    assert all(("4160 rows" in said) == (chunk < 4096) for chunk, said in found.values()), found
    numbers = [chunk for chunk, _ in found.values()]
    assert numbers == sorted(numbers)
    assert set(numbers) == ALL
    smallest = over(sizes, lambda total: on(total, prefill={"chunk_tokens": 512}))
    assert list(found) == list(smallest), "refused where 512 do not fit, and nowhere else"
    with pytest.raises(ConfigError, match="the model does not fit"):
        on(min(found), prefill={"chunk_tokens": 4096})


def test_pages_that_were_asked_for_come_before_large_steps(monkeypatch):
    on_h200(monkeypatch, LARGE)
    asked_for = range(10_000, 60_000, 200)
    found = over(asked_for, lambda pages: chosen(mesh(prefill={"pages": pages}))[0])
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found.values()) == ALL


def test_workers_that_fit_together_only_with_smaller_steps_get_them(monkeypatch):
    def with_free(free):
        on_h200(monkeypatch, free, 300 * GB)
        return chosen(mesh())

    found = over(range(126 * GB, 150 * GB, GB // 4), with_free)
    assert {chunk for chunk, _ in found.values()} == ALL
    for chunk, said in found.values():
        together = "workers do not fit together beside steps of 4160 rows" in said
        assert together == (chunk < 4096)


def test_all_prefill_workers_have_the_steps_of_the_one_with_the_least_room(monkeypatch):
    on_h200(monkeypatch, LARGE)
    room = {"cuda:0": (300 * GB, 300 * GB)}
    monkeypatch.setattr(planning, "memory_of", lambda device: room[device])

    def with_free(free):
        room["cuda:1"] = (free, 300 * GB)
        return chosen(mesh("cuda:0,cuda:1", prefill={"workers": 2}))[0]

    found = over(range(63 * GB, 90 * GB, GB // 4), with_free)
    assert set(found.values()) == ALL


def test_a_mesh_on_a_cpu_is_told_nothing_new(monkeypatch):
    monkeypatch.setattr(planning, "memory_of", lambda _: (10**10, 10**10))
    small = mesh("cpu", {"random_weights": True, "path": shipped_config("small")})
    topology, lines = check_machine(small, probe.answer)
    assert topology == small
    assert not [line for line in lines if "prefill steps" in line]
    assert [worker["rows"] for worker in asked(small)["workers"]] == [[512 + 64], [64]]
