"""The OpenAI-compatible HTTP server as an ASGI application."""

from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.chat import chat_completions
from jaxserve.server.http_api.completions import completions
from jaxserve.server.http_api.edge import Edge
from jaxserve.server.http_api.embeddings import embeddings
from jaxserve.server.http_api.endpoint import Call, Endpoint, Handler
from jaxserve.server.http_api.replies import HttpError, error_reply
from jaxserve.server.http_api.service import health, load, metrics, model, models, tokenizer_info, version
from jaxserve.server.http_api.status import status_routes
from jaxserve.server.http_api.tokenization import detokenize, tokenize
from jaxserve.server.settings import ServerConfig

_ANY_KEY = ""
_POSTS: tuple[tuple[str, Handler], ...] = (
    ("/v1/completions", completions),
    ("/v1/chat/completions", chat_completions),
    ("/v1/embeddings", embeddings),
    ("/tokenize", tokenize),
    ("/detokenize", detokenize),
)
_GETS: tuple[tuple[str, Handler, str | None], ...] = (
    ("/v1/models", models, "generate"),
    ("/v1/models/{model:path}", model, "generate"),
    ("/metrics", metrics, "metrics"),
    ("/health", health, None),
    ("/ping", health, None),
    ("/version", version, None),
)


def make_app(frontend: Frontend) -> Starlette:
    """The application of a front end.

    A route can only be one with a scope that its callers' keys need, or be one of the few that say they need none.
    """
    config = frontend.config
    routes = [
        Route(path, Endpoint(frontend, handler, "generate", has_body=True), methods=["POST"])
        for path, handler in _POSTS
    ]
    routes += [Route(path, Endpoint(frontend, handler, scope), methods=["GET"]) for path, handler, scope in _GETS]
    if config.enable_server_load_tracking:
        routes.append(Route("/load", Endpoint(frontend, load, "metrics"), methods=["GET"]))
    if config.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", Endpoint(frontend, tokenizer_info, "generate"), methods=["GET"]))
    if not config.disable_status_page:
        routes += [_guarded(frontend, route) for route in status_routes(frontend)]
    app = Starlette(
        routes=routes,
        middleware=_middleware(config),
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.default = Endpoint(frontend, _not_found, _ANY_KEY)
    app.router.redirect_slashes = False
    return app


def _middleware(config: ServerConfig) -> list[Middleware]:
    found = [Middleware(Edge, config=config)]
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods or ("*",),
                allow_headers=config.allowed_headers or ("*",),
                allow_credentials=config.allow_credentials,
                expose_headers=("X-Request-Id", "X-Jaxserve-Unknown-Fields", "Retry-After"),
            )
        )
    return found


def _guarded(frontend: Frontend, route: Route) -> Route:
    """A route of the status page: the page is for everybody, what else there is for those who may see metrics."""

    async def answer(call: Call) -> Response:
        return cast("Response", await route.endpoint(call.request))

    scope = None if route.path == "/" else "metrics"
    return Route(route.path, Endpoint(frontend, answer, scope), methods=list(route.methods or ["GET"]))


async def _not_found(call: Call) -> Response:
    raise HttpError(404, "NotFoundError", "there is nothing at this path")


async def _http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    kind = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(error.status_code, "BadRequestError")
    return error_reply(HttpError(error.status_code, kind, str(error.detail), error.headers or {}))
