"""What is logged of a load."""

import logging
from pathlib import Path

from pdmesh.registry.loading import LoadingLog


def test_a_load_tells_how_far_it_is_at_most_once_a_second(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    loading = LoadingLog("prefill-0", Path("/m"), clock=lambda: now[0])
    for number in range(1, 901):
        now[0] = number / 300
        loading.progress("a.weight", number, 900)
    loading.loaded()
    told = [(record.message, record.fields) for record in caplog.records]
    assert told[0] == ("loading", {"worker": "prefill-0", "checkpoint": Path("/m")})
    assert [fields["tensors"] for _, fields in told[1:-1]] == ["300/900", "600/900", "900/900"]
    assert told[-1] == ("loaded", {"worker": "prefill-0", "seconds": "3.0"})
