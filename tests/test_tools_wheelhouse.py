"""The folder of packages for a host without an index: what goes in, what stays, what arrives."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from pdmesh.tools import wheelhouse
from pdmesh.tools.wheel_rules import GROUPS, STRIP

ROOT = Path(__file__).resolve().parent.parent
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
CARRIED = {
    "msgspec": {"msgspec/__init__.py": "value = 7\n", "msgspec/tests/test_it.py": "x" * 5000},
    "nvshmem4py-cu13": {
        "nvshmem/bindings/nvshmem.cpp": "// made by Cython\n" * 500,
        "nvshmem/bindings/nvshmem.so": "compiled",
        "nvidia/nvshmem/lib/libnvshmem_device.a": "static" * 999,
        "nvidia/nvshmem/lib/libnvshmem_device.bc": "bitcode",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": "host",
        "nvidia/nvshmem/lib/nvshmem_bootstrap_uid.so.3": "uid",
        "nvidia/nvshmem/lib/nvshmem_bootstrap_pmix.so.3": "pmix",
        "nvidia/nvshmem/lib/nvshmem_transport_ibrc.so.3": "network",
    },
}


class FakePip:
    """Keeps the calls; "downloads" small wheels and "installs" them by unpacking."""

    def __init__(self, requires=()):
        self.calls, self.requires = [], requires

    def __call__(self, arguments):
        self.calls.append(list(arguments))
        if arguments[0] == "download":
            folder = Path(arguments[arguments.index("--dest") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            for requirement in arguments[arguments.index("--dest") + 2 :]:
                self._wheel(folder, wheelhouse.named(requirement))
        else:
            target = Path(arguments[arguments.index("--target") + 1])
            for wheel in (word for word in arguments if word.endswith(".whl")):
                zipfile.ZipFile(wheel).extractall(target)
            script = target / "bin" / "msgspec"
            script.parent.mkdir(exist_ok=True)
            script.write_text("#!/here/python\n")

    def _wheel(self, folder, name):
        file = name.replace("-", "_")
        with zipfile.ZipFile(folder / f"{file}-1.0-py3-none-any.whl", "w") as wheel:
            for path, text in CARRIED.get(name, {f"{file}.py": ""}).items():
                wheel.writestr(path, text)
            lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
            lines += [f"Requires-Dist: {one}" for one in self.requires]
            wheel.writestr(f"{file}-1.0.dist-info/METADATA", "\n".join(lines) + "\n\n")


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'x'\nversion = '1'\ndependencies = ['msgspec>=0.19', 'redis>=5']\n"
        "[project.optional-dependencies]\ngpu = ['nvshmem4py_cu13==0.4.1']\n"
    )
    (folder / "constraints.txt").write_text("# pins\nmsgspec==0.23.0\n")
    return folder


def collect(project, out, *more, run=None, have="flashinfer-python"):
    there = {name for name in GROUPS["kernels"] if name not in CARRIED}
    words = ["collect", "--out", str(out), "--project", str(project), "--python", HERE]
    words += ["--have", ",".join([have, *there]), *more]
    return wheelhouse.collect(wheelhouse.arguments().parse_args(words), run or FakePip())


def test_a_pin_of_a_constraint_or_an_extra_is_what_is_downloaded(project, tmp_path):
    run = FakePip()
    assert collect(project, tmp_path / "out", run=run) == 0
    words = run.calls[0]
    assert words[0] == "download"
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)
    assert words[words.index("--python-version") + 1] == HERE
    assert words[words.index("--dest") + 2 :] == ["nvshmem4py_cu13==0.4.1", "msgspec==0.23.0"]


def test_what_the_host_has_is_not_carried_however_it_is_spelt(tmp_path):
    there = tmp_path / "host.txt"
    there.write_text("# pip list\nFlashInfer_Python==0.6.13\n\nmsgspec @ file:///x\n")
    have = wheelhouse.read_have(f"torch, @{there}")
    assert have == {"torch": None, "flashinfer-python": "0.6.13", "msgspec": None}
    names = [wheelhouse.named(one) for one in wheelhouse.wanted(["kernels"], have, {})]
    assert "sgl-deep-gemm" in names
    assert not {"flashinfer-python", "msgspec"} & set(names)


def test_what_the_host_has_in_a_version_that_is_too_old_is_carried(project, tmp_path, capsys):
    run = FakePip()
    assert collect(project, tmp_path / "out", run=run, have="msgspec==0.18.2") == 0
    assert "msgspec==0.23.0" in run.calls[0]
    assert "msgspec 0.18.2 of that host is not msgspec>=0.19: carried" in capsys.readouterr().out
    run = FakePip()
    assert collect(project, tmp_path / "new", run=run, have="msgspec==0.19.0") == 0
    assert "msgspec==0.23.0" not in run.calls[0]
    about = json.loads((tmp_path / "new" / "wheelhouse.json").read_text())
    assert about["assumed"]["msgspec"] == ["msgspec>=0.19"]


def test_what_carried_packages_ask_of_the_host_is_asked_there(project, tmp_path):
    run = FakePip(["msgspec>=0.21", "left-pad>=3"])
    assert collect(project, tmp_path / "out", run=run, have="msgspec") == 0
    about = json.loads((tmp_path / "out" / "wheelhouse.json").read_text())
    assert about["assumed"]["msgspec"] == ["msgspec>=0.19", "msgspec>=0.21"]
    with pytest.raises(
        ValueError, match=r"that host has msgspec 0\.20\.0, .*msgspec>=0\.21: leave"
    ):
        collect(project, tmp_path / "new", run=run, have="msgspec==0.20.0")


def test_a_host_that_has_less_than_it_was_taken_to_have_is_told_before_anything_is_unpacked(
    project, tmp_path
):
    collect(project, tmp_path / "out")
    target = tmp_path / "site"
    take_for_granted(tmp_path / "out", numpy="numpy>=9000", grpcio="grpcio>=1", leftpad="leftpad")
    said = refused("install", tmp_path / "out", "--target", target)
    assert re.search(r"numpy is [0-9.]+ here, and numpy>=9000 is needed; leftpad is not here", said)
    assert "grpcio" not in said
    assert "--have @FILE" in said
    assert not target.exists()


def test_what_another_folder_has_brought_counts_as_there(project, tmp_path):
    collect(project, tmp_path / "one")
    collect(project, tmp_path / "two", have="msgspec")
    take_for_granted(tmp_path / "one")
    take_for_granted(tmp_path / "two", msgspec="msgspec>=1.0", **{"nvshmem4py-cu13": "nvshmem"})
    wheelhouse.install([tmp_path / "one", tmp_path / "two"], tmp_path / "site", FakePip())


def test_a_package_of_two_groups_comes_once():
    found = wheelhouse.wanted(["kernels", "mesh", "tests"], (), {})
    assert len(found) == len(set(found))


def test_every_kernel_library_of_the_gpu_extra_is_in_a_group_with_its_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = wheelhouse.known_versions()
    asked = wheelhouse.wanted(["kernels", "mesh"], (), versions)
    for requirement in project["optional-dependencies"]["gpu"]:
        if wheelhouse.named(requirement) not in {"triton", *wheelhouse.NOT_NEEDED}:
            assert requirement in asked
    grouped = {wheelhouse.named(one) for one in asked}
    core = {wheelhouse.named(one) for one in project["dependencies"]}
    assert core - grouped == {"torch", "numpy"}


def take_for_granted(folder, **assumed):
    """As if the packages had been collected for a host that has these."""
    about = json.loads((folder / "wheelhouse.json").read_text())
    (folder / "wheelhouse.json").write_text(
        json.dumps(about | {"assumed": {name: [one] for name, one in assumed.items()}})
    )


def installed(folder, target):
    take_for_granted(folder, numpy="numpy>=1")
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools" / "wheelhouse.py"), "install"]
        + [str(folder), "--target", str(target)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_what_is_installed_over_there_can_be_imported_by_the_line_that_is_printed(
    project, tmp_path
):
    assert collect(project, tmp_path / "out") == 0
    line = installed(tmp_path / "out", tmp_path / "a site")
    script = f'{line}\n"{sys.executable}" -P -c "import msgspec; print(msgspec.value)"'
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "7"


def test_only_what_does_nothing_at_run_time_is_left_out(project, tmp_path):
    assert collect(project, tmp_path / "out") == 0
    installed(tmp_path / "out", tmp_path / "site")
    files = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*.*")}
    there = {name for name in files if "dist-info" not in name}
    assert there == {
        "msgspec/__init__.py",
        "nvshmem/bindings/nvshmem.so",
        "nvidia/nvshmem/lib/libnvshmem_device.bc",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3",
        "nvidia/nvshmem/lib/nvshmem_bootstrap_uid.so.3",
        "nvidia/nvshmem/lib/nvshmem_transport_ibrc.so.3",
    }
    assert not (tmp_path / "site" / "bin" / "msgspec").exists()
    about = json.loads((tmp_path / "out" / "wheelhouse.json").read_text())
    assert about["left_out"]["static libraries"] == 6 * 999


@pytest.mark.parametrize(
    "path",
    [
        "flashinfer/data/cutlass/include/cute/arch/mma_sm100.hpp",
        "flashinfer/data/csrc/batch_mla_run.cu",
        "deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh",
        "tvm_ffi/include/tvm/ffi/c_api.h",
        "tvm_ffi/lib/libtvm_ffi_testing.so",
        "nvidia/nvshmem/lib/libnvshmem_device.bc",
        "pytest_asyncio/plugin.py",
    ],
)
def test_what_is_compiled_or_loaded_over_there_stays(path):
    assert not [why for why, pattern in STRIP if pattern.search(path)]


def test_dependencies_that_nobody_has_are_named_with_who_asks(project, tmp_path, capsys):
    run = FakePip(
        ["nvidia-cutlass-dsl>=4", "left-pad", "tomli; python_version < '3'", "x; extra == 'y'"]
    )
    assert collect(project, tmp_path / "out", run=run) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not carried" in line]
    assert len(lines) == 2
    assert re.search(r"left-pad, asked for by msgspec, nvshmem4py_cu13 .*--have", lines[0])
    assert "nothing here calls" in lines[1]


def test_a_folder_over_the_limit_is_said_and_fails(project, tmp_path, capsys):
    assert collect(project, tmp_path / "out", "--limit-mib", "0.0001") == 1
    assert "over the limit of 0.0001 MiB" in capsys.readouterr().out


def test_wheels_may_stay_as_they_are(project, tmp_path):
    assert collect(project, tmp_path / "out", "--form", "wheels") == 0
    assert len(list((tmp_path / "out").glob("*.whl"))) == 2
    take_for_granted(tmp_path / "out", numpy="numpy>=1")
    run = FakePip()
    wheelhouse.install([tmp_path / "out"], tmp_path / "site", run)
    assert {"--no-index", "--no-deps"} <= set(run.calls[0])
    assert (tmp_path / "site" / "msgspec" / "__init__.py").exists()


def test_the_same_packages_make_the_same_archive(project, tmp_path):
    for name in ("a", "b"):
        assert collect(project, tmp_path / name) == 0
    both = [json.loads((tmp_path / n / "wheelhouse.json").read_text())["sha256"] for n in "ab"]
    assert both[0] == both[1]


def refused(*words):
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools" / "wheelhouse.py"), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_folders_are_refused_in_a_sentence(project, tmp_path):
    collect(project, tmp_path / "out")
    target = tmp_path / "site"
    assert "no folder that collect made" in refused("install", tmp_path, "--target", target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "holds something else" in refused("collect", "--out", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    about = tmp_path / "out" / "wheelhouse.json"
    text = about.read_text()
    about.write_text(text.replace(f'"{HERE}"', '"3.99"'))
    assert "is for Python 3.99" in refused("install", tmp_path / "out", "--target", target)
    about.write_text(text)
    (tmp_path / "out" / "site.tar.xz").write_bytes(b"cut off")
    assert "is damaged" in refused("install", tmp_path / "out", "--target", target)
