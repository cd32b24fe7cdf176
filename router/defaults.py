"""Sampling for clients that leave it to the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdmesh.text.tokenizer import read_json
from pdmesh.wire.errors import ConfigError, InvalidRequest
from pdmesh.wire.sampling import SamplingParams

_FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Greedy unless the checkpoint says otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0


def sampling_defaults(model_path: Path) -> SamplingDefaults:
    """``temperature`` and ``top_p`` of the checkpoint's ``generation_config.json``.

    Greedy without the file, without a temperature, or where ``do_sample`` is false; a temperature
    of 1 where ``do_sample`` is true and no temperature is given, as in transformers.

    Raises:
        ConfigError: the file cannot be read, or a value in it is not allowed.
    """
    path = model_path / _FILE
    given = read_json(path) or {}
    do_sample = given.get("do_sample")
    if do_sample is False:
        return SamplingDefaults()
    temperature = _number(path, given, "temperature", 1.0 if do_sample else 0.0)
    top_p = _number(path, given, "top_p", 1.0)
    try:
        SamplingParams(temperature=temperature, top_p=top_p).validate(vocab_size=1)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return SamplingDefaults(temperature, top_p)


def _number(path: Path, given: dict[str, object], key: str, default: float) -> float:
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a number")
    return float(value)
