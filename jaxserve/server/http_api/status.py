"""What a server says about itself: models, health, version, load, metrics, and the status page."""

import base64
import collections
import hashlib
import re
from importlib import resources
from typing import Any

from starlette.responses import HTMLResponse, PlainTextResponse, Response

from jaxserve.api.errors import JaxserveError
from jaxserve.api.metric_types import Metric
from jaxserve.server.errors import UnknownModelError
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.generation import VERSION
from jaxserve.server.http_api.responses import json_response
from jaxserve.server.metrics import engine_metrics, info_of, metrics_text, rank_progress, values_of_all, versions
from jaxserve.server.proto.jaxserve.v1 import model_pb2

_NUMBERS = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("prefix_cache_states", "compiles_after_ready", "corrupted_requests"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
"""The engine's metrics that the status page shows, without prefix."""
_MISSES = ":prefix_cache_misses"
_MODEL_FACTS = (
    *("root", "architecture", "dtype", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("device", "layout", "attention_backend"),
)
_CACHE_FACTS = ("num_pages", "page_size", "num_tokens", "size_bytes")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


async def models(call: HttpCall) -> Response:
    """Return all names of the model."""
    return json_response({"object": "list", "data": [_card(call.frontend, name) for name in call.frontend.model_names]})


async def model(call: HttpCall) -> Response:
    """Return the model by one of its names."""
    name = call.request.path_params["model"]
    if not name:
        raise UnknownModelError("The model `` does not exist.")
    return json_response(_card(call.frontend, call.frontend.check_model(name)))


def _card(frontend: Frontend, name: str) -> dict[str, Any]:
    described = frontend.info.model
    rights = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": frontend.created_s,
        **{f"allow_{right}": right in ("sampling", "logprobs", "view") for right in rights},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": frontend.created_s,
        "owned_by": "jaxserve",
        "root": described.root,
        "parent": None,
        "max_model_len": described.max_model_len,
        "permission": [permission],
    }


async def health(call: HttpCall) -> Response:
    """Return 200 while the server should be sent requests, and 503 while it starts, drains or has no engine."""
    return Response(status_code=(await readyz(call)).status_code)


async def readyz(call: HttpCall) -> Response:
    """Return what ``health`` does, and why: whether load balancers should send requests."""
    try:
        call.frontend.check_ready()
    except JaxserveError as error:
        return PlainTextResponse(f"{error}\n", 503)
    return PlainTextResponse("ready\n")


async def livez(call: HttpCall) -> Response:
    """Return 200 unless the process should be restarted: it starts, serves or drains, and its engine moves.

    An engine without progress is ended by the watchdog.
    """
    if call.frontend.is_lost:
        return PlainTextResponse("the engine process has ended\n", 503)
    return PlainTextResponse("alive\n")


async def startupz(call: HttpCall) -> Response:
    """Return 200 once the engine has been ready, and 503 before."""
    if not call.frontend.has_started:
        return PlainTextResponse("the engine is starting\n", 503)
    return PlainTextResponse("started\n")


async def version(call: HttpCall) -> Response:
    """Return the version."""
    del call
    return json_response({"version": VERSION})


async def load(call: HttpCall) -> Response:
    """Return the number of sequences in flight."""
    return json_response({"server_load": call.frontend.ledger.num_in_flight})


async def tokenizer_info(call: HttpCall) -> Response:
    """Return the configuration of the tokenizer, and the chat template in use."""
    with call.frontend.ledger.admit(call.caller):
        return json_response(await call.frontend.engine.tokenizer_info())


async def metrics(call: HttpCall) -> Response:
    """Return metrics in Prometheus' text format."""
    text = await metrics_text(call.frontend)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class StatusPage:
    """``GET /``, the page, and ``GET /status.json``, the numbers that it shows."""

    def __init__(self):
        self._html = resources.files("jaxserve.server.http_api").joinpath("status_page.html").read_text("utf-8")
        policy = content_security_policy(self._html)
        self._headers = {**_HEADERS, "Content-Security-Policy": policy, "Cache-Control": "no-cache"}

    async def html(self, call: HttpCall) -> Response:
        """Return the page."""
        del call
        return HTMLResponse(self._html, headers=self._headers)

    async def numbers(self, call: HttpCall) -> Response:
        """Return the numbers."""
        report = _report(call.frontend, await engine_metrics(call.frontend))
        return json_response(report, headers={**_HEADERS, "Cache-Control": "no-store"})


def content_security_policy(page: str) -> str:
    """Return the policy that allows a page's own style and script, and connections to its origin; nothing else."""
    allowed: dict[str, str] = {}
    for kind in ("script", "style"):
        contents = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents)
        allowed[kind] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _report(frontend: Frontend, engine: list[Metric] | None) -> dict[str, Any]:
    """Return what ``/status.json`` has; ``engine`` is None if the engine does not respond."""
    info, counts = info_of(frontend), frontend.log.counts
    values = values_of_all(engine or ())
    state = "down" if engine is None else "ready" if frontend.ledger.is_open else "busy"
    misses = collections.Counter[str]()
    for metric in engine or ():
        if metric.name.endswith(_MISSES):
            misses[metric.labels["reason"]] += int(metric.value)
    return {
        "state": state,
        "uptime_s": round(frontend.uptime_s, 3),
        "model_names": list(frontend.model_names),
        "model": None if info is None else _facts(info.model),
        "groups_up": list(frontend.engine.groups_up),
        "ranks": [each._asdict() for each in rank_progress(engine or ())],
        "has_chat": info is not None and info.has_chat_template,
        "engine": {name: values[name] for name in _NUMBERS if name in values} if engine else None,
        "prefix_cache_misses": misses if engine else None,
        "requests": {
            "started": counts.started,
            "in_flight": counts.in_flight,
            "refused": frontend.ledger.num_refused,
            "bytes": frontend.ledger.memory.num_bytes,
            "max_bytes": frontend.ledger.memory.limit_bytes,
            "outcomes": dict(counts.finished),
        },
        "versions": dict(versions()),
    }


def _facts(model: model_pb2.Model) -> dict[str, Any]:
    return {
        **{name: getattr(model, name) for name in _MODEL_FACTS},
        "mesh": [{"name": axis.name, "size": axis.size} for axis in model.mesh],
        "kv_cache": {name: getattr(model.kv_cache, name) for name in _CACHE_FACTS},
        "memory": [{"name": part.name, "size_bytes": part.size_bytes} for part in model.memory],
    }
