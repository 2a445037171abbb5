"""Random requests of the fuzz test of speculative decoding: every option, alone and with others."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxserve import PoolingParams, SamplingParams
from jaxserve.api.request import Request
from scripts.fuzzing.configurations import Configuration

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["sum", "product"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
_TOOLS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["get_weather"]}, "parameters": _SCHEMA},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    },
}
_STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": _SCHEMA, "disable_any_whitespace": True},
    {"json": _SCHEMA},
    {"json": _TOOLS, "disable_any_whitespace": True},
    {"regex": "[a-f]{3,9}(-[0-9]{2})+"},
    {"regex": r"\d{3}-\d{4}"},
    {"choice": ["yes", "yesterday", "no"]},
    {"grammar": 'root ::= "sum: " [0-9]+ ("," [0-9]+)*'},
    {"json_object": True},
)
_STOPS = ("e", "a", "12", "in", "th", " ", "s", "the", "7")
_WORDS = ("e", "an", "th", "12", "in", "or")
_PREFIXES = 4


class Asked(NamedTuple):
    """A request, and what the client does with it.

    Attributes:
        request: The request.
        aborts_after: Abort it when its first completion has this many tokens; None: let it finish.
    """

    request: Request
    aborts_after: int | None


def draw_requests(configuration: Configuration, count: int) -> list[Asked]:
    """Return the requests of a configuration; some come again, so that past texts and cached pages are of use."""
    rng, asked = configuration.generator, list[Asked]()
    prefixes = [_tokens(rng, rng.randint(6, 70)) for _ in range(_PREFIXES)]
    for number in range(count):
        if asked and rng.random() < 0.15:
            earlier = rng.choice(asked[-12:])
            request = earlier.request
        else:
            request = _request(rng, configuration, prefixes)
        named = Request(**{**_fields(request), "request_id": str(number)})
        asked.append(Asked(named, rng.randint(1, 20) if rng.random() < 0.06 else None))
    return asked


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("token_ids", "params", "pooling", "priority", "cache_salt")}


def _request(rng: random.Random, configuration: Configuration, prefixes: list[list[int]]) -> Request:
    prompt = (rng.choice(prefixes) + _tokens(rng, rng.randint(0, 12))) if rng.random() < 0.7 else _prompt(rng)
    settings, pooling = configuration.settings, None
    if rng.random() < 0.02:
        pooling = PoolingParams()
    return Request(
        token_ids=tuple(prompt),
        params=_params(rng, settings),
        pooling=pooling,
        priority=rng.choice((0, 0, 1, -1, 5)) if settings["scheduling_policy"] == "priority" else 0,
        cache_salt=rng.choice((None, None, "a", "b")),
    )


def _prompt(rng: random.Random) -> list[int]:
    """Return a prompt of up to 70 tokens, in many cases with a part that comes again."""
    part = _tokens(rng, rng.randint(1, 14))
    return (part * rng.randint(1, 5) + _tokens(rng, rng.randint(0, 4)))[:70]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, 356) for _ in range(count)]


def _params(rng: random.Random, settings: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with up to four options."""
    greedy = rng.random() < 0.4
    fields: dict[str, Any] = {
        "temperature": 0.0 if greedy else rng.choice((1.0, 1.0, 0.7, 1.6, 0.2)),
        "seed": None if rng.random() < 0.1 else rng.choice((rng.randrange(50), 2**31 + rng.randrange(50))),
        "max_tokens": rng.choice((1, 2, 5, 12, 20, 32, 40)),
        "ignore_eos": rng.random() < 0.5,
    }
    names = [*_OPTIONS] if not greedy else [name for name in _OPTIONS if name not in _NOT_GREEDY]
    for name in rng.sample(names, rng.choice((0, 1, 1, 2, 2, 3, 4))):
        fields |= _OPTIONS[name](rng)
    if "reasoning_parser" in settings and rng.random() < 0.25:
        fields["thinking_token_budget"] = rng.choice((0, 3, 8))
    if "logits_processors" in settings and rng.random() < 0.08:
        fields["extra_args"] = {"nan_from": rng.randint(1, 80)}
    if "logprob_token_ids" in fields:
        fields.pop("logprobs", None)
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return SamplingParams(**fields)


_NOT_GREEDY = ("top", "top_k", "top_p", "min_p", "n")
_OPTIONS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = MappingProxyType(
    {
        "top": lambda rng: {"top_k": rng.choice((2, 20, 100)), "top_p": rng.choice((0.5, 0.9, 0.99))},
        "top_k": lambda rng: {"top_k": rng.choice((1, 5, 50))},
        "top_p": lambda rng: {"top_p": rng.choice((0.3, 0.8, 0.95))},
        "min_p": lambda rng: {"min_p": rng.choice((0.02, 0.2))},
        "n": lambda rng: {"n": rng.choice((2, 3))},
        "presence": lambda rng: {"presence_penalty": rng.choice((-1.5, 0.6, 2.0))},
        "frequency": lambda rng: {"frequency_penalty": rng.choice((-0.8, 0.7, 1.9))},
        "repetition": lambda rng: {"repetition_penalty": rng.choice((0.7, 1.3, 1.9))},
        "bias": lambda rng: {"logit_bias": {t: rng.uniform(-8, 8) for t in rng.sample(range(360), rng.randint(1, 12))}},
        "allowed": lambda rng: {"allowed_token_ids": sorted(rng.sample(range(4, 356), rng.choice((2, 20, 150))))},
        "bad words": lambda rng: {"bad_words": rng.sample(_WORDS, rng.randint(1, 4))},
        "min_tokens": lambda rng: {"min_tokens": rng.randint(1, 25), "max_tokens": rng.randint(25, 40)},
        "stop": lambda rng: {
            "stop": rng.sample(_STOPS, rng.randint(1, 3)),
            "include_stop_str_in_output": rng.random() < 0.5,
        },
        "stop ids": lambda rng: {"stop_token_ids": rng.sample(range(4, 356), rng.choice((1, 10, 60)))},
        "logprobs": lambda rng: {"logprobs": rng.choice((0, 1, 3))},
        "more logprobs": lambda rng: {"logprobs": rng.choice((0, 2, 5))},
        "tracked logprobs": lambda rng: {"logprob_token_ids": rng.sample(range(4, 356), 3)},
        "prompt logprobs": lambda rng: {"prompt_logprobs": rng.choice((0, 2))},
        "grammar": lambda rng: {"structured_outputs": rng.choice(_STRUCTURES), "max_tokens": rng.choice((10, 40))},
        "another grammar": lambda rng: {"structured_outputs": rng.choice(_STRUCTURES), "max_tokens": 40},
        "repetition ends": lambda rng: {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
        "no cache": lambda rng: {"skip_reading_prefix_cache": True},
    }
)
