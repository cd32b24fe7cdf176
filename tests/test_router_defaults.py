"""What is sampled with when a client says nothing."""

import json

import pytest
import router_fakes as fakes

from pdmesh.router.defaults import SamplingDefaults, sampling_defaults
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.messages import PrefillRequest

CHECKPOINT = json.loads((fakes.MODEL_PATH / "generation_config.json").read_text())
THEIRS = (CHECKPOINT["temperature"], CHECKPOINT["top_p"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (0.0, 1.0)),
        ({}, (0.0, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, (0.6, 0.95)),
        ({"do_sample": True}, (1.0, 1.0)),
        ({"temperature": 0.3}, (0.3, 1.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, (0.0, 1.0)),
        ({"do_sample": True, "temperature": None, "top_p": None}, (1.0, 1.0)),
    ],
)
def test_the_defaults_are_the_checkpoints(tmp_path, given, expected):
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(tmp_path) == SamplingDefaults(*expected)


SHAPED = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("given", "vocab", "expected"),
    [
        (SHAPED, 100, SamplingDefaults(0.6, 1.0, 20, 0.1, 1.1)),
        (SHAPED, 10, SamplingDefaults(0.6, 1.0, 0, 0.1, 1.1)),
        (SHAPED | {"do_sample": False}, 100, SamplingDefaults(repetition_penalty=1.1)),
    ],
)
def test_the_shape_of_the_distribution_is_the_checkpoints_too(tmp_path, given, vocab, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(tmp_path, vocab) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": -1}, "temperature is -1.0; it must be between 0.0 and 100.0"),
        ({"top_p": 0}, "top_p is 0.0; it must be over 0 and at most 1"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"top_k": -1}, "top_k is -1; it must be between 0 and 2147483648"),
        ({"min_p": 3}, "min_p is 3.0; it must be between 0.0 and 1.0"),
        (
            {"do_sample": False, "repetition_penalty": 0},
            "repetition_penalty is 0.0; it must be over 0 and at most 2",
        ),
    ],
)
def test_a_wrong_value_in_the_checkpoint_is_one_sentence_with_its_file(tmp_path, given, sentence):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError) as raised:
        sampling_defaults(tmp_path)
    assert str(raised.value) == f"{tmp_path / 'generation_config.json'}: {sentence}"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, THEIRS),
        ({"temperature": 0.0}, (0.0, THEIRS[1])),
        ({"temperature": 0.2}, (0.2, THEIRS[1])),
        ({"top_p": 0.5}, (THEIRS[0], 0.5)),
        ({"temperature": 1.5, "top_p": 1.0}, (1.5, 1.0)),
    ],
)
async def test_what_a_client_leaves_out_comes_from_the_checkpoint(tmp_path, sent, expected):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        answer = await mesh.chat(max_tokens=2, **sent)
        (seen,) = mesh.prefill[0].seen(PrefillRequest)
        assert (seen.sampling.temperature, seen.sampling.top_p) == expected
        assert seen.sampling.seed == answer.usage.seed


async def test_two_requests_without_a_seed_get_different_ones(tmp_path):
    async with fakes.mesh(tmp_path, decode=1) as mesh:
        seeds = {(await mesh.chat(max_tokens=1)).usage.seed for _ in range(4)}
        assert len(seeds) == 4
