"""Whether a value may stand where a topology has it, and the sentence for one that may not."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

from pdmesh.kvtransfer.choice import TRANSPORTS, check_transports
from pdmesh.wire.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def unknown(what: str, name: str, allowed: list[str]) -> str:
    """The sentence for a name that does not exist, with one that is near."""
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return f"there is no {what} {name!r}{hint} Allowed: {', '.join(allowed)}"


def check_value(setting: dataclasses.Field[Any], value: object, source: str) -> object:
    """The value in its right type. Raises ConfigError: ``<source> is ...; it must be ...``."""
    kind = str(setting.type)
    limits = setting.metadata
    if "choices" in limits:
        if type(value) is type(setting.default) and value in limits["choices"]:
            return value
        raise ConfigError(_refusal(setting, value, source))
    if kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, str) and value in limits.get("words", {}):
        return limits["words"][value]
    if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        whole = kind == "float" or isinstance(value, int)
        if whole and limits["low"] <= value <= limits["high"]:
            return float(value) if kind == "float" else value
    if kind == "str" and isinstance(value, str) and _string_fits(setting, value):
        return value
    if kind.startswith("tuple") and (names := _names(value, source)):
        return names
    if kind.startswith("Path") and isinstance(value, str | Path) and str(value):
        return Path(value).expanduser()
    raise ConfigError(_refusal(setting, value, source))


def _refusal(setting: dataclasses.Field[Any], value: object, source: str) -> str:
    """The type of a string is named only where another type was wanted, and a file has types."""
    choices = setting.metadata.get("choices", ())
    other = str(setting.type) in ("int", "float", "bool") or any(
        not isinstance(choice, str) for choice in choices
    )
    plain = isinstance(value, str) and (not other or source.startswith("-"))
    return f"{source} is {repr(value) if plain else shown(value)}; it must be {_allowed(setting)}"


def _names(value: object, source: str) -> tuple[str, ...]:
    """A list of transports, or their names with commas between; empty where it is neither."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return ()
    names = tuple(part.strip() for part in parts)
    try:
        check_transports(names)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return names


def _string_fits(setting: dataclasses.Field[Any], value: str) -> bool:
    if setting.name == "name" and setting.default:
        return _NAME.fullmatch(value) is not None
    return bool(value) or setting.default == ""


def _allowed(setting: dataclasses.Field[Any]) -> str:
    limits = setting.metadata
    kind = str(setting.type)
    if "choices" in limits:
        return "one of " + ", ".join(str(choice) for choice in limits["choices"])
    if kind in ("int", "float"):
        what = "a whole number" if kind == "int" else "a number"
        words = "".join(f", or {word}" for word in limits["words"])
        return f"{what} from {limits['low']} to {limits['high']}{words}"
    if kind == "bool":
        return "true or false"
    if kind.startswith("Path"):
        return "a path, as a string"
    if kind.startswith("tuple"):
        return f"a list of transports, best first, of {', '.join(TRANSPORTS)}"
    if setting.name == "name" and setting.default:
        return "1 to 63 letters, digits, dots, dashes or underscores"
    return "a string that is not empty" if setting.default else "a string"


def check_text(text: str | None, source: str) -> None:
    """Raises ConfigError: a text of the command line has bytes that are not UTF-8."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source} is not UTF-8 text") from None


def check_number(value: float | None, source: str, low: float, high: float) -> None:
    """Raises ConfigError: ``value`` is given, and not from ``low`` to ``high``."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{source} is {value}; it must be a number from {low} to {high}")


def shown(value: object) -> str:
    """A value as a sentence names it."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    kind = "a string" if isinstance(value, str) else f"a {type(value).__name__}"
    return f"{str(value)!r} ({kind})"
