"""What a server says of itself: models, tokenizer, health, version, load, metrics."""

from typing import Any

from starlette.responses import Response

from jaxserve.errors import JaxserveError
from jaxserve.server.errors import UnknownModelError
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.answer_parts import VERSION
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.replies import json_reply
from jaxserve.server.metrics import metrics_text


async def models(call: Call) -> Response:
    """All names of the model."""
    return json_reply({"object": "list", "data": [_card(call.frontend, name) for name in call.frontend.model_names]})


async def model(call: Call) -> Response:
    """The model, by one of its names."""
    name = call.request.path_params["model"]
    if not name:
        raise UnknownModelError("The model `` does not exist.")
    return json_reply(_card(call.frontend, call.frontend.check_model(name)))


def _card(frontend: Frontend, name: str) -> dict[str, Any]:
    described = frontend.info.model
    allowed = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": frontend.created_s,
        **{f"allow_{what}": what in ("sampling", "logprobs", "view") for what in allowed},
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


async def health(call: Call) -> Response:
    """200 where the server takes requests, 503 where it starts, drains, or its engine is gone."""
    try:
        call.frontend.limits.check_open()
        _ = call.frontend.info
    except JaxserveError:
        return Response(status_code=503)
    return Response(status_code=200)


async def version(call: Call) -> Response:
    """The version."""
    del call
    return json_reply({"version": VERSION})


async def load(call: Call) -> Response:
    """How many texts are being made or wait to be."""
    return json_reply({"server_load": call.frontend.limits.num_in_flight})


async def tokenizer_info(call: Call) -> Response:
    """What the model's files say of its tokenizer, and the chat template in use."""
    with call.frontend.admit(call.caller):
        return json_reply(await call.frontend.engine.tokenizer_info())


async def metrics(call: Call) -> Response:
    """Metrics in Prometheus' text format."""
    text = await metrics_text(call.frontend)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
