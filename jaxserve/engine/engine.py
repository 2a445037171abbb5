"""The engine: accepts requests, runs steps, and delivers outputs."""

import contextlib
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Iterator

import numpy as np

from jaxserve.api.errors import EngineDeadError, RequestError, RequestFailedError, own_failure, unforeseen
from jaxserve.api.metric_types import Metric
from jaxserve.api.request import Request
from jaxserve.device.runner_interface import StepResult
from jaxserve.engine.admission import Admission
from jaxserve.engine.expert_load import ExpertLoad
from jaxserve.engine.metrics import PREFIX, CompileCounter, EngineMetrics
from jaxserve.engine.pooling import pooled_vector
from jaxserve.engine.replica import Replica
from jaxserve.engine.request_state import MAX_UNREAD, RequestState
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.router import choose_scheduler
from jaxserve.scheduling.step import Step
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step. One thread at a time may change its state: that of the ``Loop``.

    After a KeyboardInterrupt or the like in the middle of a step, queues, slots and pages are allocated anew, and the
    requests that were unfinished fail. An ``Exception`` stops the engine.

    Args:
        replicas: One replica per data slice.
        admission: Validates requests and creates their state.
        seed: Seed from which requests without one get theirs.
        counter: Counts compilations during steps.
        expert_load: Counts the tokens of each expert; None if steps do not.
    """

    def __init__(
        self,
        replicas: list[Replica],
        admission: Admission,
        *,
        seed: int,
        counter: CompileCounter,
        expert_load: ExpertLoad | None = None,
    ):
        self.replicas = replicas
        self._schedulers = [scheduler for replica in replicas for scheduler in replica.schedulers]
        self.admission = admission
        self.expert_load = expert_load
        self._counter = counter
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._requests: dict[str, RequestState] = {}
        self._metrics = EngineMetrics(admission.limits.max_model_len)
        self._failure: BaseException | None = None
        self._is_closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none. Then prompts must be token ids, and outputs have no text."""
        return self.admission.tokenizer

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return len(self._requests)

    def prepare(self, request: Request, arrival_s: float | None = None) -> RequestState:
        """Validate and tokenize a request, and start to compile its grammar; ``enqueue`` runs it.

        Raises:
            RequestError: The prompt or a parameter is invalid or unsupported.
        """
        return self.admission.admit(
            request if request.request_id else dataclasses.replace(request, request_id=str(next(self._ids))),
            default_seed=self._seeds.getrandbits(32),
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
        )

    def enqueue(self, request: RequestState) -> None:
        """Add a prepared request, whose grammar is compiled, to a scheduler's queue.

        Raises:
            RequestError: The request id is in use.
            EngineDeadError: The engine has failed.
        """
        self._check_alive()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", parameter="request_id")
        first = request.samples[0].sequence
        self._requests[request.request_id] = request
        try:
            if len(self._schedulers) > 1:
                request.lane = choose_scheduler(self._schedulers, first)
            self._schedulers[request.lane].add(first)
        except Exception as error:
            self._fail(request, RequestFailedError(unforeseen(error)))
            raise

    def submit(self, request: Request) -> RequestState:
        """Prepare a request, wait for its grammar, and enqueue it."""
        prepared = self.prepare(request)
        if prepared.grammar is not None:
            prepared.grammar.result()
        self.enqueue(prepared)
        return prepared

    def step(self) -> list[RequestState]:
        """Launch a step on each replica, apply the results that are due, and return the requests they changed.

        After an interrupt or an exit in the middle of it, these are all unfinished requests, which fail.

        Raises:
            EngineDeadError: The step failed, or the engine failed before.
        """
        self._check_alive()
        try:
            with self._counter:
                launched = [replica.launch() for replica in self.replicas]
                found = [
                    each.collect(not is_launched) for each, is_launched in zip(self.replicas, launched, strict=True)
                ]
            return [request for lanes in found for lane in lanes for request in self._deliver(*lane)]
        except Exception as error:
            self._failure = error
            raise EngineDeadError(f"the engine stopped: {error}") from error
        except BaseException:
            logger.exception("a step was interrupted: its requests fail, and the prefix cache is cleared")
            return self._mend()

    def drain(self) -> list[RequestState]:
        """Wait for the steps in flight and apply their results; return the requests they changed.

        Only for blocks of ``fatal_errors``.
        """
        changed = dict[RequestState, None]()
        for replica in self.replicas:
            while replica.has_steps_in_flight:
                for lane in replica.collect(is_last=True):
                    changed |= dict.fromkeys(self._deliver(*lane))
        return list(changed)

    def replace_replicas(self, replicas: list[Replica]) -> None:
        """Continue on other replicas, whose schedulers get all sequences. No sequence may be running.

        With as many schedulers as before, each request stays on its own; else it goes where its prefix is cached.
        """
        old = self._schedulers
        replicas[0].replace(self.replicas)
        self.replicas, self._schedulers = replicas, [each for replica in replicas for each in replica.schedulers]
        self._schedulers[0].replace(old)
        for made, other in zip(self._schedulers, old, strict=False):
            made.take_proposer(other)
        queued = {sequence for scheduler in old for sequence in scheduler.waiting}
        for request in self._requests.values():
            waiting = [s.sequence for s in request.samples if s.sequence in queued]
            if len(old) != len(self._schedulers):
                request.lane = choose_scheduler(self._schedulers, waiting[0])
            for sequence in waiting:
                self._schedulers[request.lane].add(sequence)

    @contextlib.contextmanager
    def fatal_errors(self) -> Iterator[None]:
        """Stop the engine if the block fails, with whatever exception.

        Raises:
            EngineDeadError: The block raised an ``Exception``, or the engine failed before.
        """
        self._check_alive()
        try:
            yield
        except BaseException as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"the engine stopped: {error}") from error

    def abort(self, *requests: RequestState) -> None:
        """Abort requests. Does nothing for those that have finished."""
        for request in requests:
            if self._requests.get(request.request_id) is request:
                for sample in request.samples:
                    self._schedulers[request.lane].finish(sample.sequence, "abort")
                self._close(request)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache without affecting running requests. Always returns True, as in vLLM's API."""
        for scheduler in self._schedulers:
            scheduler.pages.reset_cache()
        return True

    def metrics(self) -> list[Metric]:
        """Return the current metrics."""
        found = self._metrics.collect(self.replicas, self._counter.count)
        return found if self.expert_load is None else found + self.expert_load.collect(PREFIX)

    def close(self) -> None:
        """Free the devices' memory; the engine cannot be used afterwards. May be called again."""
        self._failure = self._failure or RuntimeError("it was closed")
        if self._is_closed:
            return
        for replica in self.replicas:
            replica.close()
        self._counter.close()
        if self.admission.grammars is not None:
            self.admission.grammars.close()
        self._is_closed = True

    def _mend(self) -> list[RequestState]:
        """Continue after a step that was not completed, with empty queues, slots and pages.

        Returns:
            The requests that were unfinished, which have failed.
        """
        for replica in self.replicas:
            replica.reset()
        self._schedulers = [scheduler for replica in self.replicas for scheduler in replica.schedulers]
        lost = list(self._requests.values())
        for request in lost:
            request.error = request.error or RequestFailedError("a step was interrupted before the request finished")
            for sample in request.samples:
                self._schedulers[0].abandon(sample.sequence)
            self._close(request)
        return lost

    def _check_alive(self) -> None:
        if self._failure is not None:
            why = str(self._failure) or type(self._failure).__name__
            raise EngineDeadError(f"the engine stopped: {why}") from self._failure

    def _deliver(self, step: Step, result: StepResult) -> list[RequestState]:
        """Note a step's results in one lane; return the requests they changed."""
        requests, pooled = self._requests, list[RequestState]()
        changed = dict.fromkeys([requests[sequence.request.request_id] for sequence in step.sampled])
        if step.scored or step.pooled or result.logprobs is not None or result.expert_tokens is not None:
            failed, pooled = self._add_special(step, result)
            changed |= dict.fromkeys(failed)
        # The first of a request's sequences, which the others follow, gets the first token.
        firsts = (requests.get(sequence.request.request_id) for sequence in step.started if not sequence.index)
        started = [request for request in firsts if request is not None]
        self._metrics.stepped(step, started, pooled)
        for sequence in step.finished:
            request = requests.get(sequence.request.request_id)
            if request is None:  # another sample has failed
                continue
            changed[request] = None
            if sequence.finish_reason != "error":
                if request.is_finished():
                    self._close(request)
            elif sequence.error is None:
                self._fail_corrupted(request, "the model produced NaN logits, or every token is masked")
            else:
                self._fail_alone(request, sequence.error)
        return [*changed, *pooled]

    def _add_special(self, step: Step, result: StepResult) -> tuple[list[RequestState], list[RequestState]]:
        """Note what few steps have: use of experts, logprobs, and vectors.

        Returns:
            The requests that fail because of the logprobs of their prompts, and those that the step has pooled.
        """
        if self.expert_load is not None and result.expert_tokens is not None:
            self.expert_load.add(result.expert_tokens)
        failed = self._add_prompt_logprobs(step, result) if step.scored else []
        if result.logprobs is not None:
            self._score(step, result.logprobs)
        return failed, self._add_vectors(step, result) if step.pooled else []

    def _add_prompt_logprobs(self, step: Step, result: StepResult) -> list[RequestState]:
        """Add the logprobs of prompts to their requests; return the requests that fail because of them."""
        assert result.prompt_logprobs is not None
        failed: list[RequestState] = []
        for chunk in step.scored:
            request = self._requests.get(chunk.sequence.request.request_id)
            if request is None:  # another chunk of the request has failed
                continue
            try:
                request.add_prompt_logprobs(chunk, result.prompt_logprobs)
            except BaseException as error:
                self._fail_alone(request, own_failure(error))
                failed.append(request)
        return failed

    def _score(self, step: Step, scores: TokenLogprobs) -> None:
        """Add the logprobs of new tokens to their samples."""
        for first, sequence in zip(step.plan.first_samples, step.sequences, strict=True):
            request = self._requests.get(sequence.request.request_id)
            if request is None:
                continue
            sample = request.samples[sequence.index]
            if sample.logprobs is None or sample.sequence is not sequence:  # another request with the same id
                continue
            try:
                sample.score(first, scores)
                if len(sample.scores) >= MAX_UNREAD:
                    sample.read(request.tokenizer)
            except BaseException as error:
                self._fail_alone(request, own_failure(error))

    def _add_vectors(self, step: Step, result: StepResult) -> list[RequestState]:
        """Finish the requests that a step has pooled, with their embeddings; return them."""
        assert result.sums is not None
        changed = []
        for sequence, row in step.pooled:
            request, params = self._requests[sequence.request.request_id], sequence.request.pooling
            assert params is not None
            changed.append(request)
            try:
                vector = pooled_vector(result.sums[row], sequence.num_prompt_tokens, params)
            except Exception as error:
                self._fail_alone(request, error)
                continue
            if np.isfinite(vector).all():
                request.embedding = vector.tolist()
                request.finished_s = step.completed_s
                self._close(request)
            else:
                self._fail_corrupted(request, "the model produced NaN or infinite hidden states")
        return changed

    def _fail_corrupted(self, request: RequestState, message: str) -> None:
        """Finish and count a request whose logits or hidden states are unusable."""
        self._metrics.corrupted()
        request.is_corrupted = True
        self._fail(request, RequestFailedError(message))

    def _fail_alone(self, request: RequestState, error: Exception) -> None:
        """Finish a request with an error; the details of an unforeseen one are only for the log."""
        if not isinstance(error, RequestError):
            logger.error("request %s failed", request.request_id, exc_info=error)
            error = RequestFailedError(unforeseen(error))
        self._fail(request, error)

    def _fail(self, request: RequestState, error: RequestError) -> None:
        """Finish a request with an error, and remove its pages from the prefix cache."""
        request.error = error
        if self._requests.get(request.request_id) is request:
            for sample in request.samples:
                self._schedulers[request.lane].finish(sample.sequence, "error")
            self._close(request)

    def _close(self, request: RequestState) -> None:
        """Remove a finished request and count it."""
        del self._requests[request.request_id]
        self._metrics.finished(request)
