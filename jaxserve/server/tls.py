"""TLS: credentials of the gRPC listeners and the context of HTTP's, both from the same files.

With ``enable_ssl_refresh`` new connections get what the files hold then. Files that do not fit together, as between
the writing of the key and that of the certificate, are left alone until they do. Authorities of clients' certificates
are only ever added to HTTP's context: for one that shall not count any more the server must be started again.
"""

import asyncio
import logging
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc

from jaxserve.errors import ConfigError
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""How often HTTP's files are looked at."""
_VERIFY_MODES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


def make_ssl_context(config: ServerConfig) -> ssl.SSLContext:
    """The context of the HTTP server: TLS 1.2 and later, clients' certificates by ``ssl_cert_reqs``.

    Raises:
        ConfigError: Files that are no key and certificate of each other, or a key that needs a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = _VERIFY_MODES[config.ssl_cert_reqs]
    try:
        _load(config, context)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ssl_certfile, ssl_keyfile, ssl_ca_certs: these files cannot be used: {error}") from error
    return context


async def watch_files(config: ServerConfig, context: ssl.SSLContext, interval_s: float = POLL_INTERVAL_S) -> None:
    """Loads the files into a context each time that they change; for ever, or not at all without refresh.

    Args:
        config: Names the files.
        context: From ``make_ssl_context``.
        interval_s: Seconds between looks.
    """
    if not config.enable_ssl_refresh:
        return
    loaded = _state(config)
    while True:
        await asyncio.sleep(interval_s)
        seen = _state(config)
        if seen == loaded:
            continue
        try:
            make_ssl_context(config)
            _load(config, context)
        except (OSError, ValueError) as error:
            logger.warning("the changed TLS files are not used: %s", error)
        else:
            loaded = seen
            logger.info("the changed TLS files are used from now on")


def make_grpc_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """The credentials of a gRPC listener.

    gRPC knows no certificates that clients may have but need not: with ``ssl_cert_reqs`` 1 it does not ask for any.

    Raises:
        ConfigError: As ``make_ssl_context``.
    """
    make_ssl_context(config)
    needs_client = config.ssl_cert_reqs == 2
    if config.enable_ssl_refresh:
        fetcher: Any = _Refresher(config).changed_configuration
        return grpc.dynamic_ssl_server_credentials(_configuration(config), fetcher, needs_client)
    pair, authorities = _read(config)
    return grpc.ssl_server_credentials([pair], authorities, needs_client)


class _Refresher:
    """Knows which state of the files gRPC has; asked from gRPC's own threads, once for each new connection."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._state = _state(config)
        self._lock = threading.Lock()

    def changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold where they have changed and fit together; else None."""
        with self._lock:
            seen = _state(self._config)
            if seen == self._state:
                return None
            try:
                make_ssl_context(self._config)
                changed = _configuration(self._config)
            except (OSError, ValueError) as error:
                logger.warning("the changed TLS files are not used: %s", error)
                return None
            self._state = seen
            logger.info("the changed TLS files are used from now on")
            return changed


def _configuration(config: ServerConfig) -> grpc.ServerCertificateConfiguration:
    pair, authorities = _read(config)
    return grpc.ssl_server_certificate_configuration([pair], authorities)


def _read(config: ServerConfig) -> tuple[tuple[bytes, bytes], bytes | None]:
    """Key and certificate, and the certificates of clients' authorities."""
    key, certificate = _paths(config)
    authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return (key.read_bytes(), certificate.read_bytes()), authorities


def _load(config: ServerConfig, context: ssl.SSLContext) -> None:
    key, certificate = _paths(config)
    context.load_cert_chain(certificate, key, password=_no_password)
    if config.ssl_ca_certs is not None:
        context.load_verify_locations(config.ssl_ca_certs)


def _no_password() -> str:
    raise ValueError("the key needs a password; expected one without")


def _paths(config: ServerConfig) -> tuple[Path, Path]:
    assert config.ssl_keyfile is not None and config.ssl_certfile is not None
    return Path(config.ssl_keyfile), Path(config.ssl_certfile)


def _state(config: ServerConfig) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file is written or replaced; None for a file that is not there."""
    names = (config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)
    return tuple(_file_state(Path(name)) for name in names if name is not None)


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
