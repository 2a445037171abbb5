"""How one request is sampled and when it ends: vLLM's names, defaults and checks (`vllm/sampling_params.py`).

Everything is checked and normalised once, before the object exists, so the rest of the engine reads plain values.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import changed_fields, checks_fields
from jaxserve.sampling_checks import RequestOutputKind, checked_beam_search, checked_sampling
from jaxserve.sampling_options import SAMPLING_OPTIONS
from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams

GENERATION_CONFIG_KEYS = MappingProxyType(
    {
        **{name: name for name, option in SAMPLING_OPTIONS.items() if option.in_generation_config},
        "max_new_tokens": "max_tokens",
    }
)
"""vLLM's keys of generation_config.json -> field."""


@checks_fields(checked_sampling)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and defaults. Immutable; `clone` makes a changed copy.

    Raises:
      RequestError: A value of the wrong type or out of range, or an unknown name (the nearest is suggested).
    """

    n: int = 1
    """Sequences to generate from the prompt, 1 to 16384; 1 when greedy."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output has, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens for each time the output has them, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely (positive logits are divided, others multiplied by it)."""
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
    """Up to 64 strings of up to 256 characters that end the text, stored as a tuple; it is cut before the first."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the sequence, stored as a tuple."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None or -1: as many as the context holds."""
    min_tokens: int = 0
    """No end of sequence and no stop string before this many tokens."""
    logprobs: int | None = None
    """Log probabilities of this many most likely tokens (and of the sampled one) a position; -1: of all; True is 1."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: Sequence[int] | None = None
    """Log probabilities of these tokens, at most 128, in place of the most likely; stored as a tuple."""
    flat_logprobs: bool = False
    """Give log probabilities as `FlatLogprobs`, a few long lists, in place of a dict a position."""
    detokenize: bool = True
    """Make text; False leaves `CompletionOutput.text` empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """As in vLLM it concerns slow tokenizers alone; the fast and sentencepiece ones here put no such spaces."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string, not before it."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each streamed output holds: CUMULATIVE all so far, DELTA what is new, FINAL_ONLY comes once; or its name."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must keep to, such as a JSON schema; or a dict of its fields."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Added to the logits of these token ids (which may be written as text)."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled, stored as a tuple."""
    bad_words: Sequence[str] | None = None
    """Up to 1024 texts whose last token is never sampled behind their others, stored as a tuple."""
    thinking_token_budget: int | None = None
    """Most tokens of a model's thinking, after which its end is forced; None or -1: no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """When a text that repeats itself ends; or a dict of its fields."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, whatever the cache holds; None: only with `prompt_logprobs`, which need it."""
    extra_args: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """JSON values for custom logits processors, by name."""

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **changes: Any) -> "SamplingParams":
        """Make the defaults that a model ships with.

        Args:
          config: Contents of `generation_config.json`. `do_sample: false` means temperature 0; keys that don't concern
            sampling are left out.
          **changes: Fields that win over the file.

        Raises:
          RequestError: As the constructor.
        """
        found = {name: config[key] for key, name in GENERATION_CONFIG_KEYS.items() if config.get(key) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        return cls(**{**found, **changes})

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Make what a web request asks for: None means the default, and `logit_bias` is cut to [-100, 100].

        `max_tokens=None` keeps its meaning, as many as the context holds.

        Raises:
          RequestError: As the constructor.
        """
        given: dict[str, Any] = {}
        given.update((name, value) for name, value in values.items() if value is not None or name == "max_tokens")
        params = cls(**given)
        if params.logit_bias is None:
            return params
        return params.clone(logit_bias={key: min(max(bias, -100.0), 100.0) for key, bias in params.logit_bias.items()})

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with some fields changed, checked like a new one."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{**values, **changes})

    @property
    def is_greedy(self) -> bool:
        """Return whether each token is the most likely one."""
        return self.temperature == 0.0

    @property
    def num_logprobs(self) -> int | None:
        """Entries asked for at each sampled position, beside the sampled token; -1: all; None: no log probabilities."""
        if self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def needs_logprobs(self) -> bool:
        """Return whether any log probabilities are to be returned."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Return whether it may start from keys and values computed for others."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` with the type it really has after normalisation."""
        return tuple(self.stop or ())

    def __repr__(self) -> str:
        return changed_fields(self)


@checks_fields(checked_beam_search)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How a beam search goes, with vLLM's names and defaults. Immutable.

    Raises:
      RequestError: A value missing, of the wrong type or out of range, or an unknown name.
    """

    beam_width: int
    """Texts kept at each step and returned, 1 to 16384."""
    max_tokens: int
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    temperature: float = 0.0
    """As in `SamplingParams`; it matters only where the engine's log probabilities are processed ones."""
    length_penalty: float = 1.0
    """Texts are compared by log probability / length to this power, in [-32, 32]."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token that ends a text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""


def check_against(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Check what depends on the engine.

    Args:
      params: Checked by itself already.
      vocab_size: Token ids are below it.
      max_logprobs: Most log probabilities a position; -1: as many as the vocabulary has tokens.

    Raises:
      RequestError: More log probabilities than that, or a token id out of the vocabulary.
    """
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if name == "logprobs" and params.logprob_token_ids is not None:
            continue
        if count is not None and (vocab_size if count == -1 else count) > limit:
            shown = f"-1 (all {vocab_size} tokens)" if count == -1 else count
            message = f"{name} must be at most {limit}, the engine's max_logprobs; got {shown}"
            raise RequestError(message, parameter=name, value=count)
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_token_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids or () if token_id >= vocab_size]
    if outside:
        message = f"{name} must have token ids from 0 to {vocab_size - 1}, got {outside}"
        raise RequestError(message, parameter=name, value=outside)
