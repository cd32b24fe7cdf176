"""What holds for all tests.

One thread of arithmetic; Ctrl-C as in a terminal; the long files first; drawn examples are the same
every time, and may take as long as a busy machine needs.
"""

import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # libraries read it once, when they are loaded
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
import torch
import triton_interpreter
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    triton_interpreter.install()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's background job ignores it, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")

LONG = (
    "test_mesh_",
    "test_pairwise_",
    "test_public_reports_mesh",
    "test_launch_",
    "test_registry_",
)
"""Files of minutes, with processes that also wait: several at a time begin with them, and no long
one is left to the end, when nothing is left beside it."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


@pytest.fixture
def servers(tmp_path):
    """Makes Valkey servers, ended with the test: a name, and lines of a configuration."""
    from store_rig import Server

    with contextlib.ExitStack() as stack:

        def make(name: str, **config: str) -> Server:
            server = Server(tmp_path / name, **config)
            stack.callback(server.kill)
            return server.start()

        yield make
