"""The numeric sampling options, one row each; everything that must list all of them is derived from this table.

``SamplingParams`` has a field of the same name, with its default and documentation. The row determines the validation
in the Python API and both servers, the fields of requests and of ``generation_config.json``, the numbers in a plan, the
arrays that the sampler reads, and which steps must apply the option.
"""

import collections
import enum
import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.api.field_checks import integer, number

logger = logging.getLogger(__name__)

MAX_TEMPERATURE = 2.0
# Smaller positive temperatures divide logits into the range where float32 loses precision; vLLM has the same floor.
MIN_TEMPERATURE = 0.01
# Bias, repetition penalty and temperature together keep a logit finite in float32.
MAX_FACTOR = 1e15
MAX_TOP_K = 2**31 - 1


class Effect(enum.Enum):
    """What an option changes when it is not neutral: this determines how much the steps of such a request compute."""

    DRAW = "draw"
    """How a row with a temperature samples its token; without a temperature it has no effect and is made neutral."""
    LOGITS = "logits"
    """The logits, and so the argmax."""
    PENALTY = "penalty"
    """The logits, depending on the tokens so far, which the device counts."""


class SamplingOption(NamedTuple):
    """A row of the table.

    Attributes:
        neutral: The value without effect. If it is an int, the option is int32 on the device, otherwise float32.
        check: Takes the field's name and the user's value; returns the value to store, in that type.
        effect: What the option changes.
        in_generation_config: Whether a model's ``generation_config.json`` may set it, as in vLLM.
    """

    neutral: float
    check: Callable[[str, object], float]
    effect: Effect
    in_generation_config: bool = False


def check_temperature(name: str, value: object) -> float:
    """Return a temperature; raise small positive ones to the minimum."""
    temperature = number(name, value, 0.0, MAX_TEMPERATURE)
    if 0.0 < temperature < MIN_TEMPERATURE:
        logger.warning("temperature %g is too small for stable sampling; using %g", temperature, MIN_TEMPERATURE)
        return MIN_TEMPERATURE
    return temperature


def _top_k(name: str, value: object) -> int:
    return max(integer(name, value, -1, MAX_TOP_K), 0)


_from_0_to_1 = functools.partial(number, low=0.0, high=1.0)
_above_0_to_1 = functools.partial(number, low=0.0, high=1.0, above_low=True)
_factor = functools.partial(number, low=1 / MAX_FACTOR, high=MAX_FACTOR)
_within_2 = functools.partial(number, low=-2.0, high=2.0)

SAMPLING_OPTIONS: Mapping[str, SamplingOption] = MappingProxyType(
    {
        "temperature": SamplingOption(0.0, check_temperature, Effect.DRAW, in_generation_config=True),
        "top_k": SamplingOption(0, _top_k, Effect.DRAW, in_generation_config=True),
        "top_p": SamplingOption(1.0, _above_0_to_1, Effect.DRAW, in_generation_config=True),
        "min_p": SamplingOption(0.0, _from_0_to_1, Effect.DRAW, in_generation_config=True),
        "repetition_penalty": SamplingOption(1.0, _factor, Effect.PENALTY, in_generation_config=True),
        "frequency_penalty": SamplingOption(0.0, _within_2, Effect.PENALTY),
        "presence_penalty": SamplingOption(0.0, _within_2, Effect.PENALTY),
    }
)

OptionValues = collections.namedtuple(
    "OptionValues", SAMPLING_OPTIONS, defaults=[option.neutral for option in SAMPLING_OPTIONS.values()]
)
"""A value of each option by its name: a request's own or the neutral one; on the device an array of each."""


def has_effect(values: OptionValues, *effects: Effect) -> bool:
    """Return whether an option with one of the effects is not neutral."""
    return any(
        option.effect in effects and getattr(values, name) != option.neutral
        for name, option in SAMPLING_OPTIONS.items()
    )


def neutral_values(effect: Effect) -> dict[str, float]:
    """Return the options with an effect, each with its neutral value."""
    return {name: option.neutral for name, option in SAMPLING_OPTIONS.items() if option.effect is effect}
