"""The numeric options of sampling, a row each: all that must know every one of them is derived from this table.

``SamplingParams`` has a field of the same name, with its default and what it means to a user. From the row come the
validation in the Python API and both servers, the fields of requests and of ``generation_config.json``, the numbers
that a plan carries, the arrays that the sampler reads, and which steps must do the option's work.
"""

import collections
import enum
import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.field_checks import integer, number

logger = logging.getLogger(__name__)

MAX_TEMPERATURE = 2.0
# A positive temperature below this divides logits into the range where float32 loses them; vLLM has the same floor.
MIN_TEMPERATURE = 0.01
# Bias, repetition penalty and temperature together still leave a logit finite in float32.
MAX_FACTOR = 1e15
MAX_TOP_K = 2**31 - 1


class Effect(enum.Enum):
    """What an option changes where it is not neutral: it decides how much the steps of such a request compute."""

    DRAW = "draw"
    """How a row with a temperature draws its token: without a temperature it changes nothing and is made neutral."""
    LOGITS = "logits"
    """The logits, and so which token is the most likely."""
    PENALTY = "penalty"
    """The logits, by the tokens so far: the device counts them."""


class SamplingOption(NamedTuple):
    """A row of the table.

    Attributes:
        neutral: The value that changes nothing. Where it is an int, the option is int32 on the device, else float32.
        check: Takes the field's name and what the user gave; returns the value to store, which that type can hold.
        effect: What it changes.
        in_generation_config: Whether a model's ``generation_config.json`` may give it, as in vLLM.
    """

    neutral: float
    check: Callable[[str, object], float]
    effect: Effect
    in_generation_config: bool = False


def check_temperature(name: str, value: object) -> float:
    """Return a temperature; small positive ones are raised."""
    temperature = number(name, value, 0.0, MAX_TEMPERATURE)
    if 0.0 < temperature < MIN_TEMPERATURE:
        logger.warning(
            "temperature %g is too small for stable sampling and is raised to %g", temperature, MIN_TEMPERATURE
        )
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
"""A value of each option by its name: a request's own, neutral where not given; or on the device an array of each."""


def has_effect(values: OptionValues, *effects: Effect) -> bool:
    """Return whether a request's option with one of the effects is not neutral."""
    return any(
        option.effect in effects and getattr(values, name) != option.neutral
        for name, option in SAMPLING_OPTIONS.items()
    )


def neutral_values(effect: Effect) -> dict[str, float]:
    """Return the options with an effect, and the value of each that changes nothing."""
    return {name: option.neutral for name, option in SAMPLING_OPTIONS.items() if option.effect is effect}
