"""The forms of a prompt: a text, token ids, or a list of either."""

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import text
from jaxserve.server.engine_request import within_context
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.fields import Fields

FORMS = "a string, a list of token ids, or a list of strings or of lists of token ids"


def prompt_arguments(name: str, value: Any) -> list[dict[str, Any]]:
    """A prompt field as arguments of an ``EngineRequest``, one dict a prompt. May be used as a check.

    Raises:
        RequestError: Another form, an empty prompt, or no token id.
    """
    if isinstance(value, str):
        return [{"text": _filled(name, value)}]
    if not isinstance(value, list):
        raise RequestError(f"{name} must be {FORMS}, got {type(value).__name__}", parameter=name)
    if not value:
        raise RequestError(f"{name} must not be empty", parameter=name)
    if type(value[0]) is int:
        return [{"token_ids": token_ids(name, value)}]
    if all(isinstance(item, str) for item in value):
        return [{"text": _filled(name, item)} for item in value]
    if all(isinstance(item, list) and item for item in value):
        return [{"token_ids": token_ids(name, item)} for item in value]
    raise RequestError(f"{name} must be {FORMS}, none of them empty", parameter=name)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids; the vocabulary's end is checked by ``check_vocabulary``.

    Raises:
        RequestError: Something that is none.
    """
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of token ids, got {type(value).__name__}", parameter=name)
    if not all(type(item) is int for item in value):
        raise RequestError(f"{name} must have whole numbers as token ids", parameter=name)
    if min(value, default=0) < 0:
        raise RequestError(f"{name}: token ids must be at least 0, got {min(value)}", parameter=name)
    return tuple(value)


def checked_prompts(call: Call, name: str, fields: Fields) -> list[dict[str, Any]]:
    """The prompts of a field, checked for what depends on the server.

    Raises:
        RequestError: Too many prompts, too many token ids, or one out of the vocabulary.
    """
    prompts = fields.get(name)
    limit = call.frontend.config.max_prompts
    if len(prompts) > limit:
        raise RequestError(f"{name} must have at most {limit} prompts, got {len(prompts)}", parameter=name)
    cut, max_model_len = fields.get("truncate_prompt_tokens"), call.frontend.info.max_model_len
    found: list[dict[str, Any]] = []
    for prompt in prompts:
        if "token_ids" in prompt:
            prompt = {"token_ids": within_context(prompt["token_ids"], cut, max_model_len)}
            check_vocabulary(call, name, prompt["token_ids"])
        found.append(prompt)
    return found


def check_vocabulary(call: Call, name: str, token_ids: Sequence[int]) -> None:
    """Checks that there are such tokens.

    Raises:
        RequestError: One is out of the vocabulary.
    """
    size = call.frontend.info.model.vocab_size
    largest = max(token_ids, default=0)
    if largest >= size:
        raise RequestError(f"{name}: token id {_short(largest)} is out of vocabulary (size {size})", parameter=name)


def _short(number: int) -> str:
    return str(number) if number < 10**18 else "of more than 18 digits"


def _filled(name: str, value: str) -> str:
    if not text(name, value):
        raise RequestError(f"{name} must not be empty", parameter=name)
    return value
