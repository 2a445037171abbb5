"""How one request is sampled and when it ends: vLLM's names, defaults and checks (`vllm/sampling_params.py`).

Everything is checked and normalised once, before the object exists, so the rest of the engine reads plain values.
"""

import dataclasses
import difflib
import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from jaxserve.errors import RequestError
from jaxserve.sampling_checks import NOT_BUILT, RequestOutputKind, normalised

logger = logging.getLogger(__name__)

T = TypeVar("T")

# vLLM's keys of generation_config.json -> field
_GENERATION_CONFIG_KEYS = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """When a text that repeats itself ends, with finish reason ``repetition``: vLLM's names and rules."""

    max_pattern_size: int = 0
    """Longest pattern looked for, in tokens; 0 looks for none."""
    min_pattern_size: int = 0
    """Shortest pattern looked for; 0 means 1."""
    min_count: int = 0
    """How often in a row a pattern must stand at the end of the output; at least 2."""


def _checks_fields(cls: type[T]) -> type[T]:
    """Decorates a keyword-only dataclass: names and values are checked before its generated `__init__` sees them."""
    generated = cls.__init__
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]

    @functools.wraps(generated)
    def __init__(self: T, **values: Any) -> None:
        for name in values:
            if name not in defaults:
                near = difflib.get_close_matches(name, defaults, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(defaults)}"
                raise RequestError(f"SamplingParams has no field {name!r}{hint}", parameter=name, value=values[name])
        generated(self, **normalised({**defaults, **values}))

    cls.__init__ = __init__
    return cls


@_checks_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and defaults. Immutable; `clone` makes a changed copy.

    Raises:
      RequestError: A value of the wrong type or out of range, an unknown name (the nearest is suggested), or a
        field of vLLM's that is not built yet with anything but its neutral value.
    """

    n: int = 1
    """Sequences to generate from the prompt, 1 to 16384; 1 when greedy."""
    temperature: float = 1.0
    """0 is greedy; else 0.01 to 2 (smaller positive values are raised to 0.01 with a warning)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability, in [0, 1]."""
    seed: int | None = None
    """0 to 2**63 - 1 for a repeatable request; None or -1: from the engine's seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text, stored as a tuple; the text is cut before the first to appear."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the sequence, stored as a tuple."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as the context holds."""
    min_tokens: int = 0
    """No end of sequence and no stop string before this many tokens."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens (and of the sampled one) a position, 0 to 20; True is 1."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    detokenize: bool = True
    """Make text; False leaves `CompletionOutput.text` empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string, not before it."""

    # Not built yet: anything but the neutral value raises, so that nothing is ignored.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    spaces_between_special_tokens: bool = True
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    structured_outputs: Any = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    extra_args: Mapping[str, Any] | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **changes: Any) -> "SamplingParams":
        """Makes the defaults that a model ships with.

        Args:
          config: Contents of `generation_config.json`. `do_sample: false` means temperature 0. A key that vLLM reads
            and that is not built yet is left out with one warning that names it; other keys don't concern sampling.
          **changes: Fields that win over the file.

        Raises:
          RequestError: As the constructor.
        """
        found = {name: config[key] for key, name in _GENERATION_CONFIG_KEYS.items() if config.get(key) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        ignored = [f"{name}={found[name]}" for name in found if name in NOT_BUILT and found[name] != NOT_BUILT[name]]
        if ignored:
            logger.warning("generation_config.json asks for %s, not supported yet: left out", ", ".join(ignored))
        kept = {name: value for name, value in found.items() if name not in NOT_BUILT}
        return cls(**{**kept, **changes})

    def clone(self, **changes: Any) -> "SamplingParams":
        """Returns a copy with some fields changed, checked like a new one."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{**values, **changes})

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature == 0.0

    @property
    def needs_logprobs(self) -> bool:
        """Whether any log probabilities are to be returned."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` with the type it really has after normalisation."""
        return tuple(self.stop or ())

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) not in (field.default, ())
        ]
        return f"SamplingParams({', '.join(changed)})"
