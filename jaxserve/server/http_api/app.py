"""The OpenAI-compatible HTTP API as an ASGI application: routes, request ids, cross-origin rules and the access log."""

import logging
import re
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.log_output import begin_log_fields
from jaxserve.server.frontend import Frontend, new_request_id
from jaxserve.server.http_api import status
from jaxserve.server.http_api.chat import chat_completions
from jaxserve.server.http_api.completions import completions
from jaxserve.server.http_api.embeddings import embeddings
from jaxserve.server.http_api.endpoint import DISCONNECTED, LABEL, STATUS, Endpoint, Handler, HttpCall
from jaxserve.server.http_api.hosts import HostCheck
from jaxserve.server.http_api.responses import error_response
from jaxserve.server.http_api.tokenization import detokenize, tokenize

logger = logging.getLogger(__name__)

_ANY_KEY = ""
_LABEL_FORM = re.compile(r"[\x21-\x7e]{1,128}")
_POSTS: tuple[tuple[str, Handler], ...] = (
    ("/v1/completions", completions),
    ("/v1/chat/completions", chat_completions),
    ("/v1/embeddings", embeddings),
    ("/tokenize", tokenize),
    ("/detokenize", detokenize),
)


def make_app(frontend: Frontend) -> Starlette:
    """Make the application of a front end. Every route is an ``Endpoint``, which names the scope that a key needs."""
    config = frontend.config
    gets: list[tuple[str, Handler, str | None]] = [
        ("/v1/models", status.models, "generate"),
        ("/v1/models/{model:path}", status.model, "generate"),
        ("/metrics", status.metrics, "metrics"),
        ("/health", status.health, None),
        ("/ping", status.health, None),
        ("/livez", status.livez, None),
        ("/readyz", status.readyz, None),
        ("/startupz", status.startupz, None),
        ("/version", status.version, None),
    ]
    if config.enable_server_load_tracking:
        gets.append(("/load", status.load, "metrics"))
    if config.enable_tokenizer_info_endpoint:
        gets.append(("/tokenizer_info", status.tokenizer_info, "generate"))
    if not config.disable_status_page:
        page = status.StatusPage()
        gets += [("/", page.html, None), ("/status.json", page.numbers, "metrics")]
    routes = [Route(path, Endpoint(frontend, handler, scope), methods=["GET"]) for path, handler, scope in gets]
    for path, handler in _POSTS:
        routes.append(Route(path, Endpoint(frontend, handler, "generate", has_body=True), methods=["POST"]))

    middleware = [Middleware(RequestLabels, frontend=frontend), Middleware(HostCheck, config=config)]
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods or ("*",),
                allow_headers=config.allowed_headers or ("*",),
                allow_credentials=config.allow_credentials,
                expose_headers=("X-Request-Id", "X-Jaxserve-Unknown-Fields", "Retry-After"),
            )
        )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.default = Endpoint(frontend, _not_found, _ANY_KEY)
    app.router.redirect_slashes = False
    return app


async def _not_found(call: HttpCall) -> Response:
    raise HTTPException(404, f"unknown path {call.request.url.path[:200]!r}")


async def _http_error(request: Request, error: Exception) -> Response:
    return error_response(error)


class RequestLabels:
    """The outermost middleware: request ids in headers, and the access log.

    Args:
        app: The application.
        frontend: The front end.
    """

    def __init__(self, app: ASGIApp, frontend: Frontend):
        self._app = app
        self._frontend = frontend
        self._config = frontend.config
        self._quiet_paths = frontend.config.quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it once it has ended."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        scope["root_path"] = self._config.root_path  # routes are found with and without it
        written = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        label = scope[LABEL] = written if _LABEL_FORM.fullmatch(written) else None
        begin_s = time.monotonic()
        begin_log_fields()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                if self._frontend.is_draining:  # so that the client connects again, to another server
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                if self._config.enable_request_id_headers:
                    request_id = label or new_request_id("req")
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            path = scope["path"]  # a proxy may have removed the root path
            is_quiet = path in self._quiet_paths or path.removeprefix(self._config.root_path) in self._quiet_paths
            if not (is_quiet or self._config.disable_access_log):
                code = 499 if scope.get(DISCONNECTED) else scope.get(STATUS, 0)
                self._log(scope, code, time.monotonic() - begin_s)

    def _log(self, scope: Scope, status_code: int, duration_s: float) -> None:
        client = scope.get("client")
        address = _escaped(f"{client[0]}:{client[1]}") if client else "-"
        label = f" label={scope[LABEL]}" if scope[LABEL] else ""
        path = _escaped(scope["path"][:200])
        logger.info('%s "%s %s" %d %.3fs%s', address, scope["method"], path, status_code, duration_s, label)


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")
