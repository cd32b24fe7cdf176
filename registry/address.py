"""What a Redis URL says: the client it makes, and this project's own options in it.

The URL is redis-py's (``redis://user:password@host:port/db``, ``rediss://`` with ``ssl_*`` options,
``unix://``, timeouts as options), and ``cluster=true`` for a Redis Cluster, ``partitions=N`` for
the number of partitions and ``pages=N`` for how many pages a new mesh is laid out.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdmesh.registry.layout import PAGES, Layout, bits_for
from pdmesh.wire.errors import ConfigError

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 3.0
PARTITIONS = 16
CLUSTER_PARTITIONS = 256
_OWN = ("cluster", "partitions", "pages")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_ALERT = re.compile("CERTIFICATE_REQUIRED|ALERT_UNKNOWN_CA|ALERT_BAD_CERTIFICATE|HANDSHAKE_FAILURE")
_NO_TLS = re.compile("WRONG_VERSION_NUMBER|PACKET_LENGTH_TOO_LONG|RECORD_LAYER_FAILURE")
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


def redacted(url: str) -> str:
    """``url`` without its passwords, for messages and logs; they may be encoded wrongly."""
    url = re.sub(r"([?&](?:ssl_)?password=)[^&]*", r"\1***", url)
    return re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url)


@dataclass(frozen=True)
class Address:
    """A URL, understood.

    ``options`` are those of a redis-py connection.
    """

    where: str
    cluster: bool
    layout: Layout
    options: dict[str, Any]

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        return self.options.get("host", "localhost"), self.options.get("port", 6379)

    def client(self, endpoint: tuple[str, int] | None = None) -> Any:
        """A client of the server, or of another node of its cluster; connects when first used.

        A call is tried once: who calls knows better when to try again.
        """
        options = dict(self.options)
        if endpoint is not None:
            options["host"], options["port"] = endpoint
        pool = ConnectionPool(**options, retry=Retry(NoBackoff(), 0))
        return redis.asyncio.Redis(connection_pool=pool)


def parse_address(url: str) -> Address:
    """Reads a Redis URL; connects to nothing.

    Raises:
        ConfigError: it is not understood.
    """
    if "sentinel" in url.partition("://")[0].lower():
        raise ConfigError(
            f"Redis URL {redacted(url)!r} is one of Sentinel, which is not supported; give an "
            "address that leads to the primary (a proxy, or a name that moves with it), or a "
            "Redis Cluster"
        )
    try:
        plain, own = _own_options(url)
        options: dict[str, Any] = dict(parse_url(plain))
        cluster = _flag(own.get("cluster", "false"))
        count = int(own.get("partitions", CLUSTER_PARTITIONS if cluster else PARTITIONS))
        layout = Layout(count, bits_for(int(own.get("pages", PAGES))))
        if urlsplit(url).scheme != "unix":
            options.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
            options.setdefault("socket_keepalive", True)
        elif cluster:
            raise ValueError("a cluster has no unix:// address")
        if cluster and options.get("db"):
            raise ValueError("a cluster has database 0 alone")
        options.setdefault("socket_timeout", ANSWER_TIMEOUT_S)
        options |= {"decode_responses": False, "protocol": 2}
        ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]
        _check_files(options)
        return Address(redacted(url), cluster, layout, options)
    except ConfigError:
        raise
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigError(
            f"Redis URL {redacted(url)!r} is not understood ({_reason(url, error)}); give "
            "redis://host:port, rediss://host:port or unix:///path, with user:password@ if needed, "
            "and ?cluster=true for a Redis Cluster"
        ) from error


def check_url(url: str) -> None:
    """Raises ConfigError unless ``url`` is a Redis URL; connects to nothing."""
    parse_address(url)


def _check_files(options: Mapping[str, Any]) -> None:
    """Certificates and keys have to be there from the start, or every connection would fail."""
    for name in _FILES:
        path = options.get(name)
        if path and not os.access(path, os.R_OK):
            raise ValueError(f"{name}: the file {path} cannot be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority, own = options.get("ssl_ca_certs"), options.get("ssl_certfile")
    if authority:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            raise ValueError(f"ssl_ca_certs: {authority} holds no certificate (PEM)") from None
    if own:
        key = options.get("ssl_keyfile")
        try:  # without a password OpenSSL would ask the terminal for one
            context.load_cert_chain(own, key, options.get("ssl_password") or "")
        except ssl.SSLError:
            where = f"{own} and {key} hold" if key else f"{own} holds"
            raise ValueError(
                f"ssl_certfile: {where} no certificate with its key (PEM, and the key's password "
                "as ssl_password)"
            ) from None


def _reason(url: str, error: Exception) -> str:
    """What is wrong with a URL, without any of its password."""
    text = str(error)
    if "@" in url and "Port could not" in text:
        return "in a password /, ?, # and @ are written %2F, %3F, %23 and %40"
    if found := re.search(r"unexpected keyword argument '(\w+)'", text):
        tls = found[1].startswith("ssl_") and not url.startswith("rediss://")
        return f"no option {found[1]}" + (" without TLS, which is rediss://" if tls else "")
    return text


def tls_refusal(error: BaseException) -> str:
    """Why TLS will never be agreed on with this URL, as the end of a sentence; empty if it may."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    text = str(cause or error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that is not trusted ({cause.verify_message}); give the file of "
            "its authority as ssl_ca_certs=FILE in the URL, or the name that the certificate has"
        )
    if _ALERT.search(text):
        return (
            f"refuses the client's certificate, or asks for one ({text}); give ssl_certfile=FILE "
            "and ssl_keyfile=FILE in the URL, of an authority that it trusts"
        )
    if _NO_TLS.search(text):
        return f"does not speak TLS ({text}); write redis:// in place of rediss://"
    return ""


def _own_options(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    own = {name: value for name, value in query if name in _OWN}
    rest = [(name, value) for name, value in query if name not in own]
    return urlunsplit(parts._replace(query=urlencode(rest))) if own else url, own


def _flag(value: str) -> bool:
    if value.lower() not in _YES + _NO:
        raise ValueError(f"cluster={value!r}: give true or false")
    return value.lower() in _YES
