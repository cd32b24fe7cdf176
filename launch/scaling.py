"""Which workers start and which stop: pure decisions over the names of those that run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdmesh.launch.processes import WorkerRole
from pdmesh.wire.errors import ConfigError

MOST = 64
_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Change:
    """Names of the workers to start, and then of those to drain and stop, in order."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def plan_scale(
    running: Collection[str], targets: dict[WorkerRole, int], sizes: Mapping[str, int] | None = None
) -> Change:
    """What makes as many workers of each role run as its target says.

    New ones take the lowest indices that are free; those with the highest are stopped. Workers that
    share their experts come and go by whole groups: group g has the indices from g times its size
    on, and one that lacks some of its workers is one.

    Args:
        running: names of the workers, ``<role>-<index>``.
        targets: a role that is missing stays as it is.
        sizes: workers a group, for roles that have groups.

    Raises:
        ConfigError: a target is out of range, or makes no whole groups.
    """
    start: list[str] = []
    stop: list[str] = []
    for role in _ROLES:
        if role not in targets:
            continue
        check_target(role, targets[role])
        names = ordered(name for name in running if role_of(name) == role)
        size = (sizes or {}).get(role, 1)
        if size > 1:
            change = _scale_groups(role, names, targets[role], size)
            start += change.start
            stop += change.stop
            continue
        used = set(names)
        for _ in range(targets[role] - len(names)):
            start.append(next_name(used, role))
            used.add(start[-1])
        stop += reversed(names[targets[role] :])
    return Change(tuple(start), tuple(stop))


def _scale_groups(role: WorkerRole, names: Sequence[str], target: int, size: int) -> Change:
    if target % size:
        raise ConfigError(
            f"{role}={target}: {target} workers make no groups of {size} that share the experts; "
            f"ask for a multiple of {size}"
        )
    there = sorted({index_of(name) // size for name in names})
    wanted = target // size
    free = (number for number in range(MOST) if number not in there)
    new = [next(free) for _ in range(wanted - len(there))]
    gone = set(there[wanted:])
    return Change(
        tuple(f"{role}-{size * group + rank}" for group in new for rank in range(size)),
        tuple(name for name in reversed(names) if index_of(name) // size in gone),
    )


def plan_restart(known: Collection[str], asked: Sequence[str]) -> list[str]:
    """The workers to replace, in order; all of them if none is asked for.

    Raises:
        ConfigError: one that is asked for is not known.
    """
    for name in asked:
        if name not in known:
            raise ConfigError(unknown_worker(name, known))
    return ordered(set(asked) or known)


def check_target(role: str, target: int) -> None:
    """Raises ConfigError for a number of workers that cannot be."""
    if target < 1:
        raise ConfigError(f"{role}={target}: a mesh needs at least 1 {role} worker; ask for 1")
    if target > MOST:
        raise ConfigError(f"{role}={target}: there can be at most {MOST} {role} workers")


def unknown_worker(name: str, known: Collection[str]) -> str:
    """The sentence about a name that no worker has."""
    names = ", ".join(ordered(known)) or "none"
    return f"there is no worker {name!r} in this mesh; there are: {names}"


def next_name(used: Collection[str], role: WorkerRole) -> str:
    """The name with the lowest index that is free."""
    index = 0
    while f"{role}-{index}" in used:
        index += 1
    return f"{role}-{index}"


def role_of(name: str) -> str:
    """The role in a worker's name."""
    return name.rpartition("-")[0]


def index_of(name: str) -> int:
    """The index in a worker's name; -1 if it has none."""
    index = name.rpartition("-")[2]
    return int(index) if index.isdigit() else -1


def ordered(names: Iterable[str]) -> list[str]:
    """Prefill workers first, then by index."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[bool, str, int, str]:
    role = role_of(name)
    return role != "prefill", role, index_of(name), name
