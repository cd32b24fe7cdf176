"""What is installed: every package, every data file."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
OTHER = {"tools", "tests", "bench", "docs", "build", "deploy", "examples"}


def folder(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def in_tree() -> set[str]:
    """Every package of the tree, by its import name."""
    found = set()
    for path in ROOT.glob("*/**/__init__.py"):
        parts = path.parent.relative_to(ROOT).parts
        if parts[0] not in OTHER and not parts[0].startswith("."):
            found.add(".".join(("pdmesh", *parts)))
    return found


def test_every_package_of_the_tree_is_installed():
    assert in_tree() == set(PACKAGES)


def test_every_package_says_that_it_is_typed():
    assert not [name for name in PACKAGES if not (folder(name) / "py.typed").is_file()]


def test_every_top_level_package_is_checked_by_the_static_tools():
    top = {name.split(".")[1] for name in PACKAGES}
    assert {name.split(".")[1] for name in PROJECT["tool"]["mypy"]["packages"]} == top
    assert set(PROJECT["tool"]["pyright"]["include"]) == top


def least(package: str) -> Version:
    """The oldest version that pip takes to be enough."""
    asked = map(Requirement, PROJECT["project"]["dependencies"])
    (specifier,) = next(iter(one.specifier for one in asked if one.name == package))
    assert specifier.operator == ">="
    return Version(specifier.version)


def test_the_oldest_grpcio_and_protobuf_that_are_enough_run_the_generated_stubs():
    grpc_stubs = (ROOT / "wire" / "chat_pb2_grpc.py").read_text()
    (wanted,) = re.findall(r"^GRPC_GENERATED_VERSION = '(.+)'$", grpc_stubs, re.MULTILINE)
    assert least("grpcio") >= Version(wanted)
    messages = (ROOT / "wire" / "chat_pb2.py").read_text()
    (wanted,) = re.findall(r"^# Protobuf Python Version: (.+)$", messages, re.MULTILINE)
    assert least("protobuf") >= Version(wanted)


def test_the_stubs_run_with_this_major_version_of_protobuf_without_a_warning():
    """protobuf takes stubs of its own major version and of the one before."""
    code = "import pdmesh.wire.chat_pb2_grpc"
    subprocess.run([sys.executable, "-P", "-W", "error", "-c", code], check=True)


def test_no_folder_is_importable_under_a_plain_name():
    assert not (ROOT / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The files in a wheel built, without network, from a copy whose weights are empty."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in {name.split(".")[1] for name in PACKAGES}:
        hidden = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, source / name, ignore=hidden)
    (source / "model" / "tiny" / "model-00001-of-00001.safetensors").touch()
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "-w", str(base), str(source)]
    subprocess.run(command, check=True, cwd=base)
    (built,) = base.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module(wheel):
    modules = {
        f"{name.replace('.', '/')}/{path.name}"
        for name in PACKAGES
        for path in folder(name).glob("*.py")
    }
    assert modules - wheel == set()


@pytest.mark.parametrize(
    "name",
    [
        "pdmesh/registry/functions.lua",
        "pdmesh/wire/chat.proto",
        "pdmesh/wire/chat_pb2.pyi",
        "pdmesh/model/configs/deepseek-v3/config.json",
        "pdmesh/model/configs/small/config.json",
        "pdmesh/model/tiny/config.json",
        "pdmesh/model/tiny/tokenizer.json",
        "pdmesh/model/tiny/chat_template.jinja",
        "pdmesh/model/tiny/model-00001-of-00001.safetensors",
    ],
)
def test_the_wheel_holds_the_data_files(wheel, name):
    assert name in wheel


def test_the_wheel_holds_every_data_file_of_the_packages(wheel):
    expected = {
        f"{name.replace('.', '/')}/{path.name}"
        for name in PACKAGES
        for path in folder(name).iterdir()
        if path.is_file() and path.suffix not in (".safetensors", ".pyc")
    }
    assert expected - wheel == set()


def test_the_wheel_holds_nothing_outside_pdmesh(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"pdmesh"}


def test_versions_are_pinned_for_every_dependency():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]["dev"]
    named = {
        text.split(";")[0].split(">")[0].split("=")[0].strip().lower()
        for text in [*PROJECT["project"]["dependencies"], *extras]
    }
    assert named - pinned == {"torch"}  # the Makefile names it
