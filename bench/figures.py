"""Figures as benchmarks keep them: one that is not there is null in JSON, and a dash in text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any


def as_json(found: Any, indent: int | None = None) -> str:
    """`found` as JSON that every reader takes: null for a float that is infinite or no number."""
    return json.dumps(_known(found), indent=indent, allow_nan=False)


def _known(found: Any) -> Any:
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {key: _known(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_known(value) for value in found]
    return found


def rounded(figure: float | None, digits: int) -> float | None:
    """None for one that there is not, also if that is said by an infinite one or no number."""
    return None if figure is None or not math.isfinite(figure) else round(figure, digits)


def shown(figure: float | None, form: str) -> str:
    """As the format says, or a dash."""
    return "-" if figure is None else format(figure, form)


def total(figures: Iterable[float | None]) -> float | None:
    """Their sum; None if one of them is."""
    found = 0.0
    for figure in figures:
        if figure is None:
            return None
        found += figure
    return found
