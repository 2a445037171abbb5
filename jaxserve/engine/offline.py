"""Requests run to their end on the caller's thread: what ``LLM`` does."""

import dataclasses
import time
from collections.abc import Callable, Generator, Sequence

from tqdm import tqdm

from jaxserve.engine.engine import Engine
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.errors import RequestError, RequestFailedError
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import PromptInput
from jaxserve.sampling_params import SamplingParams


class ProgressBar:
    """Finished samples, and tokens per second of finished requests; nothing if ``use_tqdm`` is False."""

    def __init__(self, requests: list[RequestState], use_tqdm: bool | Callable[..., tqdm]):
        self._bar = None
        self._num_input = self._num_output = 0
        if use_tqdm:
            make = tqdm if use_tqdm is True else use_tqdm
            total = sum(len(request.samples) for request in requests)
            self._bar = make(
                total=total,
                desc="Processed prompts",
                dynamic_ncols=True,
                postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
            )

    def update(self, request: RequestState) -> None:
        """Counts a finished request."""
        if self._bar is None:
            return
        count = len(request.samples)
        self._num_input += len(request.prompt_token_ids) * count
        self._num_output += sum(sample.sequence.num_output_tokens for sample in request.samples)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.postfix = (
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, output: {self._num_output / elapsed:.2f} toks/s"
        )
        self._bar.update(count)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


class OfflineRunner:
    """Steps an engine for as long as there is something to wait for.

    Args:
        engine: Nothing else may step it meanwhile.
        defaults: Parameters of requests that bring none.
        stats: Writes the log line when it is due; None writes none, and outputs have no ``metrics``.
    """

    def __init__(self, engine: Engine, defaults: SamplingParams, stats: StatsLogger | None):
        self._engine = engine
        self._defaults = defaults
        self._stats = stats

    def pool(
        self, inputs: list[PromptInput], priorities: Sequence[int], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[PoolingRequestOutput]:
        """The vectors of prompts whose parameters, where they bring any, are ``PoolingParams``.

        Raises:
            RequestError: A bad prompt; nothing has run then.
            RequestFailedError: A vector has non-finite values.
        """
        given = [one if one.params is not None else dataclasses.replace(one, params=PoolingParams()) for one in inputs]
        outputs = self.run(given, priorities, use_tqdm)
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise RequestFailedError(f"prompt {index}: {output.error}")
        return [PoolingRequestOutput.of(output) for output in outputs]

    def run(
        self, inputs: list[PromptInput], priorities: Sequence[int], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Submits everything, steps to the end, and puts the outputs in order."""
        requests = self._submit(inputs, priorities)
        bar = ProgressBar(requests, use_tqdm)
        try:
            while self._engine.num_unfinished:
                for request in self._step():
                    if request.is_finished():
                        bar.update(request)
        except BaseException:
            for request in requests:
                self._engine.abort(request)
            raise
        finally:
            bar.close()
        return [request.output(self._stats is not None) for request in requests]

    def stream(self, prompt: PromptInput) -> Generator[RequestOutput, None, None]:
        """The outputs of one request as they come; closing the generator ends the request."""
        (request,) = self._submit([prompt], [0])
        try:
            while not request.is_finished():
                if request in self._step():
                    output = request.next_output(self._stats is not None)
                    if output is not None:
                        yield output
        finally:
            self._engine.abort(request)

    def _step(self) -> list[RequestState]:
        """One step of the engine, and the log line when it is due."""
        changed = self._engine.step()
        if self._stats is not None and self._stats.is_due():
            self._stats.log(self._engine.metrics())
        return changed

    def _submit(self, inputs: list[PromptInput], priorities: Sequence[int]) -> list[RequestState]:
        """All requests, or none: where one is bad, or its grammar, nothing runs."""
        arrival_s = time.monotonic()
        requests: list[RequestState] = []
        for index, (one, priority) in enumerate(zip(inputs, priorities, strict=True)):
            try:
                params = one.params or self._defaults
                requests.append(self._engine.prepare(one, params, priority=priority, arrival_s=arrival_s))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        for index, request in enumerate(requests):
            try:
                if request.grammar is not None:
                    request.grammar.result()
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        for request in requests:
            self._engine.enqueue(request)
        if self._stats is not None:
            self._stats.resume()
        return requests
