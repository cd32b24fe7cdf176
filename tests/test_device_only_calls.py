"""Benches, and files that run on a device alone, call functions with the arguments they have.

Calls are looked at without being made: of functions and classes of this project and of the file
itself, by name, through a module, in `functools.partial`, and of methods where the class of what
they belong to is plain (made or annotated under that name).
"""

import ast
import builtins
import importlib
import inspect
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("bench/*", "tests/nvshmem_*", "tests/ep_peer", "tests/test_gpu_*", "tests/cuda_ipc_peer")
MARK = ".".join(("pytest", "mark", "gpu"))  # not as one word: this file has no such test


def _files() -> list[Path]:
    found = {path for name in NAMES for path in ROOT.glob(f"{name}.py")}
    for path in (ROOT / "tests").glob("test_*.py"):
        if MARK in path.read_text():
            found.add(path)
    return sorted(found)


FILES = _files()


def ours(module: str) -> bool:
    beside = any((ROOT / part / f"{module}.py").exists() for part in ("tests", "bench"))
    return beside or module.split(".")[0] == "pdmesh"


def loaded(module: str) -> object | None:
    """The module; None if it does not load without a device or a library."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, pytest.skip.Exception):
        return None


class Names:
    """What the names of a file stand for, as far as it is certain: never what is assigned."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.missing = path, []
        self.known: dict[str, object] = {}
        self.classes: dict[str, type] = {}
        for node in tree.body:  # of its own: not loaded, since that may change the process
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                self.known[node.name] = Written(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and ours(node.module):
                self._imported(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if ours(alias.name) and (module := loaded(alias.name)) is not None:
                        first = alias.asname or alias.name.split(".")[0]
                        self.known[first] = module if alias.asname else loaded(first)
        for name in assigned(tree):
            self.known.pop(name, None)
        self.classes = self._of_names(tree)

    def _imported(self, node: ast.ImportFrom) -> None:
        module = loaded(node.module)
        for alias in node.names if module is not None else ():
            if hasattr(module, alias.name):
                found = getattr(module, alias.name)
            elif (found := loaded(f"{node.module}.{alias.name}")) is None:
                line = f"{self.path.name}:{node.lineno} {node.module} has no {alias.name}"
                if not (ROOT / f"{node.module.replace('pdmesh.', '').replace('.', '/')}").is_dir():
                    self.missing.append(line)
                continue
            self.known[alias.asname or alias.name] = found

    def _of_names(self, tree: ast.Module) -> dict[str, type]:
        """Classes of variables and parameters that have one class wherever the file names them."""
        found: dict[str, set[object]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.With):
                value = getattr(node, "value", None)
                made = self.target(value.func) if isinstance(value, ast.Call) else None
                if isinstance(node, ast.AnnAssign):
                    made = self.target(node.annotation)
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                targets += [item.optional_vars for item in getattr(node, "items", [])]
                for one in targets:
                    for name in names_in(one):
                        plain = isinstance(one, ast.Name) and not isinstance(node, ast.For)
                        found.setdefault(name, set()).add(made if plain else None)
            elif isinstance(node, ast.arg):
                found.setdefault(node.arg, set()).add(self.target(node.annotation))
            elif isinstance(node, ast.comprehension):
                for name in names_in(node.target):
                    found.setdefault(name, set()).add(None)
        return {
            name: next(iter(kinds))
            for name, kinds in found.items()
            if len(kinds) == 1 and inspect.isclass(next(iter(kinds)))
        }

    def target(self, node: ast.AST | None) -> object | None:
        """What an expression certainly is."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id in self.classes:
            return bound_method(self.classes[node.value.id], node.attr)
        owner = self.target(node.value)
        if not (inspect.ismodule(owner) or inspect.isclass(owner)) or not of_project(owner):
            return None
        if not hasattr(owner, node.attr):
            if inspect.ismodule(owner) and not hasattr(builtins, node.attr):
                self.missing.append(
                    f"{self.path.name}:{node.lineno} {owner.__name__} has no {node.attr}"
                )
            return None
        return (
            inspect.getattr_static(owner, node.attr)
            if inspect.isclass(owner)
            else getattr(owner, node.attr)
        )


def names_in(node: ast.AST | None) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)] if node else []


def assigned(tree: ast.Module) -> set[str]:
    """Names that the file binds by anything but an import, a definition at its top, or a `with`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node not in tree.body:
            found.add(node.name)
    return found


def of_project(value: object) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") or ""
    return ours(name)


def bound_method(kind: type, name: str) -> object | None:
    """A method without its first argument."""
    if not of_project(kind):
        return None
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return getattr(kind, name)
    return Method(found) if inspect.isfunction(found) else None


class Method:
    """A function whose first argument is there already."""

    def __init__(self, function: object) -> None:
        whole = inspect.signature(function)
        self.signature = whole.replace(parameters=list(whole.parameters.values())[1:])


class Written:
    """A function of the file itself, as it stands there."""

    def __init__(self, node: ast.FunctionDef) -> None:
        given, kind = node.args, inspect.Parameter
        plain = [*given.posonlyargs, *given.args]
        without = len(plain) - len(given.defaults)
        found = [
            kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < without else None)
            for i, one in enumerate(plain)
        ]
        if given.vararg:
            found.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            usual = kind.empty if default is None else None
            found.append(kind(one.arg, kind.KEYWORD_ONLY, default=usual))
        if given.kwarg:
            found.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
        self.signature = inspect.Signature(found)


def refused(called: object, node: ast.Call, skip: int = 0, *, partly: bool = False) -> str:
    """Why a call is not one; empty if it may be. What is unpacked may be anything."""
    if isinstance(called, staticmethod):
        called = called.__func__
    known = isinstance(called, Method | Written)
    if not known and not (inspect.isfunction(called) or inspect.isclass(called)):
        return ""
    if not known and not of_project(called):
        return ""
    arguments = node.args[skip:]
    partly = partly or any(isinstance(one, ast.Starred) for one in arguments)
    partly = partly or any(one.arg is None for one in node.keywords)
    plain = []
    for one in arguments:
        if isinstance(one, ast.Starred):
            break
        plain.append(one)
    keywords = {one.arg: one for one in node.keywords if one.arg is not None}
    try:
        signature = called.signature if known else inspect.signature(called)
        (signature.bind_partial if partly else signature.bind)(*plain, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:  # a class of C has no signature
        return ""
    return ""


def mistaken(path: Path, text: str | None = None) -> tuple[list[str], int]:
    """Calls whose arguments their function does not take, and how many were looked at."""
    tree = ast.parse(path.read_text() if text is None else text)
    names, wrong, seen = Names(path, tree), [], 0
    decorators = {id(one) for node in ast.walk(tree) for one in getattr(node, "decorator_list", ())}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in decorators:
            continue
        shown, called, skip = ast.unparse(node.func), names.target(node.func), 0
        partly = shown.rpartition(".")[2] == "partial" and bool(node.args)
        if partly:
            called, skip = names.target(node.args[0]), 1
        seen += called is not None
        if said := refused(called, node, skip, partly=partly):
            wrong.append(f"{path.name}:{node.lineno} {shown}: {said}")
    return sorted({*wrong, *names.missing}), seen


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), str(ROOT / "tests"), *sys.path])


def test_calls_in_benches_and_files_for_devices_have_the_arguments_that_are_asked_for():
    assert len(FILES) > 45
    found = [mistaken(path) for path in FILES]
    assert [line for lines, _ in found for line in lines] == []
    assert sum(seen for _, seen in found) > 500


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cuda_gemm.fp8_gemm(x)", "missing a required argument: 'weight'"),
        ("cuda_gemm.fp8_gemm(*both, dependant=True)", "dependant"),
        ("cuda_gemm.fp9_gemm(x, w)", "has no fp9_gemm"),
        ("partial(cuda_gemm.fp8_gemm, dependant=True)", "dependant"),
        ("ClusterTile(1, 2, 3, width=4)", "width"),
        ("plan = flash_mla_backend.Plan(lengths, 1, 128)\nplan.refresh()", "'lengths'"),
        ("def f(plan: flash_mla_backend.Plan):\n    plan.refresh(1, 2)", "too many"),
        ("from pdmesh.kernels.gemm_config import nothing_there", "has no nothing_there"),
        ("def own(a, *, b=1): ...\nown(1, c=2)", "unexpected keyword argument 'c'"),
        ("def own(a, *, b=1): ...\nown(1, b=2)", ""),
        ("cuda_gemm.fp8_gemm(x, w, out=y, tile=t, dependent=True)", ""),
        ("partial(cuda_gemm.fp8_gemm, dependent=True)", ""),
        ("cuda_gemm.fp8_gemm(*both)", ""),
        ("def f(cuda_gemm):\n    cuda_gemm.fp9_gemm(1)", ""),
    ],
)
def test_a_call_that_its_function_does_not_take_is_named(line, said):
    text = (
        "from functools import partial\n"
        "from pdmesh.kernels import cuda_gemm, flash_mla_backend\n"
        f"from pdmesh.kernels.gemm_config import ClusterTile\n{line}\n"
    )
    lines, _ = mistaken(Path("no_file_of_that_name.py"), text)
    assert len(lines) == bool(said)
    assert said in "".join(lines)
