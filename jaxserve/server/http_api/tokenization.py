"""``/tokenize`` and ``/detokenize``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from jaxserve.field_checks import flag, text
from jaxserve.server.engine_request import check_converted
from jaxserve.server.http_api.chat_request import CONVERSATION_FIELDS, chat_arguments
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.fields import Check
from jaxserve.server.http_api.prompts import check_vocabulary, token_ids
from jaxserve.server.http_api.replies import json_reply, unused_header

_OPTIONS: Mapping[str, Check] = MappingProxyType({"model": text, "return_token_strs": flag})
_TEXT_FIELDS: Mapping[str, Check] = MappingProxyType({**_OPTIONS, "prompt": text, "add_special_tokens": flag})
_CHAT_FIELDS: Mapping[str, Check] = MappingProxyType({**CONVERSATION_FIELDS, **_OPTIONS})
_IDS_FIELDS: Mapping[str, Check] = MappingProxyType({"model": text, "tokens": token_ids, "skip_special_tokens": flag})


async def tokenize(call: Call) -> Response:
    """Token ids of a text, or of the prompt that a conversation becomes."""
    is_chat = call.body.get("messages") is not None
    fields = call.fields(_CHAT_FIELDS if is_chat else _TEXT_FIELDS, "messages" if is_chat else "prompt")
    frontend, has_strings = call.frontend, fields.get("return_token_strs", False)
    frontend.check_model(fields.get("model"))
    with frontend.admit(call.caller):
        strings: list[str] | None = None
        if is_chat:
            prompt, ids = await frontend.engine.render_chat(chat_arguments(call, fields))
            if has_strings:
                ids, strings = await frontend.engine.tokenize(prompt, False, True)
        else:
            is_special = fields.get("add_special_tokens", True)
            ids, found = await frontend.engine.tokenize(fields.get("prompt"), is_special, has_strings)
            strings = found if has_strings else None
    body: dict[str, Any] = {"count": len(ids), "max_model_len": frontend.info.max_model_len, "tokens": list(ids)}
    return json_reply({**body, "token_strs": strings}, headers=unused_header(fields.unused))


async def detokenize(call: Call) -> Response:
    """The text of token ids."""
    fields = call.fields(_IDS_FIELDS, "tokens")
    call.frontend.check_model(fields.get("model"))
    ids = fields.get("tokens")
    check_converted("tokens", len(ids))
    check_vocabulary(call, "tokens", ids)
    with call.frontend.admit(call.caller):
        found = await call.frontend.engine.detokenize(ids, fields.get("skip_special_tokens", False))
    return json_reply({"prompt": found}, headers=unused_header(fields.unused))
