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
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(model_path: Path, vocab_size: int = 1 << 31) -> SamplingDefaults:
    """What the checkpoint's ``generation_config.json`` gives of the fields of SamplingDefaults.

    Greedy without the file, without a temperature, or where ``do_sample`` is false, which leaves
    the repetition penalty; a temperature of 1 where ``do_sample`` is true and no temperature is
    given, as in transformers. A ``top_k`` over ``vocab_size`` is no limit.

    Raises:
        ConfigError: the file cannot be read, or a value in it is not allowed.
    """
    path = model_path / _FILE
    given = read_json(path) or {}
    penalty = _number(path, given, "repetition_penalty", 1.0)
    do_sample = given.get("do_sample")
    if do_sample is False:
        defaults = SamplingDefaults(repetition_penalty=penalty)
    else:
        top_k = _number(path, given, "top_k", 0.0)
        if top_k != int(top_k):
            raise ConfigError(f"{path}: top_k is {top_k}; it must be a whole number")
        defaults = SamplingDefaults(
            temperature=_number(path, given, "temperature", 1.0 if do_sample else 0.0),
            top_p=_number(path, given, "top_p", 1.0),
            top_k=int(top_k) if top_k <= vocab_size else 0,
            min_p=_number(path, given, "min_p", 0.0),
            repetition_penalty=penalty,
        )
    try:
        SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ).validate(vocab_size)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return defaults


def _number(path: Path, given: dict[str, object], key: str, default: float) -> float:
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a number")
    return float(value)
