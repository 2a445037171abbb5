"""Sampling parameters and stop conditions of a request: vLLM's names, defaults and checks (`vllm/sampling_params.py`).

Everything is checked and normalized once, before the object exists, so the engine reads plain values.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.api.field_checks import changed_fields, checks_fields, wrong_field
from jaxserve.api.sampling_checks import BEAM_CHECKS, SAMPLING_CHECKS, RequestOutputKind, checked_together
from jaxserve.api.sampling_options import SAMPLING_OPTIONS
from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams

GENERATION_CONFIG_KEYS = MappingProxyType(
    {
        **{name: name for name, option in SAMPLING_OPTIONS.items() if option.in_generation_config},
        "max_new_tokens": "max_tokens",
    }
)
"""vLLM's keys of generation_config.json, each with its field."""
_FEATURES = (
    "stop stop_token_ids logprobs prompt_logprobs logprob_token_ids structured_outputs logit_bias allowed_token_ids"
    " bad_words thinking_token_budget repetition_detection extra_args"
).split()


@checks_fields(checked_together, SAMPLING_CHECKS)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and defaults. Immutable; `clone` makes a changed copy.

    Raises:
      RequestError: A value has the wrong type or is out of range, or a name is unknown (the nearest is suggested).
    """

    n: int = 1
    """Number of completions of the prompt, 1 to 16384; must be 1 when greedy."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens once per occurrence in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely: divides positive logits and multiplies negative ones."""
    temperature: float = 1.0
    """0 is greedy; otherwise 0.01 to 2 (smaller positive values are raised to 0.01 with a warning)."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose total probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Exclude tokens less likely than this fraction of the most likely one's probability, in [0, 1]."""
    seed: int | None = None
    """0 to 2**63 - 1 for a reproducible request; None or -1: derived from the engine's seed."""
    stop: str | Sequence[str] | None = None
    """Up to 64 stop strings of up to 256 characters, stored as a tuple; the text is cut before the first match."""
    stop_token_ids: Sequence[int] | None = None
    """Up to 1024 token ids that end the completion, stored as a tuple."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Largest number of tokens to generate; None or -1: as many as fit the context."""
    min_tokens: int = 0
    """Ignore the end of sequence and stop strings before this many tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to return logprobs of per position (and the sampled one); -1: all; True is 1."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return logprobs of per prompt token."""
    logprob_token_ids: Sequence[int] | None = None
    """Return logprobs of these tokens, at most 128, instead of the most likely ones; stored as a tuple."""
    flat_logprobs: bool = False
    """Return logprobs as `FlatLogprobs`, a few long lists, instead of one dict per position."""
    detokenize: bool = True
    """Convert tokens to text; False leaves `CompletionOutput.text` empty and `Logprob.decoded_token` None."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """No effect, as with vLLM's fast tokenizers: these and sentencepiece add no such spaces."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string instead of before it."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of each streamed output: CUMULATIVE everything so far, DELTA new tokens, FINAL_ONLY one output; or its
    name."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the output, such as a JSON schema; or a dict of its fields."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    """Added to the logits of these token ids, at most 1024 (keys may be strings)."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled, stored as a tuple."""
    bad_words: Sequence[str] | None = None
    """Up to 1024 strings whose last token is not sampled after their other tokens, stored as a tuple; with and without
    a space before them they make up to 128 token sequences."""
    thinking_token_budget: int | None = None
    """Largest number of reasoning tokens, after which the end of reasoning is forced; None or -1: no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """When to stop a completion that repeats itself; or a dict of its fields."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt instead of reading the prefix cache; None: only with `prompt_logprobs`, which need
    it."""
    extra_args: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    """JSON values for custom logits processors, by name."""

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **changes: Any) -> "SamplingParams":
        """Build the default parameters of a model.

        Args:
          config: Contents of `generation_config.json`. `do_sample: false` means temperature 0; keys that do not concern
            sampling are ignored.
          **changes: Fields that replace the file's.

        Raises:
          RequestError: As the constructor.
        """
        found = {name: config[key] for key, name in GENERATION_CONFIG_KEYS.items() if config.get(key) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        return cls(**{**found, **changes})

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Build the parameters of a web request: None means the default, and `logit_bias` is clipped to [-100, 100].

        `max_tokens=None` keeps its meaning: as many as fit the context.

        Raises:
          RequestError: As the constructor.
        """
        given: dict[str, Any] = {
            name: value for name, value in values.items() if value is not None or name == "max_tokens"
        }
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
        """Whether each sampled token is the argmax."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether only the numeric options, lengths and forms of output are set: no logprobs, constraints or stops."""
        return not self.min_tokens and all(getattr(self, name) in (None, ()) for name in _FEATURES)

    @property
    def num_logprobs(self) -> int | None:
        """Number of logprobs per sampled position, besides the sampled token; -1: all; None: no logprobs."""
        if self.logprob_token_ids is not None:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def needs_logprobs(self) -> bool:
        """Whether any logprobs are returned."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may reuse keys and values computed for other requests."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, with its type after normalization."""
        return tuple(self.stop or ())

    def __repr__(self) -> str:
        return changed_fields(self)


@checks_fields(dict, BEAM_CHECKS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's names and defaults. Immutable.

    Raises:
      RequestError: A value is missing, has the wrong type or is out of range, or a name is unknown.
    """

    beam_width: int
    """Sequences kept at each step and returned, 1 to 16384."""
    max_tokens: int
    """Largest number of tokens to generate."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    temperature: float = 0.0
    """As in `SamplingParams`; it matters only if the engine's logprobs are processed ones."""
    length_penalty: float = 1.0
    """Sequences are compared by logprob / length to this power, in [-32, 32]."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token at the end of a sequence."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""


def check_against(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Check parameters against limits of the engine.

    Args:
      params: Already checked by themselves.
      vocab_size: Number of token ids.
      max_logprobs: Largest number of logprobs per position; -1: the vocabulary size.

    Raises:
      RequestError: Too many logprobs, or a token id outside the vocabulary.
    """
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if name == "logprobs" and params.logprob_token_ids is not None:
            continue
        if count is not None and (vocab_size if count == -1 else count) > limit:
            shown = f"-1 (all {vocab_size} tokens)" if count == -1 else count
            raise wrong_field(name, count, f"must be at most {limit}, the engine's max_logprobs; got {shown}")
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_token_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids or () if token_id >= vocab_size]
    if outside:
        shown = f"{outside[:8]} and {len(outside) - 8} more" if len(outside) > 8 else outside
        raise wrong_field(name, outside[0], f"must have token ids from 0 to {vocab_size - 1}, got {shown}")
