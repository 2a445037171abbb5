"""``/v1/embeddings``: one vector a prompt."""

import base64
import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from jaxserve.errors import RequestFailedError
from jaxserve.field_checks import flag
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.http_api.answer_parts import Usage, answer_head
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.engine_streams import all_or_none
from jaxserve.server.http_api.fields import Check, limited, one_of
from jaxserve.server.http_api.generation_fields import PROMPT_FIELDS, engine_fields
from jaxserve.server.http_api.prompts import checked_prompts, prompt_arguments
from jaxserve.server.http_api.replies import json_reply, unused_header

POOLING_FIELDS = ("pooling", "normalize", "dimensions")
"""Those of ``PoolingParams``, which checks them."""

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **PROMPT_FIELDS,
        "input": prompt_arguments,
        "encoding_format": one_of("float", "base64"),
        **dict.fromkeys(POOLING_FIELDS, limited),
        "add_special_tokens": flag,
    }
)


async def embeddings(call: Call) -> Response:
    """Answers a request."""
    fields = call.fields(FIELDS, "input")
    head = answer_head(call.frontend, "embd", "list", fields.get("model"))
    prompts = checked_prompts(call, "input", fields)
    common = {
        **engine_fields(call, fields),
        "add_special_tokens": fields.get("add_special_tokens", True),
        "params": SamplingParams(max_tokens=1),
        "pooling": PoolingParams(**fields.chosen(POOLING_FIELDS)),
    }
    frontend = call.frontend
    with frontend.admit(call.caller, len(prompts)):
        found = await all_or_none(
            [
                frontend.embed(call.caller, EngineRequest(**prompt, **common), f"{head['id']}-{place}")
                for place, prompt in enumerate(prompts)
            ]
        )
    usage, is_base64 = Usage(has_details=False), fields.get("encoding_format") == "base64"
    data: list[dict[str, Any]] = []
    for place, (vector, num_tokens) in enumerate(found):
        usage.note_prompt(place, num_tokens)
        data.append({"index": place, "object": "embedding", "embedding": _encoded(vector, is_base64)})
    body = {**head, "data": data, "usage": usage.as_object()}
    return json_reply(body, headers=unused_header(fields.unused))


def _encoded(vector: list[float], is_base64: bool) -> list[float] | str:
    if not all(map(math.isfinite, vector)):
        raise RequestFailedError("the model gave a vector with values that are no numbers")
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if is_base64 else vector
