"""The results of requests: vLLM's classes and field names (`vllm/outputs.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxserve.api.draft_metrics import RequestSpecDecodeMetrics
from jaxserve.api.errors import RequestFailedError
from jaxserve.api.logprobs import Logprob, PromptLogprobs, SampleLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` sequences generated from a prompt."""

    index: int
    """Index of the sequence, 0 to n - 1."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the sampled tokens; None unless logprobs were requested."""
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    """None while it is being generated."""
    stop_reason: int | str | None = None
    """The stop string or stop token id; None for the end-of-sequence token and for other finish reasons."""
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    """Its drafts, once it is finished; None unless the engine has `per_request_spec_decode_metrics`."""

    def finished(self) -> bool:
        """Return whether the sequence is finished."""
        return self.finish_reason is not None

    def extend(self, delta: "CompletionOutput") -> None:
        """Append the next delta of the same sequence to this one."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.spec_decode_metrics = delta.spec_decode_metrics

    def __repr__(self) -> str:
        """Return the text and the finish reason; token ids and logprobs as counts."""
        return _described(self, always="finish_reason")


@dataclass(slots=True, kw_only=True)
class PrefixMetrics:
    """What the prefix cache had of a prompt when its first completion was admitted, in tokens."""

    num_cached_tokens: int = 0
    """Tokens that were not computed again."""
    num_shared_tokens: int = 0
    """Tokens whose keys and values were cached: at least as many, and more where a model with recurrent layers had no
    state to go on from."""
    num_recomputed_tokens: int = 0
    """Those of the shared tokens that were computed again."""
    miss_reason: str | None = None
    """Why not all of the prompt but its last token was cached: `first_seen` (no cached prompt goes on like this one),
    `no_checkpoint` (no state after the shared tokens was kept), `evicted` (what comes next, or its state, was dropped
    for other requests), `new_salt` (no earlier request had the same salt), or `not_read` (the request may not use the
    cache); None if all was."""


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Counts and times of a request so far: the fields of vLLM's `RequestStateStats`, and counts of drafts.

    Fields that end in `_ts` are seconds of `time.monotonic()`; 0.0 if the event has not happened.
    """

    num_generation_tokens: int = 0
    """Number of tokens of all completions."""
    arrival_time: float = 0.0
    """When the request arrived, in seconds since the epoch: the clock of `time.time()`, unlike the other times."""
    queued_ts: float = 0.0
    """When it was checked, tokenized and queued."""
    scheduled_ts: float = 0.0
    """When its first chunk of prefill was scheduled."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    """When its newest token arrived on the host."""
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    num_drafts: int = 0
    """Number of steps that verified draft tokens, of all completions."""
    num_draft_tokens: int = 0
    """Number of these draft tokens."""
    num_accepted_tokens: int = 0
    """Number of accepted ones, without the token that each step samples after them."""
    prefix: PrefixMetrics | None = None
    """The prefix cache's part; None before the request first runs."""
    is_corrupted: bool = False
    """Whether the model produced NaN logits or non-finite hidden states; the request has then failed."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and all completions so far."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids only."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` completions, ordered by index."""
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics | None = None
    """None unless the engine runs with `disable_log_stats=False`."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache."""
    error: str | None = None
    """The error message if a finish reason is `error`."""
    embedding: list[float] | None = None
    """The prompt's vector, if the request asks for one instead of text; `outputs` then has one item without tokens."""

    def __repr__(self) -> str:
        """Return all fields, with long lists shortened."""
        return _described(self, always="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One of the sequences that a beam search found."""

    tokens: list[int]
    """The prompt and the completion."""
    logprobs: list[dict[int, Logprob]]
    """One dict per generated token: the candidates of that step."""
    cum_logprob: float = 0.0
    """Sum over the generated tokens."""
    text: str | None = None
    """The text of all `tokens`, the prompt included; None without a tokenizer."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt."""

    sequences: list[BeamSearchSequence]
    """At most `beam_width`, best first."""


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of `encode` for a prompt."""

    data: list[float]
    """The vector."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The result of `embed` for a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)

    def __repr__(self) -> str:
        """Return the length of the vector."""
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""

    @classmethod
    def of(cls, output: RequestOutput) -> "PoolingRequestOutput":
        """Convert the output of a pooling request.

        Raises:
            RequestFailedError: The request was aborted before its vector was computed.
        """
        if output.embedding is None:
            raise RequestFailedError(f"request {output.request_id} was aborted before its vector was computed")
        return cls(
            request_id=output.request_id,
            outputs=PoolingOutput(output.embedding),
            prompt_token_ids=output.prompt_token_ids,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> "EmbeddingRequestOutput":
        """Convert the output of a pooling request."""
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(output.outputs.data),
            prompt_token_ids=output.prompt_token_ids,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens,
        )


def _described(output: CompletionOutput | RequestOutput, always: str) -> str:
    """Return the fields that are set, and the one that is always shown."""
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    parts = [
        f"{name}={_SHORTENED.get(name, repr)(value)}"
        for name, value in values.items()
        if value is not None or name == always
    ]
    return f"{type(output).__name__}({', '.join(parts)})"


def _listed(token_ids: list[int], limit: int = 16) -> str:
    if len(token_ids) <= limit:
        return repr(token_ids)
    shown = ", ".join(map(str, token_ids[: limit - 1]))
    return f"[{shown}, … {len(token_ids)} ids]"


_SHORTENED: dict[str, Callable[[Any], str]] = {
    "token_ids": _listed,
    "prompt_token_ids": _listed,
    "cumulative_logprob": "{:.4f}".format,
    "logprobs": lambda value: f"[{len(value)} positions]",
    "prompt_logprobs": lambda value: f"[{len(value)} positions]",
    "embedding": lambda value: f"[{len(value)} numbers]",
}
