"""The engine: accepts requests, runs steps, and delivers outputs."""

import collections
import contextlib
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

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
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.step_guard import StepGuard
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.plan_draft import Completion
from jaxserve.scheduling.router import choose_scheduler
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Runs requests step by step. Threads may share an engine: a change of its state waits for the one in progress.

    After an exception such as KeyboardInterrupt in the middle of a step, the next call allocates queues, slots and
    pages anew, and the requests that were unfinished fail. An ``Exception`` stops the engine.

    Args:
        replicas: One replica per data slice.
        admission: Validates requests and creates their state.
        seed: Seed from which requests without one get theirs.
        counter: Counts compilations during steps.
        expert_load: Counts the tokens of each expert; None if steps do not.

    Attributes:
        guard: Changes of the engine's state are blocks of it.
        aborted: Requests to abort before the next step; ``abort`` does so at once.
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
        self.guard = StepGuard(self._mend)
        self.aborted: collections.deque[RequestState] = collections.deque()
        self._lost: dict[str, RequestState] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none. Then prompts must be token ids, and outputs have no text."""
        return self.admission.tokenizer

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests, and of those that the next step reports as failed."""
        return len(self._requests) + len(self._lost)

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
        """Add a prepared request to a scheduler's queue, after waiting for its grammar.

        Raises:
            RequestError: The request id is in use, or the grammar cannot be compiled.
            EngineDeadError: The engine has failed.
        """
        self._check_alive()
        if request.grammar is not None:
            request.grammar.result()
        with self.guard:
            error = self._enqueue(request)
        if error is not None:
            raise error

    def submit(self, request: Request) -> RequestState:
        """Prepare a request and enqueue it."""
        prepared = self.prepare(request)
        self.enqueue(prepared)
        return prepared

    def step(self) -> list[RequestState]:
        """Launch a step on each replica, apply the results that are due, and return the requests they changed.

        Raises:
            EngineDeadError: The step failed, or the engine failed before.
        """
        with self.guard, self.fatal_errors():
            self._apply_aborts()
            with self._counter:
                launched = [replica.launch() for replica in self.replicas]
                found = [
                    each.collect(not is_launched) for each, is_launched in zip(self.replicas, launched, strict=True)
                ]
            return self._take_lost() + [
                request for lanes in found for lane in lanes for request in self._deliver(*lane)
            ]

    def drain(self) -> list[RequestState]:
        """Wait for the steps in flight and apply their results; return the requests they changed.

        Only for blocks of ``guard``.

        Raises:
            EngineDeadError: A step failed, or the engine failed before.
        """
        changed = dict.fromkeys(self._take_lost())
        with self.fatal_errors():
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
        queued = {sequence for scheduler in old for sequence in scheduler.waiting}
        for request in self._requests.values():
            waiting = [s.sequence for s in request.samples if s.sequence in queued]
            if len(old) != len(self._schedulers):
                request.lane = choose_scheduler(self._schedulers, waiting[0])
            for sequence in waiting:
                self._schedulers[request.lane].add(sequence)

    @contextlib.contextmanager
    def fatal_errors(self, catches: type[BaseException] = Exception) -> Iterator[None]:
        """Stop the engine if the block fails.

        Args:
            catches: The exceptions that stop it. Only those of class ``Exception`` become an EngineDeadError here.

        Raises:
            EngineDeadError: The block failed, or the engine failed before.
        """
        self._check_alive()
        try:
            yield
        except catches as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"the engine stopped: {error}") from error

    def abort(self, *requests: RequestState) -> None:
        """Abort requests, before the next step if one is running. Does nothing for those that have finished."""
        self.aborted.extend(requests)
        while self.aborted and self.guard.run_if_free(self._apply_aborts):
            pass

    def make(self, request: RequestState, output: Callable[[], T]) -> T:
        """Call a function that makes an output of a request; if it fails, fail the request and call it again."""
        with self.guard:
            try:
                return output()
            except Exception as error:
                self._fail_alone(request, error)
                return output()

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache without affecting running requests. Always returns True, as in vLLM's API."""
        with self.guard:
            for scheduler in self._schedulers:
                scheduler.allocator.reset()
        return True

    def metrics(self) -> list[Metric]:
        """Return the current metrics."""
        found = self._metrics.collect(self.replicas, self._counter.count)
        return found if self.expert_load is None else found + self.expert_load.collect(PREFIX)

    def close(self) -> None:
        """Free the devices' memory; the engine cannot be used afterwards. May be called again."""
        self.guard.check_outside()
        self._failure = self._failure or RuntimeError("it was closed")
        with self.guard:
            if self._is_closed:
                return
            for replica in self.replicas:
                replica.close()
            self._counter.close()
            if self.admission.grammars is not None:
                self.admission.grammars.close()
            self._is_closed = True

    def _enqueue(self, request: RequestState) -> Exception | None:
        """Add a request; return the exception if it cannot be added."""
        if request.request_id in self._requests:
            return RequestError(f"request id {request.request_id!r} is in use", parameter="request_id")
        first = request.samples[0].sequence
        self._requests[request.request_id] = request
        try:
            request.lane = choose_scheduler(self._schedulers, first)
            self._schedulers[request.lane].add(first)
        except Exception as error:
            self._fail(request, RequestFailedError(unforeseen(error)))
            return error
        return None

    def _apply_aborts(self) -> None:
        while self.aborted:
            request = self.aborted[0]
            self._lost.pop(request.request_id, None)
            if self._requests.get(request.request_id) is request:
                for sample in request.samples:
                    self._schedulers[request.lane].finish(sample.sequence, "abort")
                self._close(request)
            self.aborted.popleft()

    def _mend(self) -> None:
        """Continue after a change that was not completed: with empty queues, slots and pages, and no requests."""
        if self._failure is not None:
            return
        logger.warning("a step was interrupted: its requests fail, and the prefix cache is cleared")
        for replica in self.replicas:
            replica.reset()
        self._schedulers = [scheduler for replica in self.replicas for scheduler in replica.schedulers]
        for name, request in list(self._requests.items()):
            request.error = request.error or RequestFailedError("a step was interrupted before the request finished")
            for sample in request.samples:
                self._schedulers[0].abandon(sample.sequence)
            self._lost[name] = request
            self._metrics.finished(request)
            self._requests.pop(name)

    def _take_lost(self) -> list[RequestState]:
        """Return the requests that ``_mend`` has failed since the last call."""
        lost = list(self._lost.values())
        self._lost.clear()
        return lost

    def _check_alive(self) -> None:
        if self._failure is not None:
            why = str(self._failure) or type(self._failure).__name__
            raise EngineDeadError(f"the engine stopped: {why}") from self._failure

    def _deliver(self, completion: Completion, result: StepResult, now: float) -> list[RequestState]:
        """Note a step's results in one lane; return the requests they changed."""
        if self.expert_load is not None and result.expert_tokens is not None:
            self.expert_load.add(result.expert_tokens)
        requests = self._requests
        changed = dict.fromkeys([requests[sequence.request.request_id] for sequence in completion.sampled])
        if completion.scored:
            changed |= dict.fromkeys(self._add_prompt_logprobs(completion, result))
        if result.logprobs is not None:
            self._score(completion, result.logprobs)
        started = self._note_first_tokens(completion, now) if 0.0 in completion.previous_s else []
        pooled = self._add_vectors(completion, result, now) if completion.pooled else []
        self._metrics.stepped(completion, now, started, pooled)
        for sequence in completion.finished:
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

    def _add_prompt_logprobs(self, completion: Completion, result: StepResult) -> list[RequestState]:
        """Add the logprobs of prompts to their requests; return the requests that fail because of them."""
        assert result.prompt_logprobs is not None
        failed: list[RequestState] = []
        for chunk in completion.scored:
            request = self._requests.get(chunk.sequence.request.request_id)
            if request is None:  # another chunk of the request has failed
                continue
            try:
                request.add_prompt_logprobs(chunk, result.prompt_logprobs)
            except BaseException as error:
                self._fail_alone(request, own_failure(error))
                failed.append(request)
        return failed

    def _score(self, completion: Completion, scores: TokenLogprobs) -> None:
        """Add the logprobs of new tokens to their samples."""
        for first, sequence in zip(completion.first_samples, completion.rows, strict=True):
            request = self._requests.get(sequence.request.request_id)
            if request is None:
                continue
            sample = request.samples[sequence.index]
            if sample.logprobs is None or sample.sequence is not sequence:  # another request with the same id
                continue
            try:
                sample.score(first, scores)
            except BaseException as error:
                self._fail_alone(request, own_failure(error))

    def _note_first_tokens(self, completion: Completion, now: float) -> list[RequestState]:
        """Set the time of first tokens; return the requests that got theirs."""
        started: list[RequestState] = []
        for sequence, previous_s in zip(completion.sampled, completion.previous_s, strict=True):
            request = None if previous_s else self._requests.get(sequence.request.request_id)
            if request is not None and request.first_token_s is None:
                request.first_token_s = now
                started.append(request)
        return started

    def _add_vectors(self, completion: Completion, result: StepResult, now: float) -> list[RequestState]:
        """Finish the requests that a step has pooled, with their embeddings; return them."""
        assert result.sums is not None
        changed = []
        for sequence, row in completion.pooled:
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
                request.finished_s = now
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
