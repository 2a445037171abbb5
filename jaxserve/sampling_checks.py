"""The checks behind `SamplingParams`: one function a field, then what must hold between fields.

Messages follow vLLM's (`vllm/sampling_params.py`). Values come as users gave them: no type is assumed.
"""

import enum
import functools
import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jaxserve.errors import RequestError

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 20
MAX_N = 16384
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 2.0
# A positive temperature below this divides logits into the range where float32 loses them; vLLM has the same floor.
MIN_TEMPERATURE = 0.01


class RequestOutputKind(enum.Enum):
    """What each output of a streamed request holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """One output, at the end."""


# Fields of vLLM's that nothing reads yet: only the value that asks for nothing is taken.
NOT_BUILT: Mapping[str, Any] = MappingProxyType(
    {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprob_token_ids": None,
        "flat_logprobs": False,
        "spaces_between_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "extra_args": None,
        "bad_words": None,
        "thinking_token_budget": None,
        "repetition_detection": None,
    }
)


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    span = f"{'(' if above_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        message = f"{name} must be a number in {span}, got {type(value).__name__}"
        raise RequestError(message, parameter=name, value=value)
    number = float(value)
    if not (low <= number <= high) or (above_low and number == low):
        raise RequestError(f"{name} must be in {span}, got {number}", parameter=name, value=value)
    return number


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} must be an int, got {type(value).__name__}", parameter=name, value=value)
    number = int(value)
    if number < low:
        raise RequestError(f"{name} must be at least {low}, got {number}", parameter=name, value=value)
    if high is not None and number > high:
        raise RequestError(f"{name} must be at most {high}, got {number}", parameter=name, value=value)
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {type(value).__name__}", parameter=name, value=value)
    return value


def _temperature(value: object) -> float:
    temperature = _number("temperature", value, 0.0, MAX_TEMPERATURE)
    if 0.0 < temperature < MIN_TEMPERATURE:
        logger.warning(
            "temperature %g is too small for stable sampling and is raised to %g", temperature, MIN_TEMPERATURE
        )
        return MIN_TEMPERATURE
    return temperature


def _seed(value: object) -> int | None:
    if value is None or (isinstance(value, numbers.Integral) and int(value) == -1):
        return None
    return _integer("seed", value, 0, MAX_SEED)


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None:
        return None
    if value is True:
        return 1
    if isinstance(value, numbers.Integral) and int(value) == -1:
        message = f"{name}=-1 (all tokens) is not supported: at most {MAX_LOGPROBS} a position"
        raise RequestError(message, parameter=name, value=value)
    return _integer(name, value, 0, MAX_LOGPROBS)


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(_sequence("stop", value))
    for item in items:
        if not isinstance(item, str):
            message = f"stop must be a string or a list of strings, got an item of {type(item).__name__}"
            raise RequestError(message, parameter="stop", value=value)
        if not item:
            raise RequestError("stop cannot contain an empty string", parameter="stop", value=value)
    return items


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(_integer("stop_token_ids", item, 0) for item in _sequence("stop_token_ids", value))


def _sequence(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", parameter=name, value=value)
    return cast("Sequence[Any]", value)


_CHECKS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "n": functools.partial(_integer, "n", low=1, high=MAX_N),
        "temperature": _temperature,
        "top_p": functools.partial(_number, "top_p", low=0.0, high=1.0, above_low=True),
        "top_k": functools.partial(_integer, "top_k", low=-1),
        "min_p": functools.partial(_number, "min_p", low=0.0, high=1.0),
        "seed": _seed,
        "min_tokens": functools.partial(_integer, "min_tokens", low=0),
        "logprobs": functools.partial(_num_logprobs, "logprobs"),
        "prompt_logprobs": functools.partial(_num_logprobs, "prompt_logprobs"),
        "stop": _stop,
        "stop_token_ids": _stop_token_ids,
        **{
            name: functools.partial(_flag, name)
            for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        },
    }
)


def _is_neutral(value: object, neutral: object) -> bool:
    if neutral is None:
        return value is None or (isinstance(value, Sequence | Mapping) and not value)
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields checked, each alone and then together."""
    for name, neutral in NOT_BUILT.items():
        if not _is_neutral(values[name], neutral):
            message = f"{name} is not supported yet: leave it at {neutral!r}"
            raise RequestError(message, parameter=name, value=values[name])
    checked = {name: _CHECKS[name](value) if name in _CHECKS else value for name, value in values.items()}
    checked.update(NOT_BUILT)
    if checked["max_tokens"] is not None:
        checked["max_tokens"] = _integer("max_tokens", checked["max_tokens"], 1)
        if checked["min_tokens"] > checked["max_tokens"]:
            message = f"min_tokens must be at most max_tokens={checked['max_tokens']}, got {checked['min_tokens']}"
            raise RequestError(message, parameter="min_tokens", value=checked["min_tokens"])
    if checked["stop"] and not checked["detokenize"]:
        raise RequestError("stop strings need detokenize=True", parameter="stop", value=list(checked["stop"]))
    if checked["top_k"] == -1:
        checked["top_k"] = 0
    if checked["temperature"] == 0.0:
        if checked["n"] > 1:
            message = "n must be 1 when using greedy sampling: all sequences would be the same"
            raise RequestError(message, parameter="n", value=checked["n"])
        checked.update(top_p=1.0, top_k=0, min_p=0.0)
    return checked
