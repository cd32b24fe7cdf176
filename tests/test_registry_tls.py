"""Ways to a store other than plain TCP: TLS with authorities and client certificates, and a socket.

The server at hand was built without TLS, so a proxy in the test ends it: certificates, versions and
alerts are those of OpenSSL on both sides.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from child_path import python_path
from store_rig import PASSWORD, Crowd, Proxy, record

from pdmesh.registry.address import check_url
from pdmesh.registry.client import RegistryView
from pdmesh.registry.publisher import WorkerLease
from pdmesh.registry.store import StoreUnavailable, check_store
from pdmesh.wire.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
WORD = "geheim/wort@1"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """Two authorities, ``ca`` and ``other``, and what the first has signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ca", "other"):
            self._openssl("req", "-x509", *CURVE, "-subj", f"/CN={name}", name=name)
        for name, host in (("server", "IP:127.0.0.1"), ("elsewhere", "DNS:x.test"), ("me", "")):
            subject = (
                "-subj",
                f"/CN={name}",
                *(("-addext", f"subjectAltName={host}") if host else ()),
            )
            signed = ("-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key"))
            self._openssl("req", "-x509", *CURVE, *subject, *signed, name=name)

    def _openssl(self, *arguments: str, name: str) -> None:
        out = ("-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.pem"))
        subprocess.run(
            ["openssl", *arguments, *out, "-days", "30"], check=True, capture_output=True
        )

    def lock(self, name: str, password: str) -> str:
        """The file of a key that only a password opens."""
        locked = self.path(f"{name}-locked.key")
        words = ("-in", self.path(f"{name}.key"), "-aes256", "-passout", f"pass:{password}")
        subprocess.run(["openssl", "pkey", *words, "-out", locked], check=True, capture_output=True)
        return locked

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def context(self, name: str, clients: bool = False) -> ssl.SSLContext:
        """Of a server with that certificate, which may ask for its clients' too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path(f"{name}.pem"), self.path(f"{name}.key"))
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path("ca.pem"))
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def tls(servers, certificates):
    """Makes ends of TLS in front of one server; ``WORD`` is the password of its user ``mesh``."""
    server, proxies = servers("a"), []
    server.do("ACL", "SETUSER", "mesh", "on", f">{WORD}", "~*", "&*", "+@all")

    async def make(name: str = "server", clients: bool = False) -> Proxy:
        proxies.append(await Proxy(server.port, certificates.context(name, clients)).start())
        return proxies[-1]

    yield make
    for proxy in proxies:
        await proxy.close()


def url(port: int, **options: str) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"rediss://mesh:{quote(WORD, safe='')}@127.0.0.1:{port}?{query}"


async def works(address: str) -> None:
    """Workers register, publish and evict; a router follows and looks up."""
    async with Crowd(address) as crowd:
        before = sum(churn.steps for churn in crowd.churns.values())
        while sum(churn.steps for churn in crowd.churns.values()) < before + 40:
            crowd.never_without_workers()
            await asyncio.sleep(0.02)
        await crowd.converges()


async def test_a_mesh_lives_over_tls_with_a_user_and_an_authority(tls, certificates, caplog):
    caplog.set_level("DEBUG")
    proxy = await tls()
    await works(url(proxy.port, ssl_ca_certs=certificates.path("ca.pem")))
    assert caplog.records
    assert "geheim" not in caplog.text


async def test_a_mesh_lives_over_tls_that_asks_for_a_clients_certificate(tls, certificates):
    proxy = await tls(clients=True)
    own = {"ssl_certfile": certificates.path("me.pem"), "ssl_keyfile": certificates.path("me.key")}
    await works(url(proxy.port, ssl_ca_certs=certificates.path("ca.pem"), **own))


def test_a_certificate_goes_through_with_its_own_key_alone(certificates):
    ca, me = certificates.path("ca.pem"), certificates.path("me.pem")
    options = {"ssl_ca_certs": ca, "ssl_certfile": me}
    check_url(url(1, **options, ssl_keyfile=certificates.path("me.key")))
    with pytest.raises(ConfigError, match="hold no certificate with its key") as refused:
        check_url(url(1, **options, ssl_keyfile=certificates.path("other.key")))
    assert "geheim" not in str(refused.value)


async def test_a_mesh_lives_over_tls_with_a_key_that_a_password_opens(tls, certificates, caplog):
    caplog.set_level("DEBUG")
    proxy = await tls(clients=True)
    own = {
        "ssl_certfile": certificates.path("me.pem"),
        "ssl_keyfile": certificates.lock("me", WORD),
    }
    password = quote(WORD, safe="")
    ca = certificates.path("ca.pem")
    await works(url(proxy.port, ssl_ca_certs=ca, **own, ssl_password=password))
    assert caplog.records
    assert "geheim" not in caplog.text


@pytest.mark.parametrize("password", ["", "wrong"])
def test_a_key_that_its_password_does_not_open_is_one_sentence_and_asks_no_terminal(
    certificates, password
):
    own = {
        "ssl_certfile": certificates.path("me.pem"),
        "ssl_keyfile": certificates.lock("me", WORD),
    }
    given = {"ssl_password": password} if password else {}
    code = f"from pdmesh.registry.address import check_url\ncheck_url({url(1, **own, **given)!r})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # no terminal
        timeout=60,
    )
    assert (
        "no certificate with its key (PEM, and the key's password as ssl_password)" in done.stderr
    )
    assert "pass phrase" not in done.stderr
    assert "geheim" not in done.stderr.partition("ConfigError")[2]


async def test_a_mesh_lives_over_a_unix_socket(servers, tmp_path):
    path = tmp_path / "s"
    servers("a", unixsocket=str(path))
    await works(f"unix://:{PASSWORD}@{path}")


@pytest.fixture(autouse=True)
def _patient_router(monkeypatch):
    monkeypatch.setattr("pdmesh.registry.client._FIRST_SNAPSHOT_S", 60.0)


async def refusal(address: str) -> str:
    """What a worker, a router and a command say instead of beginning; they say the same."""
    said: list[str] = []
    with pytest.raises(ConfigError) as raised:
        await check_store(address)
    said.append(str(raised.value))
    lease = WorkerLease(address, "m", record("decode-0"))
    with pytest.raises(ConfigError) as raised:
        await lease.start()
    said.append(str(raised.value))
    await lease.close()
    view = RegistryView(address, "m")
    with pytest.raises(ConfigError) as raised:
        await view.start()
    said.append(str(raised.value))
    assert len(set(said)) == 1
    assert "geheim" not in said[0]
    return said[0]


async def test_another_authority_is_one_sentence(tls, certificates):
    proxy = await tls()
    said = await refusal(url(proxy.port, ssl_ca_certs=certificates.path("other.pem")))
    assert "shows a certificate that is not trusted (" in said
    assert "give the file of its authority as ssl_ca_certs=FILE in the URL" in said


async def test_a_certificate_of_another_host_is_one_sentence(tls, certificates):
    proxy = await tls("elsewhere")
    said = await refusal(url(proxy.port, ssl_ca_certs=certificates.path("ca.pem")))
    assert "not trusted (IP address mismatch" in said


def alert_at_once(listening: socket.socket, context: ssl.SSLContext) -> None:
    """Refuses every handshake as a server that waits for its alert to be read."""
    while True:
        try:
            peer = listening.accept()[0]
        except OSError:
            return
        secured = context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
        with secured, contextlib.suppress(OSError):
            secured.settimeout(10)
            with contextlib.suppress(ssl.SSLError):
                secured.do_handshake()
            while os.read(secured.fileno(), 4096):
                pass


async def test_a_client_without_the_certificate_that_is_asked_for_is_told_so(certificates):
    context = certificates.context("server", clients=True)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=alert_at_once, args=(listening, context))
        thread.start()
        try:
            port = listening.getsockname()[1]
            said = await refusal(url(port, ssl_ca_certs=certificates.path("ca.pem")))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            await asyncio.to_thread(thread.join)
    assert "refuses the client's certificate, or asks for one (" in said
    assert "give ssl_certfile=FILE and ssl_keyfile=FILE" in said


async def test_in_later_versions_of_tls_that_may_look_like_a_store_that_is_away(tls, certificates):
    proxy = await tls(clients=True)
    with pytest.raises((ConfigError, StoreUnavailable), match="client's certificate"):
        await check_store(url(proxy.port, ssl_ca_certs=certificates.path("ca.pem")))


async def test_a_server_that_answers_without_tls_is_told_from_one_that_is_away():
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        said = await refusal(url(server.sockets[0].getsockname()[1]))
    assert "does not speak TLS" in said
    assert "write redis:// in place of rediss://" in said


async def test_a_server_that_is_silent_is_away_and_tls_is_named(servers):
    server = servers("a")
    address = f"rediss://:{PASSWORD}@127.0.0.1:{server.port}?socket_connect_timeout=0.2"
    with pytest.raises((ConfigError, StoreUnavailable), match="speak TLS"):
        await check_store(address)


@pytest.mark.parametrize("command", [("registry", "inspect"), ("serve", "router")])
async def test_a_command_ends_with_code_2_and_one_sentence_without_the_password(
    tls, certificates, tmp_path, command
):
    proxy, key = await tls(), tmp_path / "key"
    key.write_bytes(b"k" * 32)
    address = url(proxy.port, ssl_ca_certs=certificates.path("other.pem"))
    more = ("--secret-file", str(key), "--port", "0") if command[0] == "serve" else ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pdmesh.launch.cli", *command, "--redis", address, *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    out = (await process.communicate())[0].decode()
    assert process.returncode == 2, out
    assert out.count("pdmesh: ") == 1
    assert "shows a certificate that is not trusted" in out
    assert "Traceback" not in out
    assert "geheim" not in out
