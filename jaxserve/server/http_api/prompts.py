"""The forms of a prompt: a text, token ids, or a list of either."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import text
from jaxserve.server.http_api.endpoint import Call

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
    """Token ids; the vocabulary's end is checked by ``check_prompts``.

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


def check_prompts(call: Call, name: str, prompts: list[dict[str, Any]]) -> None:
    """Checks what depends on the server.

    Raises:
        RequestError: Too many prompts, or a token id out of the vocabulary.
    """
    limit = call.frontend.config.max_prompts
    if len(prompts) > limit:
        raise RequestError(f"{name} must have at most {limit} prompts, got {len(prompts)}", parameter=name)
    for prompt in prompts:
        check_vocabulary(call, name, prompt)


def check_vocabulary(call: Call, name: str, prompt: Mapping[str, Any]) -> None:
    """Checks the token ids of a prompt, if it has any.

    Raises:
        RequestError: One is out of the vocabulary.
    """
    size = call.frontend.info.model.vocab_size
    largest = max(prompt.get("token_ids", ()), default=0)
    if largest >= size:
        raise RequestError(f"{name}: token id {_short(largest)} is out of vocabulary (size {size})", parameter=name)


def _short(number: int) -> str:
    return str(number) if number < 10**18 else "of more than 18 digits"


def _filled(name: str, value: str) -> str:
    if not text(name, value):
        raise RequestError(f"{name} must not be empty", parameter=name)
    return value
