"""State of a running request: its samples, their text and logprobs, and the outputs built from them."""

import concurrent.futures
import dataclasses
import time
from typing import Any, NamedTuple

from jaxserve.errors import RequestError
from jaxserve.logprobs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan_draft import ScoredChunk
from jaxserve.scheduling.sequence import Sequence
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.text_offsets import TextOffsets
from jaxserve.text.tokenizer import Tokenizer


def logprob_entry(
    token: int,
    row: int,
    scores: TokenLogprobs,
    count: int,
    tokenizer: Tokenizer | None,
    skip_special_tokens: bool = False,
) -> dict[int, Logprob]:
    """Return the logprobs of a token and of the ``count`` most likely ones; -1 for all that the step computed."""
    shown = _Shown(tokenizer, skip_special_tokens)
    entry = {token: Logprob(float(scores.chosen[row]), int(scores.ranks[row]), *shown.of(token))}
    size = scores.top.shape[1] if count < 0 else count
    most_likely = zip(scores.top_ids[row, :size].tolist(), scores.top[row, :size].tolist(), strict=True)
    for rank, (token_id, logprob) in enumerate(most_likely, 1):
        if token_id not in entry:
            entry[token_id] = Logprob(logprob, rank, *shown.of(token_id))
    return entry


def sample_entry(
    token: int, row: int, scores: TokenLogprobs, params: SamplingParams, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Return the logprobs of a sampled token, and of ``logprob_token_ids`` or else of the most likely tokens."""
    tokenizer, skips = tokenizer if params.detokenize else None, params.skip_special_tokens
    named = params.logprob_token_ids
    if named is None:
        return logprob_entry(token, row, scores, params.logprobs or 0, tokenizer, skips)
    entry = logprob_entry(token, row, scores, 0, tokenizer, skips)
    for token_id, logprob in zip(named, scores.tracked[row, : len(named)].tolist(), strict=True):
        if token_id not in entry:
            entry[token_id] = Logprob(logprob, None, *_Shown(tokenizer, skips).of(token_id))
    return entry


class _Shown(NamedTuple):
    """How logprobs show tokens."""

    tokenizer: Tokenizer | None
    skips_special: bool

    def of(self, token: int) -> tuple[str | None, bytes | None]:
        """Return a token's text and bytes, as `Logprob` has them."""
        if self.tokenizer is None:
            return None, None
        return self.tokenizer.token_text(token), self.tokenizer.token_bytes(token, self.skips_special)


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One of a request's ``n`` completions.

    Attributes:
        index: Index of the completion, from 0.
        sequence: Its sequence, owned by the scheduler.
        detokenizer: Its detokenizer; None without text.
        logprobs: One entry per output token; None if not requested.
        offsets: Finds where its tokens begin in its text; None without text or logprobs.
        cumulative_logprob: Sum over the output tokens.
        last_token_s: Time of its last token, in seconds of ``time.monotonic()``; 0 before the first.
        num_returned: Number of output tokens returned in deltas.
        has_returned_reason: Whether a delta has returned its finish reason.
    """

    index: int
    sequence: Sequence
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None
    offsets: TextOffsets | None = None
    cumulative_logprob: float = 0.0
    last_token_s: float = 0.0
    num_returned: int = 0
    has_returned_reason: bool = False

    def shown_tokens(self, tokens: list[int], keeps_stop_token: bool) -> list[int]:
        """Return the new tokens to detokenize: without a final stop token, unless ``keeps_stop_token``."""
        sequence = self.sequence
        ends_in_stop_token = sequence.finish_reason == "stop" and tokens[-1] in sequence.stop_ids
        return tokens[:-1] if ends_in_stop_token and not keeps_stop_token else tokens

    def score(
        self,
        tokens: list[int],
        first: int,
        scores: TokenLogprobs,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        num_shown: int,
    ) -> None:
        """Append the logprobs of new tokens, which are a step's samples from index ``first`` on.

        Args:
            tokens: The new tokens.
            first: Index of the first one in ``scores``.
            scores: Logprobs of the step's samples.
            params: Parameters of the request.
            tokenizer: Decodes the tokens.
            num_shown: Number of tokens whose text is in the output; a stop token after them is not.
        """
        assert self.logprobs is not None
        for index, token in enumerate(tokens):
            entry = sample_entry(token, first + index, scores, params, tokenizer)
            if self.offsets is not None:
                is_shown, own = index < num_shown, entry[token]
                offset, raw = self.offsets.add(token) if is_shown else (self.offsets.end, b"")
                raw = own.token_bytes if raw is None else raw
                entry[token] = dataclasses.replace(own, text_offset=offset, token_bytes=raw)
            self.logprobs.append(entry)
            self.cumulative_logprob += entry[token].logprob

    def output(self) -> CompletionOutput:
        """Return the completion so far."""
        sequence = self.sequence
        reason = sequence.finish_reason
        detokenizer = self.detokenizer
        if detokenizer is not None and reason is not None:
            detokenizer.flush()
        logprobs = self.logprobs
        return CompletionOutput(
            index=self.index,
            text="" if detokenizer is None else detokenizer.text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=logprobs[:] if logprobs is not None and reason is None else logprobs,
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
        )

    def take(self) -> CompletionOutput | None:
        """Return the delta since the last ``take``, or None if it is empty, at the cost of the delta only."""
        sequence = self.sequence
        reason = sequence.finish_reason
        start = sequence.num_prompt_tokens + self.num_returned
        token_ids = sequence.token_ids[start:]
        if not token_ids and (reason is None or self.has_returned_reason):
            return None
        detokenizer = self.detokenizer
        if detokenizer is not None and reason is not None:
            detokenizer.flush()
        logprobs = self.logprobs
        output = CompletionOutput(
            index=self.index,
            text="" if detokenizer is None else detokenizer.take(),
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[self.num_returned :],
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
        )
        self.num_returned += len(token_ids)
        self.has_returned_reason = reason is not None
        return output


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request from submission to its last token.

    Times are in seconds of ``time.monotonic()``, except ``arrival_time`` in seconds of ``time.time()``. ``grammar`` is
    the compiled structured output. If ``error`` is set, the samples have the finish reason "error". A request with
    ``pooling`` generates no tokens: it finishes with its ``embedding`` at ``finished_s``, and ``params`` is unused.
    ``prompt_offsets`` are where the prompt's tokens begin in its text, if prompt logprobs show it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    lane: int
    arrival_s: float
    queued_s: float
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_offsets: list[int] | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    grammar: concurrent.futures.Future[Any] | None = None
    error: RequestError | None = None
    pooling: PoolingParams | None = None
    embedding: list[float] | None = None
    is_corrupted: bool = False
    arrival_time: float = dataclasses.field(init=False)
    _has_returned_prompt: bool = False

    def __post_init__(self):
        self.arrival_time = time.time() - (time.monotonic() - self.arrival_s)

    def is_finished(self) -> bool:
        """Whether every sample has finished."""
        for sample in self.samples:
            if sample.sequence.finish_reason is None:
                return False
        return True

    def output(self, with_metrics: bool = False) -> RequestOutput:
        """Return the output so far, whatever the request's output kind."""
        return self._output([sample.output() for sample in self.samples], self._prompt_logprobs(), with_metrics)

    def next_output(self, with_metrics: bool = False) -> RequestOutput | None:
        """Return the next output of the request's output kind; None if there is none yet.

        CUMULATIVE is everything so far; FINAL_ONLY the same, once the request has finished. DELTA is the addition since
        the last call: samples without new tokens are omitted, finish reasons and prompt logprobs are returned once.
        """
        kind = self.params.output_kind
        if kind is not RequestOutputKind.DELTA:
            return (
                None if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished() else self.output(with_metrics)
            )
        outputs = [output for sample in self.samples if (output := sample.take()) is not None]
        if not outputs:
            return None
        prompt_logprobs = None if self._has_returned_prompt else self._prompt_logprobs()
        self._has_returned_prompt = True
        return self._output(outputs, prompt_logprobs, with_metrics)

    def metrics(self) -> RequestMetrics:
        """Return the counts and times so far."""
        first_token_s = self.first_token_s
        return RequestMetrics(
            num_generation_tokens=sum(sample.sequence.num_output_tokens for sample in self.samples),
            arrival_time=self.arrival_time,
            queued_ts=self.queued_s,
            scheduled_ts=self.scheduled_s or 0.0,
            first_token_ts=first_token_s or 0.0,
            last_token_ts=max(sample.last_token_s for sample in self.samples),
            first_token_latency=0.0 if first_token_s is None else first_token_s - self.arrival_s,
            is_corrupted=self.is_corrupted,
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """Number of prompt tokens found in the prefix cache; None before the request first runs."""
        count = self.samples[0].sequence.num_cached_tokens
        return None if count < 0 else count

    def note_scheduled(self, now: float) -> None:
        """Set the time of the first step, unless it is set."""
        if self.scheduled_s is None:
            self.scheduled_s = now

    def add_prompt_logprobs(self, chunk: ScoredChunk, scores: TokenLogprobs, tokenizer: Tokenizer | None) -> None:
        """Add the logprobs of the prompt tokens after each token of a chunk."""
        assert self.prompt_logprobs is not None
        count = self.params.prompt_logprobs or 0
        tokenizer = tokenizer if self.params.detokenize else None
        for i, target in enumerate(chunk.targets):
            if target >= 0:
                entry, position = logprob_entry(target, chunk.first + i, scores, count, tokenizer), chunk.start + i + 1
                if self.prompt_offsets:
                    entry[target] = dataclasses.replace(entry[target], text_offset=self.prompt_offsets[position])
                self.prompt_logprobs[position] = entry

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        entries = self.prompt_logprobs
        if entries is None or not self.params.flat_logprobs:
            return entries
        return FlatLogprobs.of(entries)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: PromptLogprobs | None, with_metrics: bool
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished(),
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics() if with_metrics else None,
            num_cached_tokens=self.num_cached_tokens,
            error=None if self.error is None else str(self.error),
            embedding=self.embedding,
        )
