"""What the command line of every benchmark has: its text, defaults, and a sentence for what lacks.

Import it before anything that may not be installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

EXIT_WRONG_INPUT = 2
_NO_DEVICE = ("NVIDIA driver", "No CUDA GPUs", "not compiled with CUDA", "ATen_cuda")


class Parser(argparse.ArgumentParser):
    """Shows the whole text of a benchmark, and every default."""

    def add_argument(self, *names: Any, **given: Any) -> argparse.Action:
        """As ``argparse`` does it; the default goes into the help."""
        action = super().add_argument(*names, **given)
        default = _shown(action.default)
        if default and action.help is not argparse.SUPPRESS:
            action.help = _with_default(action.help or "", default.replace("%", "%%"))
        return action


def parser(text: str | None, output: str = "standard output") -> Parser:
    """Of a benchmark whose module says ``text``, and whose results go to ``output``."""
    raw = argparse.RawDescriptionHelpFormatter
    return Parser(description=text, epilog=f"Results go to {output}.", formatter_class=raw)


def add_traces(to: argparse.ArgumentParser) -> None:
    """``--traces`` and ``--trace``: which recorded request traces are played."""
    to.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        default=os.environ.get("PDMESH_TRACES"),
        help="folder of the traces; also $PDMESH_TRACES",
    )
    to.add_argument(
        "--trace", action="append", metavar="FILE", help="in DIR or anywhere; may be repeated"
    )


def _shown(default: object) -> str:
    if default in (None, False, "", argparse.SUPPRESS) or default == []:
        return ""
    if isinstance(default, Sequence) and not isinstance(default, str):
        return " ".join(map(str, default))
    root = Path(__file__).resolve().parent.parent
    if isinstance(default, Path) and default.is_relative_to(root):
        return str(default.relative_to(root))
    return str(default)


def _with_default(text: str, default: str) -> str:
    """A text that names the default already stays as it is."""
    if "default" in text:
        return text
    if text.endswith(f" ({default})"):
        text = text.removesuffix(f" ({default})")
    return f"{text} (default: {default})" if text else f"default: {default}"


def lacking(error: BaseException) -> str:
    """The sentence with the fix for an error that says what this machine lacks; "" for others."""
    text = str(error)
    no_device = isinstance(error, RuntimeError | AssertionError) and any(
        words in text for words in _NO_DEVICE
    )
    if no_device or (isinstance(error, FileNotFoundError) and error.filename == "nvidia-smi"):
        return "this benchmark needs a CUDA device, and torch finds none"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    if package in _needed("dev"):
        fix = "make setup-dev installs it, or pip install -e '.[dev]'"
    elif package in ("deep_gemm", "flash_mla", "flashinfer", "nvshmem", "tvm_ffi"):
        fix = "pip install -e '.[gpu]' installs it"
    elif package == "matplotlib":
        fix = "pip install matplotlib installs it"
    else:
        fix = "make setup installs what all benchmarks need; run them with .venv/bin/python -P"
    return f"this benchmark needs {package}, which is not installed; {fix}"


def need_device() -> None:
    """For a benchmark whose children would fail without a CUDA device.

    Raises:
        RuntimeError: there is none; ``lacking`` has the sentence.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("No CUDA GPUs are available")


def _needed(extra: str) -> set[str]:
    """Modules of an extra of this project, as far as they have the name of their package."""
    try:
        lines = metadata.requires("pdmesh") or []
    except metadata.PackageNotFoundError:
        lines = [f"{name}; extra == 'dev'" for name in ("pytest", "transformers", "triton")]
    wanted = (line for line in lines if f"extra == '{extra}'" in line.replace('"', "'"))
    return {"".join(_letters(line)).replace("-", "_") for line in wanted}


def _letters(line: str) -> Sequence[str]:
    end = next((i for i, c in enumerate(line) if not (c.isalnum() or c in "-_")), len(line))
    return line[:end]


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sentence = lacking(error)
    if not sentence:
        sys.__excepthook__(kind, error, trace)
        return
    print(sentence, file=sys.stderr)
    sys.exit(EXIT_WRONG_INPUT)


def install() -> None:
    """What lacks ends this process with a sentence and exit code 2, without a traceback."""
    sys.excepthook = _end


if Path(getattr(sys.modules["__main__"], "__file__", None) or "/").parent.name == "bench":
    install()
