"""State of a running request: its samples, their text and logprobs, and the outputs built from them."""

import collections
import concurrent.futures
import dataclasses
import time
from typing import Any, NamedTuple, cast

from jaxserve.api.draft_metrics import DraftReport, RequestSpecDecodeMetrics
from jaxserve.api.errors import RequestError, own_failure
from jaxserve.api.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from jaxserve.api.outputs import CompletionOutput, PrefixMetrics, RequestMetrics, RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.prompt_scores import packed_scores
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.endings import shown_end
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import ScoredChunk
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.text_offsets import TextOffsets
from jaxserve.text.tokenizer import Tokenizer

MAX_UNREAD = 64
"""Tokens of a sample whose logprobs wait for an output: more would hold up the steps of others when they are made."""


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
    skips = params.skip_special_tokens
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
    """One of a request's ``n`` completions: its sequence, and text and logprobs, made of the tokens when they are read.

    Attributes:
        sequence: Its sequence, owned by the scheduler.
        detokenizer: Its detokenizer; None without text.
        logprobs: One entry per output token that has been read; None if not requested.
        offsets: Finds where its tokens begin in its text; None without text or logprobs.
        draft_report: What is reported about its drafts once it has finished; None: nothing.
        scores: Logprobs of each output token that has not been read.
        cumulative_logprob: Sum over the output tokens that have been read.
        num_returned: Number of output tokens returned in deltas.
        has_returned_reason: Whether a delta has returned its finish reason.
    """

    sequence: Sequence
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None = None
    offsets: TextOffsets | None = None
    draft_report: DraftReport | None = None
    scores: collections.deque[TokenLogprobs] = dataclasses.field(default_factory=collections.deque[TokenLogprobs])
    cumulative_logprob: float = 0.0
    num_returned: int = 0
    has_returned_reason: bool = False

    def score(self, first: int, scores: TokenLogprobs) -> None:
        """Keep the logprobs of the newest tokens, which are a step's samples from index ``first`` on."""
        assert self.logprobs is not None
        params = self.sequence.request.params
        width = scores.top.shape[1] if params.logprobs == -1 else params.logprobs or 0
        num_tracked = len(params.logprob_token_ids or ())
        for row in range(first, first + self.sequence.num_output_tokens - len(self.logprobs) - len(self.scores)):
            own = slice(row, row + 1)
            top = scores.top_ids[own, :width].copy(), scores.top[own, :width].copy()
            tracked = scores.tracked[own, :num_tracked].copy()
            self.scores.append(TokenLogprobs(scores.chosen[own].copy(), scores.ranks[own].copy(), *top, tracked))

    def read(self, tokenizer: Tokenizer | None) -> None:
        """Make the text and the logprobs of the tokens since the last call.

        Args:
            tokenizer: Decodes the tokens of logprobs.
        """
        sequence, detokenizer, reason = self.sequence, self.detokenizer, self.sequence.finish_reason
        end = shown_end(sequence, reason)
        if detokenizer is not None:
            detokenizer.push_tokens(sequence.token_ids[sequence.num_prompt_tokens + detokenizer.num_tokens : end])
            if reason is not None:
                detokenizer.flush()
        while self.scores:
            assert self.logprobs is not None
            position = sequence.num_prompt_tokens + len(self.logprobs)
            token = sequence.token_ids[position]
            entry = sample_entry(token, 0, self.scores[0], sequence.request.params, tokenizer)
            if self.offsets is not None:
                own = entry[token]
                offset, raw = self.offsets.add(token) if position < end else (self.offsets.end, b"")
                raw = own.token_bytes if raw is None else raw
                entry[token] = dataclasses.replace(own, text_offset=offset, token_bytes=raw)
            self.logprobs.append(entry)
            self.scores.popleft()
            self.cumulative_logprob += entry[token].logprob

    def output(self, failed: bool = False) -> CompletionOutput:
        """Return the completion as far as it has been read; ``failed`` if its request has failed."""
        logprobs, text = self.logprobs, "" if self.detokenizer is None else self.detokenizer.text
        if logprobs is not None and self.sequence.finish_reason is None:
            logprobs = logprobs[:]
        return self._output(0, text, logprobs, failed)

    def take(self, failed: bool = False) -> CompletionOutput | None:
        """Return the delta since the last ``take``, or None if it is too short, at the cost of the delta only."""
        start, is_finished = self.num_returned, self.sequence.finish_reason is not None
        least = self.sequence.request.stream_interval if start else 1
        if self.sequence.num_output_tokens - start < least and (self.has_returned_reason or not is_finished):
            return None
        self.num_returned, self.has_returned_reason = self.sequence.num_output_tokens, is_finished
        text = "" if self.detokenizer is None else self.detokenizer.take()
        return self._output(start, text, None if self.logprobs is None else self.logprobs[start:], failed)

    def _output(self, start: int, text: str, logprobs: SampleLogprobs | None, failed: bool) -> CompletionOutput:
        sequence = self.sequence
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + start :],
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason="error" if failed else sequence.finish_reason,
            stop_reason=None if failed else sequence.stop_reason,
            spec_decode_metrics=None if self.draft_report is None else self._drafts(self.draft_report),
        )

    def _drafts(self, report: DraftReport) -> RequestSpecDecodeMetrics | None:
        sequence = self.sequence
        return None if sequence.finish_reason is None else report.of(sequence.drafted, sequence.accepted)


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request from submission to its last token.

    Attributes:
        request: The request, with parameters that fit the model.
        prompt_token_ids: The tokens of its prompt.
        samples: Its completions. A pooling request has one, which gets no tokens.
        arrival_s: When it arrived; this and other times are in seconds of ``time.monotonic()``.
        queued_s: When it was prepared.
        tokenizer: Decodes the tokens of logprobs; None to leave their text out.
        prompt_logprobs: Logprobs of the prompt as far as computed; None if not requested.
        sends_arrays: Whether outputs have the logprobs of the prompt as they are kept, and not as objects.
        prompt_offsets: Where the prompt's tokens begin in its text; None without text or logprobs of the prompt.
        grammar: The compiled structured output.
        lane: Index of the scheduler that runs it.
        finished_s: When a pooling request finished.
        error: Why it failed: then its samples have the finish reason "error".
        embedding: The vector of a pooling request.
        is_corrupted: Whether the model's logits or hidden states were unusable.
        arrival_time: When it arrived, in seconds of ``time.time()``.
    """

    request: Request
    prompt_token_ids: list[int]
    samples: list[Sample]
    arrival_s: float
    queued_s: float
    tokenizer: Tokenizer | None = None
    prompt_logprobs: PackedLogprobs | None = None
    prompt_offsets: list[int] | None = None
    grammar: concurrent.futures.Future[Any] | None = None
    lane: int = 0
    finished_s: float | None = None
    error: RequestError | None = None
    embedding: list[float] | None = None
    is_corrupted: bool = False
    sends_arrays: bool = False
    arrival_time: float = dataclasses.field(init=False)
    _has_returned_prompt: bool = False

    def __post_init__(self):
        self.arrival_time = time.time() - (time.monotonic() - self.arrival_s)

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def first_token_s(self) -> float | None:
        """When its first token arrived, that of the sample which the others follow; None before."""
        return self.samples[0].sequence.first_token_s or None

    def is_finished(self) -> bool:
        """Whether every sample has finished."""
        for sample in self.samples:
            if sample.sequence.finish_reason is None:
                return False
        return True

    def output(self, with_metrics: bool = False) -> RequestOutput:
        """Return the output so far, whatever the request's output kind.

        Raises:
            Exception: Its text or logprobs could not be made; after ``error`` is set, the output has what was made.
        """
        self._read()
        outputs = [sample.output(self.error is not None) for sample in self.samples]
        return self._output(outputs, with_metrics, True)

    def next_output(self, with_metrics: bool = False) -> RequestOutput | None:
        """Return the next output of the request's output kind; None if there is none yet.

        CUMULATIVE is everything so far; FINAL_ONLY the same, once the request has finished. DELTA is the addition since
        the last call: samples with too few new tokens (``Request.stream_interval``) are omitted, finish reasons and
        prompt logprobs are returned once.

        Raises:
            Exception: As in ``output``.
        """
        kind = self.request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished():
            return None
        if kind is not RequestOutputKind.DELTA:
            return self.output(with_metrics)
        self._read()
        failed = self.error is not None
        outputs = [output for sample in self.samples if (output := sample.take(failed)) is not None]
        if not outputs:
            return None
        is_first, self._has_returned_prompt = not self._has_returned_prompt, True
        return self._output(outputs, with_metrics, is_first)

    def _read(self) -> None:
        """Make the text and logprobs of new tokens."""
        for sample in self.samples:
            try:
                sample.read(self.tokenizer)
            except BaseException as error:
                failure = own_failure(error)
                if self.error is None:
                    raise failure from error

    def metrics(self) -> RequestMetrics:
        """Return the counts and times so far."""
        first_token_s, sequences = self.first_token_s, [sample.sequence for sample in self.samples]
        return RequestMetrics(
            num_generation_tokens=sum(sample.sequence.num_output_tokens for sample in self.samples),
            arrival_time=self.arrival_time,
            queued_ts=self.queued_s,
            scheduled_ts=self.samples[0].sequence.scheduled_s,
            first_token_ts=first_token_s or 0.0,
            last_token_ts=max(sample.sequence.last_token_s for sample in self.samples),
            first_token_latency=0.0 if first_token_s is None else first_token_s - self.arrival_s,
            num_drafts=sum(len(sequence.drafted) for sequence in sequences),
            num_draft_tokens=sum(sequence.num_draft_tokens for sequence in sequences),
            num_accepted_tokens=sum(sequence.num_accepted_tokens for sequence in sequences),
            prefix=self._prefix_metrics(),
            is_corrupted=self.is_corrupted,
        )

    def _prefix_metrics(self) -> PrefixMetrics | None:
        """Return what the prefix cache had of the prompt; None before the request first runs."""
        first = self.samples[0].sequence
        if first.num_cached_tokens < 0:
            return None
        shared = max(first.num_shared_tokens, first.num_cached_tokens)
        return PrefixMetrics(
            num_cached_tokens=first.num_cached_tokens,
            num_shared_tokens=shared,
            num_recomputed_tokens=shared - first.num_cached_tokens,
            miss_reason=first.miss_reason,
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """Number of prompt tokens found in the prefix cache; None before the request first runs."""
        count = self.samples[0].sequence.num_cached_tokens
        return None if count < 0 else count

    def add_prompt_logprobs(self, chunk: ScoredChunk, scores: TokenLogprobs) -> None:
        """Add the logprobs of the prompt tokens after each token of a chunk, but of those that it has already."""
        held = self.prompt_logprobs
        assert held is not None
        start, targets = chunk.start + 1, [target for target in chunk.targets if target >= 0]
        num_old = min(max(len(held) - start, 0), len(targets))
        if num_old == len(targets):
            return
        held.add_empty(max(start - len(held), 0))  # the first token, which nothing predicts
        start, targets = start + num_old, targets[num_old:]
        offsets = self.prompt_offsets[start : start + len(targets)] if self.prompt_offsets else None
        shown = _Shown(self.tokenizer, False).of
        count = self.request.params.prompt_logprobs or 0
        held.extend(packed_scores(targets, chunk.first + num_old, scores, count, shown, offsets))

    def _prompt_logprobs(self, held: PackedLogprobs) -> PromptLogprobs:
        """Return the logprobs of the prompt as outputs have them."""
        if len(held) < len(self.prompt_token_ids):
            held = dataclasses.replace(held)
            held.add_empty(len(self.prompt_token_ids) - len(held))
        if self.sends_arrays:
            return cast("Any", held)  # reads like a list
        flat = held.unpacked()
        return flat if self.request.params.flat_logprobs else [position or None for position in flat]

    def _output(self, outputs: list[CompletionOutput], with_metrics: bool, with_prompt_logprobs: bool) -> RequestOutput:
        held = self.prompt_logprobs if with_prompt_logprobs else None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished(),
            prompt_logprobs=None if held is None else self._prompt_logprobs(held),
            metrics=self.metrics() if with_metrics else None,
            num_cached_tokens=self.num_cached_tokens,
            error=None if self.error is None else str(self.error),
            embedding=self.embedding,
        )
