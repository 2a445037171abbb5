"""One request while it runs: its samples, their text and logprobs, and the output made of them."""

import dataclasses
import time

from jaxserve.engine.detokenizer import Detokenizer
from jaxserve.engine.plan import PrefillRow
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestMetrics, RequestOutput, SampleLogprobs
from jaxserve.sampling.sampler import TokenLogprobs
from jaxserve.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One of a request's ``n`` texts."""

    index: int
    sequence: Sequence
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None
    cumulative_logprob: float = 0.0

    def output(self) -> CompletionOutput:
        """What there is of it so far."""
        sequence = self.sequence
        return CompletionOutput(
            index=self.index,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request from submission to its last token. Times are in seconds of ``time.monotonic()``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    replica: int
    arrival_s: float
    queued_s: float
    prompt_logprobs: PromptLogprobs | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.sequence.finish_reason is not None for sample in self.samples)

    def output(self, with_metrics: bool = False) -> RequestOutput:
        """What there is of it so far."""
        metrics = None
        if with_metrics:
            metrics = RequestMetrics(
                arrival_s=self.arrival_s,
                queued_s=self.queued_s,
                scheduled_s=self.scheduled_s,
                first_token_s=self.first_token_s,
                finished_s=self.finished_s,
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sample.output() for sample in self.samples],
            finished=self.is_finished(),
            prompt_logprobs=self.prompt_logprobs,
            metrics=metrics,
        )

    def note_scheduled(self) -> None:
        """Notes the time of the first step."""
        if self.scheduled_s is None:
            self.scheduled_s = time.monotonic()

    def note_progress(self) -> None:
        """Notes the times of the first token and of the end."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now
        if self.finished_s is None and self.is_finished():
            self.finished_s = now

    def add_prompt_logprobs(
        self, chunk: PrefillRow, first: int, scores: TokenLogprobs, tokenizer: Tokenizer | None
    ) -> None:
        """Takes the logprobs of the prompt tokens behind a chunk, which starts at query token ``first`` of the step."""
        assert self.prompt_logprobs is not None and chunk.targets is not None
        count = self.params.prompt_logprobs or 0
        for i, target in enumerate(chunk.targets):
            if target >= 0:
                entry = logprob_entry(target, first + i, scores, count, tokenizer)
                self.prompt_logprobs[chunk.start + i + 1] = entry


def logprob_entry(
    token: int, row: int, scores: TokenLogprobs, count: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Logprobs of a token and of the ``count`` likeliest ones."""
    found = {token: (float(scores.chosen[row]), int(scores.ranks[row]))}
    for rank in range(count):
        found.setdefault(int(scores.top_ids[row, rank]), (float(scores.top[row, rank]), rank + 1))
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, (logprob, rank) in found.items()
    }
