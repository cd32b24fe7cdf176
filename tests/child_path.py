"""Where a Python that a test starts finds this project."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_path(*folders: str) -> str:
    """Its PYTHONPATH: ``.pythonpath``, these folders of the project, and what is on it already,
    which is where packages are on a host that cannot install any."""
    own = [str(ROOT / name) for name in (".pythonpath", *folders)]
    return os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
