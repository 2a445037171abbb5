"""Checks of `SamplingParams` and `BeamSearchParams`: each field, then conditions between fields.

Messages follow vLLM's (`vllm/sampling_params.py`).
"""

import enum
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import (
    Values,
    flag,
    instance_of,
    integer,
    json_copy,
    mapping,
    number,
    texts,
    token_ids,
    wrong_field,
)
from jaxserve.api.sampling_options import MAX_FACTOR, SAMPLING_OPTIONS, Effect, check_temperature, neutral_values
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams

MAX_N = 16384
MAX_SEED = 2**63 - 1
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ARGUMENT_NESTING = 64
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_TEXT_LENGTH = 256
# A length raised to this power is still a finite float.
MAX_LENGTH_PENALTY = 32.0


class RequestOutputKind(enum.Enum):
    """The content of each output of a streamed request."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """The new tokens since the last output."""
    FINAL_ONLY = 2
    """One output with everything, at the end."""


def _optional_integer(name: str, value: object, high: int | None = None, low: int = 0) -> int | None:
    """Return an integer, or None for None and -1."""
    if value is None or (isinstance(value, numbers.Integral) and int(value) == -1):
        return None
    return integer(name, value, low, high)


def _or_none(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    """Return a check that accepts None too."""
    return lambda name, value: None if value is None else check(name, value)


def _num_logprobs(name: str, value: object) -> int:
    return 1 if value is True else integer(name, value, -1)


def _optional_texts(name: str, value: object, most: int, *, may_be_one: bool = False) -> tuple[str, ...]:
    """Return at most `most` strings of at most ``MAX_TEXT_LENGTH`` characters, a limit because every step matches
    them."""
    found = () if value is None else texts(name, value, may_be_one=may_be_one)
    if len(found) > most:
        raise wrong_field(name, value, f"must have at most {most} strings, got {len(found)}")
    longest = max(map(len, found), default=0)
    if longest > MAX_TEXT_LENGTH:
        raise wrong_field(
            name, value, f"must have strings of at most {MAX_TEXT_LENGTH} characters, got one of {longest}"
        )
    return found


def _stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    found = () if value is None else tuple(dict.fromkeys(token_ids(name, value)))
    if len(found) > MAX_STOP_TOKEN_IDS:
        raise wrong_field(name, len(found), f"must have at most {MAX_STOP_TOKEN_IDS} ids, got {len(found)}")
    return found


def _allowed_token_ids(name: str, value: object) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(token_ids(name, value)))
    if not found:
        raise wrong_field(name, value, "cannot be an empty list: no token would be allowed")
    return found


def _logprob_token_ids(name: str, value: object) -> tuple[int, ...] | None:
    found = token_ids(name, value)
    if len(found) > MAX_LOGPROB_TOKEN_IDS:
        raise wrong_field(name, value, f"must have at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(found)}")
    return found or None


def _logit_bias(name: str, value: object) -> dict[int, float] | None:
    found: dict[int, float] = {}
    given = mapping(name, value)
    if len(given) > MAX_BIASED_TOKENS:
        raise wrong_field(name, len(given), f"must have at most {MAX_BIASED_TOKENS} token ids, got {len(given)}")
    for key, bias in given.items():
        token_id = _token_id(name, key)
        if token_id in found:
            raise wrong_field(name, value, f"has token id {token_id} twice")
        bias = number(f"{name}[{token_id}]", bias, -math.inf, math.inf)
        found[token_id] = min(max(bias, -MAX_FACTOR), MAX_FACTOR)
    return found or None


def _token_id(name: str, key: object) -> int:
    if isinstance(key, str):
        try:
            key = int(key)
        except ValueError:
            raise wrong_field(name, key, f"must have token ids as keys, got {key!r}") from None
    if isinstance(key, bool) or not isinstance(key, numbers.Integral) or key < 0:
        raise wrong_field(name, key, f"must have token ids >= 0 as keys, got {key!r:.80}")
    return int(key)


def _output_kind(name: str, value: object) -> RequestOutputKind:
    if isinstance(value, RequestOutputKind):
        return value
    kinds = RequestOutputKind.__members__
    if not isinstance(value, str) or value.upper() not in kinds:
        raise wrong_field(name, value, f"must be a RequestOutputKind or one of {', '.join(kinds)}; got {value!r}")
    return kinds[value.upper()]


def _extra_args(name: str, value: object) -> dict[str, Any] | None:
    return json_copy(name, mapping(name, value), MAX_ARGUMENT_NESTING) or None


_FLAGS = (
    "ignore_eos detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output flat_logprobs"
).split()
SAMPLING_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "n": functools.partial(integer, low=1, high=MAX_N),
        **{name: option.check for name, option in SAMPLING_OPTIONS.items()},
        "seed": functools.partial(_optional_integer, high=MAX_SEED),
        "stop": functools.partial(_optional_texts, most=MAX_STOP_STRINGS, may_be_one=True),
        "stop_token_ids": _stop_token_ids,
        "max_tokens": functools.partial(_optional_integer, low=1),
        "min_tokens": functools.partial(integer, low=0),
        "logprobs": _or_none(_num_logprobs),
        "prompt_logprobs": _or_none(_num_logprobs),
        "logprob_token_ids": _or_none(_logprob_token_ids),
        "output_kind": _output_kind,
        "structured_outputs": _or_none(functools.partial(instance_of, StructuredOutputsParams)),
        "logit_bias": _or_none(_logit_bias),
        "allowed_token_ids": _or_none(_allowed_token_ids),
        "bad_words": functools.partial(_optional_texts, most=MAX_BAD_WORDS),
        "thinking_token_budget": _optional_integer,
        "repetition_detection": _or_none(functools.partial(instance_of, RepetitionDetectionParams)),
        "skip_reading_prefix_cache": _or_none(flag),
        "extra_args": _or_none(_extra_args),
        **dict.fromkeys(_FLAGS, flag),
    }
)
"""The check of each field of `SamplingParams`."""


def checked_together(checked: Values) -> Values:
    """Return the fields of `SamplingParams`, each checked alone, after checking them together."""
    if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
        least, most = checked["min_tokens"], checked["max_tokens"]
        raise wrong_field("min_tokens", least, f"must be at most max_tokens={most}, got {least}")
    if checked["stop"] and not checked["detokenize"]:
        raise RequestError("stop strings need detokenize=True", parameter="stop", value=list(checked["stop"]))
    if checked["logprob_token_ids"] is not None or checked["prompt_logprobs"] is not None:
        _check_logprobs(checked)
    if checked["temperature"] == 0.0:
        if checked["n"] > 1:
            raise wrong_field(
                "n", checked["n"], "must be 1 when using greedy sampling: all sequences would be the same"
            )
        checked.update(neutral_values(Effect.DRAW))
    return checked


def _check_logprobs(checked: Values) -> None:
    tracked, count = checked["logprob_token_ids"], checked["logprobs"]
    if tracked is not None and count not in (None, len(tracked)):
        raise wrong_field(
            "logprobs", count, f"must be None or the number of logprob_token_ids, {len(tracked)}; got {count}"
        )
    if checked["prompt_logprobs"] is not None and checked["skip_reading_prefix_cache"] is False:
        message = "skip_reading_prefix_cache cannot be False with prompt_logprobs: cached tokens have no logprobs"
        raise RequestError(message, parameter="skip_reading_prefix_cache", value=False)


BEAM_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "beam_width": functools.partial(integer, low=1, high=MAX_N),
        "max_tokens": functools.partial(integer, low=1),
        "ignore_eos": flag,
        "temperature": check_temperature,
        "length_penalty": functools.partial(number, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY),
        "include_stop_str_in_output": flag,
        "skip_special_tokens": flag,
    }
)
"""The check of each field of `BeamSearchParams`."""
