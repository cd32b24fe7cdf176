"""Carries Python packages to a host that reaches no index: what a GPU run needs, in a small folder.

    python tools/wheelhouse.py collect --out carry/kernels --groups kernels
    python tools/wheelhouse.py collect --out carry/mesh --groups mesh --have torch,numpy,grpcio
    python tools/wheelhouse.py collect --out carry/all --groups kernels mesh --have @host.txt
    python tools/wheelhouse.py show carry/kernels carry/mesh
    eval "$(python3 tools/wheelhouse.py install carry/kernels carry/mesh --target /tmp/site)"

`collect` runs here, where pip reaches an index: it downloads the wheels of the named groups for the
other host's Python, without their dependencies (the CUDA build of torch alone would be gigabytes),
says what these ask for beyond that, leaves out what does nothing at run time, and writes one
`site.tar.xz` with a `wheelhouse.json` beside it. What the host has is named by `--have`, also from
a file (`pip list --format freeze` over there). Versions are those of pyproject.toml and
constraints.txt. `--form wheels` keeps the wheels as they are instead.

`install` needs Python's standard library alone (pip for wheels). It prints the line that makes the
packages importable, everything else goes to stderr. What was taken to be there and is not, or is
older than this project needs, is refused by name before anything is unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".pythonpath")]

from pdmesh.tools.wheel_rules import (  # noqa: E402 - the path is set above
    GROUPS,
    HAVE,
    NOT_NEEDED,
    STRIP,
)

MIB = 1 << 20
MACHINES = {"x86_64", "aarch64"}
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)

Pip = Callable[[Sequence[str]], None]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirement: str) -> str:
    """The package of a requirement, canonical."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if found is None:
        raise ValueError(f"{requirement!r} names no package")
    return canonical(found.group())


def declared(root: Path = ROOT) -> dict[str, str]:
    """By package, what the project asks for, pins of its extras included."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    return _by_package([*project["dependencies"], *extras.get("gpu", ()), *extras.get("dev", ())])


def known_versions(root: Path = ROOT) -> dict[str, str]:
    """By package, the requirement to download: a pin of an extra or constraint, else as it is."""
    pins = (root / "constraints.txt").read_text().splitlines()
    return _by_package([*declared(root).values(), *pins])


def _by_package(listed: Iterable[str]) -> dict[str, str]:
    """Requirements by package: the first that pins a version, else the first."""
    found: dict[str, str] = {}
    for line in listed:
        requirement = line.split(";")[0].split("#")[0].strip()
        if not requirement:
            continue
        name = named(requirement)
        if name not in found or "==" not in found[name]:
            found[name] = requirement
    return found


def names_of(groups: Iterable[str]) -> list[str]:
    """The packages of groups, each once."""
    return list(dict.fromkeys(canonical(name) for group in groups for name in GROUPS[group]))


def wanted(groups: Iterable[str], have: Iterable[str], versions: dict[str, str]) -> list[str]:
    """What is to be downloaded, each package once, without those that are there."""
    there = {canonical(name) for name in have}
    return [versions.get(name, name) for name in names_of(groups) if name not in there]


def read_have(text: str) -> dict[str, str | None]:
    """Packages of a comma-separated list, of which "@FILE" stands for a file's lines, each with its
    version where it is said."""
    found: dict[str, str | None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        lines = Path(part[1:]).read_text().splitlines() if part.startswith("@") else [part]
        for line in lines:
            if re.match(r"\s*[A-Za-z0-9]", line):
                version = re.search(r"==\s*([^\s;]+)", line)
                found[named(line)] = version and version.group(1)
    return found


def fits(requirement: str, version: str) -> bool:
    """Whether a version of a package is one that is asked for."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # a host that has nothing but pip
        from pip._vendor.packaging.requirements import (  # type: ignore[import-untyped, no-redef]
            Requirement,
        )
    return bool(Requirement(requirement.split(";")[0]).specifier.contains(version, True))


def unfit(assumed: dict[str, list[str]], target: Path) -> list[str]:
    """What of the packages that a host was taken to have is neither there nor in `target`."""
    found = []
    for name, requirements in assumed.items():
        there = metadata.distributions(name=name, path=[str(target), *sys.path])
        version = next((one.version for one in there), None)
        if version is None:
            found.append(f"{name} is not here")
        elif bad := [one for one in requirements if not fits(one, version)]:
            found.append(f"{name} is {version} here, and {' and '.join(bad)} is needed")
    return found


def pip(arguments: Sequence[str]) -> None:
    """Runs this interpreter's pip.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed: {done.stderr.strip()[-1500:]}")


def target_options(python: str, machine: str) -> list[str]:
    """pip's description of the other host: CPython, any glibc from 2.17 to 2.35."""
    if machine not in MACHINES:
        raise ValueError(f"{machine} is none of {', '.join(sorted(MACHINES))}")
    names = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    return options + [word for name in names for word in ("--platform", name)]


def requirements_of(wheel: Path, python: str) -> dict[str, str]:
    """By package, what a wheel asks for with that Python on Linux, leaving extras out."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    there |= {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    asked = map(Requirement, message.get_all("Requires-Dist") or ())
    return {
        canonical(one.name): f"{canonical(one.name)}{one.specifier}"
        for one in asked
        if one.marker is None or one.marker.evaluate(there)
    }


def unmet(wheels: Iterable[Path], have: Iterable[str], python: str) -> dict[str, list[str]]:
    """Dependencies that are neither carried nor on the host, and who asks for them."""
    wheels = list(wheels)
    there = {canonical(wheel.name.split("-")[0]) for wheel in wheels} | set(map(canonical, have))
    found: dict[str, list[str]] = {}
    for wheel in wheels:
        for name in requirements_of(wheel, python):
            if name not in there:
                found.setdefault(name, []).append(wheel.name.split("-")[0])
    return found


def taken_for_granted(
    wheels: Iterable[Path], have: Iterable[str], asked: dict[str, str], python: str
) -> dict[str, list[str]]:
    """By package of a host, what this project and the carried wheels ask of it."""
    found = {name: [asked[name]] if name in asked else [] for name in have}
    for wheel in wheels:
        for name, requirement in requirements_of(wheel, python).items():
            if name in found:
                found[name].append(requirement)
    return {name: list(dict.fromkeys(each)) for name, each in found.items()}


def strip(site: Path) -> dict[str, int]:
    """Deletes what the rules name, and scripts, which name this interpreter; bytes by rule."""
    freed: dict[str, int] = {}
    for path in sorted(site.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(site).as_posix()
        why = next((why for why, pattern in STRIP if pattern.search(name)), None)
        if why is None and name.startswith("bin/"):
            with path.open("rb") as file:
                why = "scripts" if file.read(2) == b"#!" else None
        if why is not None:
            freed[why] = freed.get(why, 0) + path.stat().st_size
            path.unlink()
    return freed


def pack(site: Path, archive: Path) -> int:
    """One compressed file of a folder; its unpacked bytes. Files of one name lie together, so that
    headers which several packages bring along are stored once."""
    files = sorted(
        (path for path in site.rglob("*") if path.is_file()),
        key=lambda path: (path.suffix, path.name, path.as_posix()),
    )

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in files:
            tar.add(path, path.relative_to(site).as_posix(), filter=plain)
    return sum(path.stat().st_size for path in files)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def collect(args: argparse.Namespace, run: Pip = pip) -> int:
    """The command; its exit status: 1 if the folder is over its limit."""
    asked, said = declared(args.project), read_have(args.have)
    have = [name for name, v in said.items() if v is None or fits(asked.get(name, name), v)]
    for name in sorted(said.keys() - set(have)):
        print(f"{name} {said[name]} of that host is not {asked[name]}: carried")
    requirements = wanted(args.groups, have, known_versions(args.project))
    if not requirements:
        print("everything is there already: nothing to carry")
        return 0
    options = target_options(args.python, args.machine)
    out: Path = args.out
    if out.exists() and not (out / "wheelhouse.json").exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds something else: name a new folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        house = out if args.form == "wheels" else Path(scratch, "wheels")
        run(["download", "--quiet", "--no-deps", *options, "--dest", str(house), *requirements])
        wheels = sorted(house.glob("*.whl"))
        packages = {w.name: w.stat().st_size for w in wheels}
        about: dict[str, Any] = {
            "form": args.form,
            "python": args.python,
            "machine": args.machine,
            "groups": list(args.groups),
            "packages": packages,
        }
        needed = set(names_of(args.groups)) & set(have)
        assumed = taken_for_granted(wheels, needed, asked, args.python)
        about["assumed"] = assumed
        for name, requirements in assumed.items():
            version = said[name]
            if version and (bad := [one for one in requirements if not fits(one, version)]):
                shutil.rmtree(out)
                raise ValueError(
                    f"that host has {name} {version}, and what is carried asks for "
                    f"{' and '.join(bad)}: leave {name} out of --have"
                )
        missing = unmet(wheels, have, args.python)
        if args.form == "archive":
            site = Path(scratch, "site")
            install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", *options]
            run([*install, "--target", str(site), *map(str, wheels)])
            about["left_out"] = strip(site)
            about["unpacked"] = pack(site, out / "site.tar.xz")
            about["sha256"] = digest(out / "site.tar.xz")
    (out / "wheelhouse.json").write_text(json.dumps(about, indent=1) + "\n")
    for name, who in sorted(missing.items()):
        note = NOT_NEEDED.get(name, "if it is not on the host, imports may fail: see --have")
        print(f"not carried: {name}, asked for by {', '.join(who)} ({note})")
    return show(out, about, args.limit_mib)


def show(folder: Path, about: dict[str, Any], limit_mib: float = 0.0) -> int:
    """Prints what a folder holds; 1 if it is over the limit."""
    for name, size in sorted(about["packages"].items(), key=lambda item: -item[1]):
        print(f"{size / MIB:8.1f} MiB {name}")
    for why, size in sorted(about.get("left_out", {}).items(), key=lambda item: -item[1]):
        print(f"{size / MIB:8.1f} MiB left out: {why}")
    size = folder_bytes(folder) / MIB
    of = f" of {about['unpacked'] / MIB:.1f} unpacked" if "unpacked" in about else ""
    print(
        f"{folder}: {size:.1f} MiB{of}, Python {about['python']}, {len(about['packages'])} wheels"
    )
    if limit_mib and size > limit_mib:
        print(f"over the limit of {limit_mib:g} MiB: take fewer groups, or name more with --have")
        return 1
    return 0


def read_about(folder: Path) -> dict[str, Any]:
    """The description in a folder.

    Raises:
        ValueError: there is none, or an archive is not what it describes.
    """
    try:
        about: dict[str, Any] = json.loads((folder / "wheelhouse.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is no folder that collect made: {error}") from error
    if about["form"] == "archive" and digest(folder / "site.tar.xz") != about["sha256"]:
        raise ValueError(f"{folder}/site.tar.xz is damaged: collect it again")
    return about


def install(folders: Sequence[Path], target: Path, run: Pip = pip) -> None:
    """Unpacks the folders' packages into `target` and prints the line that makes them importable.

    Raises:
        ValueError: a folder is damaged, for another Python, or for a host that has more.
    """
    for folder in folders:
        about = read_about(folder)
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if about["python"] != here:
            raise ValueError(f"{folder} is for Python {about['python']}, this is {here}")
        if lacking := unfit(about.get("assumed", {}), target):
            raise ValueError(
                f"{'; '.join(lacking)}: collect {folder} again with --have @FILE, the output of"
                " pip list --format freeze on this host"
            )
        target.mkdir(parents=True, exist_ok=True)
        if about["form"] == "archive":
            with tarfile.open(folder / "site.tar.xz", "r:xz") as tar:
                tar.extractall(target, filter="data")
        else:
            options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
            wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
            run(["install", *options, "--target", str(target), *wheels])
        print(f"{folder}: {len(about['packages'])} packages in {target}", file=sys.stderr)
    place = shlex.quote(str(target.resolve()))
    print(f"export PYTHONPATH={place}${{PYTHONPATH:+:$PYTHONPATH}} PATH={place}/bin:$PATH")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="download, strip and pack, where there is an index")
    one.add_argument("--out", type=Path, required=True, help="a folder to make anew")
    one.add_argument("--groups", nargs="+", choices=GROUPS, default=["kernels"])
    one.add_argument("--python", default="3.12", help="the other host's (3.12)")
    one.add_argument("--machine", default="x86_64", choices=sorted(MACHINES))
    one.add_argument(
        "--have", default=",".join(HAVE), help="packages of that host, or @FILE; commas between"
    )
    one.add_argument("--limit-mib", type=float, default=64.0, help="0 for none (64)")
    one.add_argument("--form", choices=("archive", "wheels"), default="archive")
    one.add_argument("--project", type=Path, default=ROOT, help=argparse.SUPPRESS)
    two = commands.add_parser("show", help="what folders hold")
    two.add_argument("folders", type=Path, nargs="+")
    three = commands.add_parser("install", help="unpack, on the other host")
    three.add_argument("folders", type=Path, nargs="+")
    three.add_argument("--target", type=Path, required=True)
    return parser


def main(given: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(given)
    try:
        if args.command == "collect":
            return collect(args)
        if args.command == "install":
            install(args.folders, args.target)
        else:
            for folder in args.folders:
                show(folder, read_about(folder))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
