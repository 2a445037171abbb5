"""``/tokenize`` and ``/detokenize``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from jaxserve.api.field_checks import flag, text, token_ids
from jaxserve.server.byte_budget import conversion_bytes, conversion_output_bytes
from jaxserve.server.chat import chat_arguments
from jaxserve.server.converted_tokens import check_converted
from jaxserve.server.http_api.chat import CONVERSATION_FIELDS
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.fields import Check
from jaxserve.server.http_api.long_lists import ITEMS_AT_ONCE, in_parts, long_response
from jaxserve.server.http_api.responses import json_response, unused_fields_header

_OPTIONS: Mapping[str, Check] = MappingProxyType({"model": text, "return_token_strs": flag})
_TEXT_FIELDS: Mapping[str, Check] = MappingProxyType({**_OPTIONS, "prompt": text, "add_special_tokens": flag})
_CHAT_FIELDS: Mapping[str, Check] = MappingProxyType({**CONVERSATION_FIELDS, **_OPTIONS})
_IDS_FIELDS: Mapping[str, Check] = MappingProxyType({"model": text, "tokens": token_ids, "skip_special_tokens": flag})


async def tokenize(call: HttpCall) -> ASGIApp:
    """Return the token ids of a text, or of the prompt of a conversation."""
    fields = await call.read(lambda: _read_fields(call))
    is_chat = "messages" in fields
    frontend, has_strings = call.frontend, fields.get("return_token_strs", False)
    turn = call.caller.turn
    strings: list[str] = []
    num_bytes = await call.read(lambda: conversion_bytes(text=fields))
    with frontend.ledger.admit(call.caller, num_bytes=num_bytes):
        if is_chat:
            prompt, ids = await frontend.engine.render_chat(chat_arguments(frontend.config, fields), turn)
            if has_strings:
                ids, strings = await frontend.engine.tokenize(prompt, False, True, turn)
        else:
            is_special = fields.get("add_special_tokens", True)
            ids, strings = await frontend.engine.tokenize(fields["prompt"], is_special, has_strings, turn)
    call.hold(conversion_output_bytes(len(ids), strings))
    body = {
        "count": len(ids),
        "max_model_len": frontend.info.max_model_len,
        "tokens": in_parts(ids),
        "token_strs": in_parts(strings) if has_strings else None,
    }
    headers = unused_fields_header(call.unused)
    if len(ids) > ITEMS_AT_ONCE:
        return await long_response(body, headers, frontend.long_work, turn)
    return json_response(body, headers=headers)


def _read_fields(call: HttpCall) -> dict[str, Any]:
    """Return the fields of a conversation or of a text."""
    if call.body.get("messages") is not None:
        return call.fields(_CHAT_FIELDS, "messages")
    return call.fields(_TEXT_FIELDS, "prompt")


async def detokenize(call: HttpCall) -> Response:
    """Return the text of token ids."""
    fields = await call.read(lambda: call.fields(_IDS_FIELDS, "tokens"))
    ids = fields["tokens"]
    check_converted("tokens", len(ids))
    with call.frontend.ledger.admit(call.caller, num_bytes=conversion_bytes(num_tokens=len(ids))):
        found = await call.frontend.engine.detokenize(ids, fields.get("skip_special_tokens", False), call.caller.turn)
    return json_response({"prompt": found}, headers=unused_fields_header(call.unused))
