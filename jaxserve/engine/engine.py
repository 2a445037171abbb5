"""The engine: takes requests, steps, and gives out what became of them."""

import collections
import itertools
import logging
import random
import time

from jaxserve.engine.admission import ModelLimits, admit
from jaxserve.engine.metrics import CompileCounter, Metric
from jaxserve.engine.replica import Replica
from jaxserve.engine.request_state import RequestState, Sample, logprob_entry
from jaxserve.engine.runner import StepResult
from jaxserve.engine.scheduler import Completion
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import FinishReason
from jaxserve.request import PromptInput
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class Engine:
    """Owner of requests and their streams; one thread may use it at a time.

    Args:
        replicas: One for each data slice.
        limits: What a request must keep to.
        tokenizer: None where the model has none; requests then bring token ids and get no text.
        seed: For requests that bring none.
        counter: Counts compilations while stepping.
    """

    def __init__(
        self,
        replicas: list[Replica],
        *,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        seed: int,
        counter: CompileCounter,
    ):
        self.replicas = replicas
        self.limits = limits
        self.tokenizer = tokenizer
        self._counter = counter
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._requests: dict[str, RequestState] = {}
        self._owners: dict[str, tuple[RequestState, Sample]] = {}
        self._totals: collections.Counter[str] = collections.Counter()
        self._finished: collections.Counter[str] = collections.Counter()
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    def submit(self, prompt: PromptInput, params: SamplingParams, arrival_s: float | None = None) -> RequestState:
        """Takes a request.

        Raises:
            RequestError: No token ids, a token id out of the vocabulary, or more tokens than a context can hold.
            EngineDeadError: The engine has failed before.
        """
        self._check_alive()
        replica = min(range(len(self.replicas)), key=lambda i: self.replicas[i].scheduler.num_unfinished)
        request = admit(
            prompt,
            params,
            request_id=str(next(self._ids)),
            replica=replica,
            limits=self.limits,
            tokenizer=self.tokenizer,
            default_seed=self._seeds.getrandbits(32),
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
        )
        self._requests[request.request_id] = request
        for sample in request.samples:
            self._owners[sample.sequence.sequence_id] = (request, sample)
            self.replicas[replica].scheduler.add(sample.sequence)
        return request

    def step(self) -> list[RequestState]:
        """Launches a step on each replica, takes in the results that are due, returns the requests they changed."""
        self._check_alive()
        try:
            with self._counter:
                launched = [replica.launch() for replica in self.replicas]
                found = [r.collect(admitted is None) for r, admitted in zip(self.replicas, launched, strict=True)]
            for sequence in itertools.chain.from_iterable(filter(None, launched)):
                self._owners[sequence.sequence_id][0].note_scheduled()
            return [request for due in found if due is not None for request in self._deliver(*due)]
        except Exception as error:
            self._failure = error
            raise EngineDeadError(f"the engine stopped: {error}") from error

    def abort(self, request: RequestState, reason: FinishReason = "abort") -> None:
        """Ends a request; without effect on one that has ended."""
        for sample in request.samples:
            self.replicas[request.replica].scheduler.finish(sample.sequence, reason)
        self._close(request)

    def metrics(self) -> list[Metric]:
        """The numbers of this moment."""
        schedulers = [replica.scheduler for replica in self.replicas]
        usage = sum(scheduler.allocator.usage for scheduler in schedulers) / len(schedulers)
        gauges = {
            "num_requests_running": sum(len(scheduler.running) for scheduler in schedulers),
            "num_requests_waiting": sum(len(scheduler.waiting) for scheduler in schedulers),
            "kv_cache_usage_perc": usage,
        }
        counters = {
            "num_preemptions": sum(scheduler.num_preemptions for scheduler in schedulers),
            "prompt_tokens": self._totals["prompt_tokens"],
            "generation_tokens": self._totals["generation_tokens"],
            "compiles_after_ready": self._counter.count,
            "steps": sum(replica.num_steps for replica in self.replicas),
            "decode_rows": sum(replica.num_decode_rows for replica in self.replicas),
        }
        found = [Metric("gauge", f"jaxserve:{name}", value, {}) for name, value in gauges.items()]
        found += [Metric("counter", f"jaxserve:{name}", value, {}) for name, value in counters.items()]
        reasons = ("stop", "length", "abort", "error")
        found += [
            Metric("counter", "jaxserve:request_success", self._finished[reason], {"finished_reason": reason})
            for reason in reasons
        ]
        return found

    def close(self) -> None:
        """Frees the devices' memory; the engine is of no use afterwards. Closing it again is without effect."""
        if self._is_closed:
            return
        self._is_closed = True
        self._failure = self._failure or RuntimeError("it was closed")
        for replica in self.replicas:
            replica.close()
        self._counter.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine stopped: {self._failure}") from self._failure

    def _deliver(self, completion: Completion, result: StepResult) -> list[RequestState]:
        """Text and logprobs of a step's tokens, to the requests they belong to."""
        for sequence, chunk, first in completion.scored:
            request, _ = self._owners[sequence.sequence_id]
            assert result.prompt_logprobs is not None
            request.add_prompt_logprobs(chunk, first, result.prompt_logprobs, self.tokenizer)
        changed: dict[str, RequestState] = {}
        for sequence, row, token in completion.sampled:
            if sequence.sequence_id not in self._owners:
                continue  # another sample of its request failed in this step
            request, sample = self._owners[sequence.sequence_id]
            changed[request.request_id] = request
            self._totals["generation_tokens"] += 1
            if request.first_token_s is None:
                self._totals["prompt_tokens"] += len(request.prompt_token_ids)
            try:
                self._extend(request, sample, row, token, result)
            except Exception:
                logger.exception("request %s failed", request.request_id)
                self.abort(request, "error")
            request.note_progress()
        for request in changed.values():
            if request.is_finished():
                self._close(request)
        return list(changed.values())

    def _extend(self, request: RequestState, sample: Sample, row: int, token: int, result: StepResult) -> None:
        """One more token of a sample."""
        sequence = sample.sequence
        if sample.logprobs is not None:
            assert result.logprobs is not None
            entry = logprob_entry(token, row, result.logprobs, request.params.logprobs or 0, self.tokenizer)
            sample.logprobs.append(entry)
            sample.cumulative_logprob += entry[token].logprob
        detokenizer = sample.detokenizer
        if detokenizer is None:
            return
        if sequence.finish_reason == "stop" and not request.params.include_stop_str_in_output:
            detokenizer.flush()
            return
        verdict = detokenizer.push((token,)).stop
        if verdict is not None:
            scheduler = self.replicas[request.replica].scheduler
            scheduler.finish(sequence, "stop", verdict.stop_string)
            sequence.finish_reason, sequence.stop_reason = "stop", verdict.stop_string
        elif sequence.finish_reason is not None:
            detokenizer.flush()

    def _close(self, request: RequestState) -> None:
        """Forgets a request that has ended."""
        if self._requests.pop(request.request_id, None) is None:
            return
        for sample in request.samples:
            del self._owners[sample.sequence.sequence_id]
            self._finished[sample.sequence.finish_reason or "abort"] += 1
