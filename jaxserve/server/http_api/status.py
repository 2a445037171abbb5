"""The page at ``/`` that shows what a server runs and how busy it is, and the numbers that it shows."""

import asyncio
import base64
import hashlib
import re
import time
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.metric_types import Metric
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.replies import error_reply
from jaxserve.server.metrics import engine_metrics, model_of, versions
from jaxserve.server.proto.jaxserve.v1 import model_pb2

_PAGE = "status_page.html"
_NUMBERS = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("compiles_after_ready", "corrupted_requests"),
)
"""The engine's metrics that the page shows, without prefix."""
_TEMPLATE_LIMIT_S = 5.0
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def status_routes(frontend: Frontend) -> list[Route]:
    """``GET /`` is the page, ``GET /status.json`` what it shows; the latter needs the scope ``metrics``."""
    page = resources.files("jaxserve.server.http_api").joinpath(_PAGE).read_text("utf-8")
    headers = {**_HEADERS, "Content-Security-Policy": content_security_policy(page), "Cache-Control": "no-cache"}
    chat = _ChatTemplate(frontend)

    async def show_page(request: Request) -> Response:
        del request
        return HTMLResponse(page, headers=headers)

    async def show_numbers(request: Request) -> Response:
        try:
            frontend.authenticator.caller(request.headers.get("authorization")).check_scope("metrics")
        except JaxserveError as error:
            return error_reply(error)
        report = status_report(frontend, await engine_metrics(frontend))
        report["has_chat"] = await chat.is_there()
        return JSONResponse(report, headers={**_HEADERS, "Cache-Control": "no-store"})

    return [Route("/", show_page, methods=["GET"]), Route("/status.json", show_numbers, methods=["GET"])]


def content_security_policy(page: str) -> str:
    """The policy that lets a page's own style and script run, and connect to where it came from; nothing else."""
    allowed = {kind: _hashes(page, kind) for kind in ("script", "style")}
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def status_report(frontend: Frontend, engine: list[Metric] | None) -> dict[str, Any]:
    """What ``/status.json`` says, but for ``has_chat``.

    Args:
        frontend: The server's.
        engine: The engine's metrics; None where it does not answer.
    """
    model, counts = model_of(frontend), frontend.log.counts
    values = {metric.name.partition(":")[2]: metric.value for metric in engine or () if not metric.labels}
    return {
        "state": _state(frontend, is_engine_up=engine is not None),
        "uptime_s": round(time.time() - frontend.created_s, 3),
        "model_names": list(frontend.model_names),
        "model": None if model is None else _facts(model),
        "engine": {name: values[name] for name in _NUMBERS if name in values} if engine else None,
        "requests": {
            "started": counts.started,
            "in_flight": counts.in_flight,
            "refused": frontend.limits.num_refused,
            "outcomes": dict(counts.finished),
        },
        "versions": dict(versions()),
    }


class _ChatTemplate:
    """Whether the model has one: asked for once."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self._is_there: bool | None = None

    async def is_there(self) -> bool:
        if self._is_there is None:
            try:
                async with asyncio.timeout(_TEMPLATE_LIMIT_S):
                    await self._frontend.engine.render_chat({"messages": [{"role": "user", "content": "?"}]})
                self._is_there = True
            except RequestError:
                self._is_there = False
            except (JaxserveError, TimeoutError):
                return False  # the engine cannot be asked now
        return self._is_there


def _state(frontend: Frontend, *, is_engine_up: bool) -> str:
    if frontend.limits.is_open:
        return "ready" if is_engine_up else "down"
    return "busy" if is_engine_up else "down"


def _facts(model: model_pb2.Model) -> dict[str, Any]:
    cache = model.kv_cache
    return {
        "root": model.root,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        "device": model.device,
        "mesh": [{"name": axis.name, "size": axis.size} for axis in model.mesh],
        "layout": model.layout,
        "attention_backend": model.attention_backend,
        "kv_cache": {
            "num_pages": cache.num_pages,
            "page_size": cache.page_size,
            "num_tokens": cache.num_tokens,
            "size_bytes": cache.size_bytes,
        },
        "memory": [{"name": part.name, "size_bytes": part.size_bytes} for part in model.memory],
    }


def _hashes(page: str, kind: str) -> str:
    """The contents of a page's elements of a kind, as a policy names them."""
    found = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
