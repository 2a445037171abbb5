"""``/v1/embeddings``: one vector per prompt."""

import asyncio
import base64
import math
import struct
from collections.abc import Mapping
from types import MappingProxyType

from starlette.responses import Response

from jaxserve.errors import RequestFailedError
from jaxserve.field_checks import flag
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.fields import Check, limited, one_of, prompts
from jaxserve.server.http_api.generation import PROMPT_FIELDS, engine_requests, response_head, usage_object
from jaxserve.server.http_api.responses import json_response, unused_fields_header

POOLING_FIELDS = ("pooling", "normalize", "dimensions")
"""Fields of ``PoolingParams``, which checks them."""

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **PROMPT_FIELDS,
        "input": prompts,
        "encoding_format": one_of("float", "base64"),
        **dict.fromkeys(POOLING_FIELDS, limited),
        "add_special_tokens": flag,
    }
)


async def embeddings(call: HttpCall) -> Response:
    """Respond to a request; an error of one prompt cancels the others."""
    fields, frontend = call.fields(FIELDS, "input"), call.frontend
    head = response_head(frontend, "embd", "list")
    pooling = PoolingParams(**{name: fields[name] for name in POOLING_FIELDS if name in fields})
    requests = engine_requests(call, fields, fields["input"], params=SamplingParams(max_tokens=1), pooling=pooling)
    with frontend.limits.admit(call.caller, len(requests)):
        tasks = [
            asyncio.create_task(frontend.embed(call.caller, request, f"{head['id']}-{index}"))
            for index, request in enumerate(requests)
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    is_base64 = fields.get("encoding_format") == "base64"
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(vector, is_base64)}
        for index, (vector, _) in enumerate(found)
    ]
    body = {**head, "data": data, "usage": usage_object(sum(num_tokens for _, num_tokens in found), 0)}
    return json_response(body, headers=unused_fields_header(fields.unused))


def _encoded(vector: list[float], is_base64: bool) -> list[float] | str:
    if not all(map(math.isfinite, vector)):
        raise RequestFailedError("the model produced an embedding with NaN or infinite values")
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if is_base64 else vector
