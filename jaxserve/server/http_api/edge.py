"""The outermost layer: request ids in headers, and the access log."""

import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.frontend import new_request_id
from jaxserve.server.http_api.endpoint import CLIENT_GONE, LABEL
from jaxserve.server.settings import ServerConfig

logger = logging.getLogger(__name__)

_LABEL_FORM = re.compile(r"[\x21-\x7e]{1,128}")


class Edge:
    """Wraps the application.

    Args:
        app: The application.
        config: The server's settings.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._config = config
        self._quiet_paths = config.quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        scope["root_path"] = self._config.root_path  # routes are found with and without it
        label = scope[LABEL] = _label(scope)
        begin_s, status = time.monotonic(), 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._config.enable_request_id_headers:
                    named = label or new_request_id("req")
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", named.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            if not self._is_quiet(scope["path"]):
                self._log(scope, 499 if scope.get(CLIENT_GONE) else status, time.monotonic() - begin_s)

    def _is_quiet(self, path: str) -> bool:
        """Whether a path has no line in the log; what a proxy puts in front may be left out of its name."""
        if self._config.disable_access_log:
            return True
        return path in self._quiet_paths or path.removeprefix(self._config.root_path) in self._quiet_paths

    def _log(self, scope: Scope, status: int, duration_s: float) -> None:
        client, label = scope.get("client"), scope[LABEL]
        address = _escaped(f"{client[0]}:{client[1]}") if client else "-"
        path = _escaped(scope["path"][:200])
        labelled = f" label={label}" if label else ""
        logger.info('%s "%s %s" %d %.3fs%s', address, scope["method"], path, status, duration_s, labelled)


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def _label(scope: Scope) -> str | None:
    """The header ``X-Request-Id``, unless it is longer than a name or has what a log line should not."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            written = value.decode("latin-1")
            return written if _LABEL_FORM.fullmatch(written) else None
    return None
