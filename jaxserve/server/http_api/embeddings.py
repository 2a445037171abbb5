"""``/v1/embeddings``: one vector per prompt."""

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from jaxserve.api.errors import RequestFailedError
from jaxserve.api.field_checks import flag
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.byte_budget import output_bytes
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.fields import Check, limited, one_of, prompts
from jaxserve.server.http_api.generation import (
    PROMPT_FIELDS,
    prompt_requests,
    response_head,
    usage_object,
)
from jaxserve.server.http_api.long_lists import ITEMS_AT_ONCE, LongList, long_response
from jaxserve.server.http_api.merged_outputs import generate_all, make_entries
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


async def embeddings(call: HttpCall) -> ASGIApp:
    """Respond to a request."""
    fields = await call.read(lambda: call.fields(FIELDS, "input"))
    head = response_head(call.frontend, "embd", "list")
    pooling = PoolingParams(**{name: fields[name] for name in POOLING_FIELDS if name in fields})
    prompts, params = fields["input"], SamplingParams(max_tokens=1)
    requests = prompt_requests(call, fields, head["id"], prompts, params=params, pooling=pooling)
    vectors = dict[int, list[float]]()
    entries = await make_entries(call, requests)
    async with aclosing(generate_all(call, entries)) as outputs:
        async for index, output in outputs:
            vector = output.embedding
            if vector is None:
                continue
            if not all(map(math.isfinite, vector)):
                raise RequestFailedError("the model produced an embedding with NaN or infinite values")
            call.hold(output_bytes(output))
            vectors[index] = vector
    if len(vectors) < len(requests):
        raise RequestFailedError("the request was aborted")
    is_base64 = fields.get("encoding_format") == "base64"

    def data() -> Iterator[list[Any]]:
        for index in range(len(requests)):
            vector = vectors[index]
            shown = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if is_base64 else vector
            yield [{"index": index, "object": "embedding", "embedding": shown}]

    usage = usage_object(sum(entry.num_prompt_tokens or 0 for entry in entries), 0)
    headers = unused_fields_header(call.unused)
    if sum(map(len, vectors.values())) > ITEMS_AT_ONCE:
        body = {**head, "data": LongList(data), "usage": usage}
        return await long_response(body, headers, call.frontend.long_work, call.caller.turn)
    return json_response({**head, "data": [one for part in data() for one in part], "usage": usage}, headers=headers)
