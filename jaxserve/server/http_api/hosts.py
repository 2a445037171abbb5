"""Check for whom a request is meant: a name that points at this machine must not open a server to web pages.

A page of evil.example whose name is then resolved to 127.0.0.1 (DNS rebinding) is of the same origin as a server on the
user's own machine. Its requests still name evil.example as their host.
"""

import functools
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http_api.responses import error_response
from jaxserve.server.settings import ServerConfig, is_loopback

_LOOPBACK = "loopback"
_MAX_HOSTS = 32  # whose answers are kept


class HostCheck:
    """Middleware that refuses requests for hosts that this server is not.

    Args:
        app: The application.
        config: The server's settings.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._allowed: Sequence[str] = [name.strip().lower() for name in config.allowed_hosts or ()]
        if config.allowed_hosts is None:
            is_local = config.uds is None and is_loopback(config.host) and not config.has_keys
            self._allowed = [_LOOPBACK] if is_local else ["*"]
        self._allows = functools.lru_cache(_MAX_HOSTS)(self._is_allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not host or self._allows(host):  # only HTTP/1.0, which no browser speaks, has requests without one
            await self._app(scope, receive, send)
            return
        message = f"the host {host[:100]!r} is not allowed: start the server with --allowed-hosts to allow it"
        if _LOOPBACK in self._allowed:
            message += " (without API keys, a server on a loopback address answers to loopback names alone)"
        await error_response(HTTPException(403, message))(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = _name_of(host)
        for allowed in self._allowed:
            if allowed == "*" or name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:])):
                return True
            if allowed == _LOOPBACK and (name.endswith(".localhost") or is_loopback(name)):
                return True
        return False


def _name_of(host: str) -> str:
    """Return the name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower().rstrip(".") if ":" in host else host.lower().rstrip(".")
