"""What a worker does before it serves, without loading a model: how large its steps are."""

import sys

import pytest
import torch

from pdmesh.launch.topology import shipped_config
from pdmesh.model import planning, starting
from pdmesh.model.starting import TURN_S, settle_threads, start_model
from pdmesh.prefill.config import PrefillConfig
from pdmesh.wire.errors import ConfigError
from pdmesh.wire.random_weights import RandomWeights

ROWS = (4160, 2112, 1088, 576)


class Loading:
    def progress(self, name, done, total):
        pass

    def loaded(self):
        pass


def started(monkeypatch, tmp_path, gigabytes, rows=ROWS, **given):
    """In FP8, on a machine with so much memory, of which a row of a step takes 100 kB."""
    monkeypatch.setattr(planning, "step_bytes", lambda config, rows, *_, **__: rows * 10**5)
    monkeypatch.setattr(planning, "memory_of", lambda _: (int(gigabytes * 1e9),) * 2)
    monkeypatch.setattr(starting, "load_served_model", lambda *_, **__: (None, None))
    config = PrefillConfig(
        worker_id="prefill-0",
        redis_url="",
        mesh="m",
        secret_file=tmp_path / "key",
        model_path=shipped_config("small"),
        model_name="small",
        random=RandomWeights(layers=2),
        precision="fp8",
        **given,
    )
    return start_model(config, "prefill", rows, 32, Loading)


@pytest.mark.parametrize("ranks", [(), ("127.0.0.1:1", "127.0.0.1:2")])
def test_a_worker_takes_the_largest_step_that_its_memory_leaves_pages_beside(
    monkeypatch, tmp_path, ranks
):
    found = set()
    for percent in range(5, 200):
        try:
            one = started(monkeypatch, tmp_path, percent / 100, ep_ranks=ranks)
        except ConfigError:
            assert not found, "more memory is never too little"
            continue
        assert not found or one.rows >= max(found)
        assert (one.reason == "") == (one.rows == ROWS[0])
        assert one.ranks.most_rows == one.rows
        if ranks:
            assert one.spread.exchange.size.tokens == one.rows
        found.add(one.rows)
    assert found == set(ROWS)


def test_a_worker_that_was_told_its_step_takes_no_other(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="does not fit"):
        started(monkeypatch, tmp_path, 0.15, rows=ROWS[:1])
    assert started(monkeypatch, tmp_path, 0.15).rows < ROWS[0]


def test_a_workers_threads_take_short_turns():
    """A step's thread asks for Python while messages go out."""
    before, compute = sys.getswitchinterval(), torch.get_num_threads()
    try:
        sys.setswitchinterval(10 * TURN_S)
        settle_threads(compute)
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    finally:
        sys.setswitchinterval(before)
