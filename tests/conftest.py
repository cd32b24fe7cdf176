"""One thread of arithmetic in the test process: the processes of a mesh have the cores."""

import contextlib
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


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
