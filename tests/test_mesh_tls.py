"""A mesh of processes whose store is reached over TLS, with caches that have to give pages up."""

import asyncio
import re
import shutil
import threading
from contextlib import contextmanager

import meshes
import pytest
from store_rig import Proxy, until
from test_registry_tls import WORD, Certificates, url

pytestmark = pytest.mark.full
TOPOLOGY = """
[mesh]
redis = "{redis}"
log_level = "DEBUG"
[model]
page_size = 16
[prefill]
pages = 48
[decode]
workers = 1
pages = 48
"""


@contextmanager
def in_a_thread(port, context):
    """The server's end of TLS, on a loop of its own; yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    proxy = Proxy(port, context)
    asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(30)
    try:
        yield proxy.port
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_answers_stream_copies_are_learnt_and_no_password_is_logged(servers, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    certificates, server = Certificates(tmp_path), servers("a")
    server.do("ACL", "SETUSER", "mesh", "on", f">{WORD}", "~*", "&*", "+@all")
    with in_a_thread(server.port, certificates.context("server", clients=True)) as port:
        address = url(
            port,
            ssl_ca_certs=certificates.path("ca.pem"),
            ssl_certfile=certificates.path("me.pem"),
            ssl_keyfile=certificates.path("me.key"),
        )
        with meshes.running_mesh(topology=TOPOLOGY.format(redis=address)) as mesh:
            mesh.workers = 2
            logs = mesh.state_dir / "logs"

            def learnt() -> bool:
                """Whether both workers have been told of a page that the other has too."""
                said = [(logs / f"{name}-0.log").read_text() for name in ("prefill", "decode")]
                return all(re.search(r"copies_known asked=\d+ shared=[1-9]", text) for text in said)

            async with meshes.chat_stub(mesh.address) as stub:
                for number in range(200):
                    prompt = [300 + number, *range(400, 480)]
                    answer = await meshes.ask(stub, prompt, max_tokens=12, ignore_eos=True)
                    again = await meshes.ask(stub, prompt, max_tokens=12, ignore_eos=True)
                    assert answer.token_ids == again.token_ids
                    assert len(answer.token_ids) == 12
                    if number > 15 and learnt():
                        break
                    await asyncio.sleep(0.3)
            await until(learnt, "both workers know of copies")
            assert not await mesh.problems()
            texts = [path.read_text() for path in mesh.state_dir.rglob("*.log")]
        assert len(texts) >= 3
        assert not [text for text in texts if "geheim" in text]
