"""What a Redis URL may say, and tickers."""

import contextlib

import pytest
from redis.asyncio.connection import SSLConnection

from pdmesh.registry.address import check_url, parse_address, redacted
from pdmesh.registry.layout import Layout, bits_for
from pdmesh.registry.store import Store
from pdmesh.registry.ticker import Ticker
from pdmesh.wire.errors import ConfigError


def test_credentials_database_and_timeouts_are_those_of_redis_py():
    address = parse_address("redis://user:word@host:7000/3?socket_timeout=0.5")
    options = address.options
    assert (options["host"], options["port"], options["db"]) == ("host", 7000, 3)
    assert (options["username"], options["password"]) == ("user", "word")
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.5, 2.0)
    assert "word" not in address.where


def test_tls_and_its_options_go_through():
    options = parse_address("rediss://host?ssl_cert_reqs=none&ssl_check_hostname=false").options
    assert options["connection_class"] is SSLConnection
    assert options["ssl_cert_reqs"] == "none"


def test_a_file_that_holds_no_certificate_is_known_before_anything_connects(tmp_path):
    file = tmp_path / "file.pem"
    file.write_text("nothing of the kind")
    for options, reason in (
        (f"ssl_ca_certs={file}", f"ssl_ca_certs: {file} holds no certificate"),
        (f"ssl_certfile={file}", f"ssl_certfile: {file} holds no certificate with its key"),
        (
            f"ssl_certfile={file}&ssl_keyfile={file}",
            f"ssl_certfile: {file} and {file} hold no certificate with its key",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_url(f"rediss://host?{options}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("rediss://h?ssl_ca_certs=/no/ca.pem", "ssl_ca_certs: the file /no/ca.pem cannot be read"),
        ("rediss://h?ssl_keyfile=/no/key", "ssl_keyfile: the file /no/key cannot be read"),
        ("rediss://h?ssl_cert_reqs=perhaps", "Invalid SSL Certificate Requirements Flag: perhaps"),
        ("redis://h?ssl_ca_certs=/ca.pem", "no option ssl_ca_certs without TLS, which is rediss"),
        ("redis://h?sockettimeout=1", r"\(no option sockettimeout\)"),
        ("redis://h1:7000,h2:7000", "give redis://host:port"),
    ],
)
def test_a_wrong_option_is_known_before_anything_connects(url, reason):
    with pytest.raises(ConfigError, match=reason):
        check_url(url)


@pytest.mark.parametrize("scheme", ["redis+sentinel", "rediss+sentinel", "sentinel"])
def test_sentinel_is_refused_by_name_and_something_else_is_named(scheme):
    with pytest.raises(ConfigError, match="Sentinel, which is not supported; give an") as raised:
        check_url(f"{scheme}://user:word@h:26379/mesh")
    assert "word" not in str(raised.value)


def test_a_cluster_is_asked_for_and_gets_more_partitions():
    plain, cluster = parse_address("redis://h"), parse_address("redis://h?cluster=true")
    assert not plain.cluster
    assert plain.layout.partitions == 16
    assert cluster.cluster
    assert cluster.layout.partitions == 256


def test_every_node_of_a_cluster_gets_the_tls_and_the_credentials_of_the_url():
    url = "rediss://user:word@h:7000?cluster=true&ssl_cert_reqs=none&ssl_check_hostname=false"
    address = parse_address(url)
    assert address.endpoint == ("h", 7000)
    pool = address.client(("other", 7001)).connection_pool
    assert issubclass(pool.connection_class, SSLConnection)
    assert pool.connection_kwargs["username"] == "user"
    assert (pool.connection_kwargs["host"], pool.connection_kwargs["port"]) == ("other", 7001)


def test_partitions_and_pages_lay_a_new_mesh_out():
    address = parse_address("redis://h?partitions=64&pages=100000000&socket_timeout=1")
    assert address.layout == Layout(64, bits_for(100_000_000))
    assert 16 <= 100_000_000 / 2**address.layout.bits <= 48
    assert address.options["socket_timeout"] == 1.0
    assert Layout.named(address.layout.name.encode()) == address.layout


@pytest.mark.parametrize(
    "query", ["cluster=perhaps", "partitions=3", "partitions=x", "pages=y", "partitions=0"]
)
def test_a_wrong_option_is_one_sentence(query):
    with pytest.raises(ConfigError, match=r"not understood|power of two"):
        check_url(f"redis://:word@h?{query}")


def test_a_cluster_with_a_database_is_refused():
    with pytest.raises(ConfigError, match="database 0"):
        check_url("redis://h/3?cluster=true")


def test_a_cluster_by_unix_socket_is_refused():
    with pytest.raises(ConfigError, match="unix"):
        check_url("unix:///run/x?cluster=true")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:word@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:word@h", "redis://:***@h"),
        ("redis://u:pass/word@w@h:1", "redis://u:***@h:1"),
        ("unix://u:word@/run/x?db=1", "unix://u:***@/run/x?db=1"),
        ("redis://h?db=1&password=word&cluster=true", "redis://h?db=1&password=***&cluster=true"),
        ("rediss://h?ssl_password=word", "rediss://h?ssl_password=***"),
        ("redis://h:1/0", "redis://h:1/0"),
    ],
)
def test_a_password_is_taken_out_of_what_is_shown(url, shown):
    assert redacted(url) == shown


@pytest.mark.parametrize("word", ["ab/cd", "ab?cd", "ab#cd", "ab@cd:ef/gh"])
def test_a_password_that_is_not_encoded_is_not_shown_either(word):
    with contextlib.suppress(ConfigError):
        assert "cd" not in parse_address(f"redis://u:{word}@h:1/0").where
    with pytest.raises(ConfigError) as raised:
        check_url(f"redis://u:{word}@h:1/0?partitions=x")
    assert "ab" not in str(raised.value)
    assert "cd" not in str(raised.value)


async def test_a_single_server_that_is_no_cluster_is_told_so(tmp_path):
    from store_rig import Server

    server = Server(tmp_path / "a").start()
    store = Store(f"{server.url}?cluster=true", "m")
    try:
        with pytest.raises(ConfigError, match="leave cluster=true out"):
            await store.roster()
    finally:
        await store.close()
        server.kill()


async def test_a_cluster_without_the_option_is_told_so(tmp_path):
    from store_rig import Server, free_port

    port = str(free_port())
    server = Server(tmp_path / "a", cluster_enabled="yes", cluster_port=port).start()
    server.do("CONFIG", "SET", "cluster-require-full-coverage", "no")
    store = Store(server.url, "m")
    try:
        with pytest.raises(ConfigError, match="add cluster=true"):
            await store.roster()
    finally:
        await store.close()
        server.kill()


def test_a_ticker_is_due_after_its_period_and_once():
    ticker = Ticker(10.0, now=100.0)
    assert ticker.left(104.0) == 6.0
    assert ticker.left(110.0) == 0.0
    ticker.hit(111.0)
    assert ticker.left(112.0) == 9.0


@pytest.mark.parametrize("step", [120.0, -120.0])
def test_a_clock_that_jumps_brings_a_turn_early_and_none_late(step):
    ticker = Ticker(10.0, now=1000.0)
    assert ticker.left(1001.0) == 9.0
    assert ticker.left(1001.0 + step) == 0.0
    ticker.hit(1001.0 + step)
    assert ticker.left(1001.0 + step) == 10.0
    assert ticker.left(1002.0 + step) == 9.0
