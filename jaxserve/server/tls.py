"""TLS: the gRPC listeners' credentials and the HTTP listener's context, both from the same files.

With ``enable_ssl_refresh`` new connections use the files' current contents. Files that do not fit together, as between
the writing of the key and that of the certificate, are ignored until they do. Clients' certificates are then verified
against the current authorities and revocation lists alone; connections that are open stay.
"""

import asyncio
import functools
import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from jaxserve.api.errors import ConfigError
from jaxserve.server.audit import audit
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

POLL_INTERVAL_S = 2.0
_VERIFY_MODES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


def make_ssl_context(config: ServerConfig) -> ssl.SSLContext:
    """Return the context of the HTTP server: TLS 1.2 and later, clients' certificates as ``ssl_cert_reqs`` says.

    A session that is resumed skips the client's certificate, so that there is none where these are verified: with a
    revocation list TLS 1.3 is the least, as OpenSSL keeps sessions of TLS 1.2 by itself.

    Raises:
        ConfigError: The key does not match the certificate, or is password-protected, or a file has something else.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if config.ssl_crl_file is None else ssl.TLSVersion.TLSv1_3
    if config.ssl_cert_reqs:
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = _VERIFY_MODES[config.ssl_cert_reqs]
    try:
        _load(config, context)
    except (OSError, ValueError) as error:
        names = "ssl_certfile, ssl_keyfile, ssl_ca_certs" + ("" if config.ssl_crl_file is None else ", ssl_crl_file")
        raise ConfigError(f"{names}: these files cannot be used: {error}") from error
    return context


async def watch_files(config: ServerConfig, context: ssl.SSLContext, interval_s: float = POLL_INTERVAL_S) -> None:
    """Let connections of a context from ``make_ssl_context`` use the files as they are; return at once without refresh.

    A context can learn authorities, but not forget them: each connection is handed to the newest context, by the
    function that TLS calls at its beginning, whether the client names a server or not.
    """
    files = _Files(config)
    while config.enable_ssl_refresh:
        await asyncio.sleep(interval_s)
        newest = files.load_changed(lambda: make_ssl_context(config))
        if newest is not None:
            context.sni_callback = functools.partial(_hand_over, newest)


def _hand_over(
    newest: ssl.SSLContext, connection: ssl.SSLObject, server_name: str | None, first: ssl.SSLContext
) -> None:
    del server_name, first
    connection.context = newest


def make_grpc_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC listener.

    gRPC has no optional client certificates: with ``ssl_cert_reqs`` 1 it does not ask for any.

    Raises:
        ConfigError: As ``make_ssl_context``.
    """
    make_ssl_context(config)
    needs_client = config.ssl_cert_reqs == 2
    if not config.enable_ssl_refresh:
        pair, authorities = _read(config)
        return grpc.ssl_server_credentials([pair], authorities, needs_client)
    files = _Files(config)

    def read_configuration() -> grpc.ServerCertificateConfiguration:
        pair, authorities = _read(config)
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    fetcher: Any = functools.partial(files.load_changed, read_configuration)
    return grpc.dynamic_ssl_server_credentials(read_configuration(), fetcher, needs_client)


class _Files:
    """Notices changes of the files; gRPC asks from its own threads, for each new connection."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._state = _state(config)
        self._lock = threading.Lock()

    def load_changed(self, load: Callable[[], Loaded]) -> Loaded | None:
        """Return what ``load`` gives if the files have changed since the last time and fit together, else None."""
        with self._lock:
            seen = _state(self._config)
            if seen == self._state:
                return None
            try:
                make_ssl_context(self._config)
                loaded = load()
            except (OSError, ValueError) as error:
                audit("server", "reload of certificates", "-", str(error))
                logger.warning("the changed TLS files are not used: %s", error)
                return None
            self._state = seen
            audit("server", "reload of certificates", "-", "ok")
            logger.info("the changed TLS files are used from now on")
            return loaded


def _read(config: ServerConfig) -> tuple[tuple[bytes, bytes], bytes | None]:
    """Return key and certificate, and the certificates of clients' authorities."""
    assert config.ssl_keyfile is not None and config.ssl_certfile is not None
    authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return (Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes()), authorities


def _load(config: ServerConfig, context: ssl.SSLContext) -> None:
    assert config.ssl_keyfile is not None and config.ssl_certfile is not None
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)
    if config.ssl_crl_file is not None:
        before = context.cert_store_stats()
        context.load_verify_locations(config.ssl_crl_file)
        after = context.cert_store_stats()
        if after["crl"] == before["crl"] or after["x509"] != before["x509"]:  # a certificate here would be trusted
            raise ValueError(f"{config.ssl_crl_file}: expected certificate revocation lists (PEM) and nothing else")
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _no_password() -> str:
    raise ValueError("the key needs a password; expected one without")


def _state(config: ServerConfig) -> list[tuple[int, int, int] | None]:
    """Return what changes when a file is written or replaced; None for a missing file."""
    found: list[tuple[int, int, int] | None] = []
    for name in (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs, config.ssl_crl_file):
        try:
            stat = None if name is None else Path(name).stat()
        except OSError:
            stat = None
        found.append(None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found
