"""Run requests to completion on the caller's thread, for ``LLM``."""

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
    """Shows the number of finished samples and the tokens per second, unless ``use_tqdm`` is False."""

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
        """Count a finished request."""
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
        """Stop updating the bar."""
        if self._bar is not None:
            self._bar.close()


class OfflineRunner:
    """Steps an engine until the submitted requests have finished.

    Args:
        engine: The engine; nothing else may step it meanwhile.
        defaults: Parameters of prompts without any.
        stats: Logs statistics periodically; None for no log and no ``metrics`` in outputs.
    """

    def __init__(self, engine: Engine, defaults: SamplingParams, stats: StatsLogger | None):
        self._engine = engine
        self._defaults = defaults
        self._stats = stats

    def pool(
        self, inputs: list[PromptInput], priorities: Sequence[int], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[PoolingRequestOutput]:
        """Return the embeddings of prompts, whose parameters must be ``PoolingParams`` if given.

        Raises:
            RequestError: A prompt is invalid; no prompt has run.
            RequestFailedError: An embedding has non-finite values.
        """
        prompts = [
            prompt if prompt.params is not None else dataclasses.replace(prompt, params=PoolingParams())
            for prompt in inputs
        ]
        outputs = self.run(prompts, priorities, use_tqdm)
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise RequestFailedError(f"prompt {index}: {output.error}")
        return [PoolingRequestOutput.of(output) for output in outputs]

    def run(
        self, inputs: list[PromptInput], priorities: Sequence[int], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Run all prompts to completion; return their outputs in order.

        Raises:
            RequestError: A prompt is invalid; no prompt has run.
        """
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
        """Yield the outputs of one request as they arrive; closing the generator aborts the request."""
        (request,) = self._submit([prompt], [0])
        try:
            is_last = False
            while not is_last:
                if request.is_finished() or request in self._step():  # resharding may have finished it
                    is_last = request.is_finished()
                    output = request.next_output(self._stats is not None)
                    if output is not None:
                        yield output
        finally:
            self._engine.abort(request)

    def _step(self) -> list[RequestState]:
        """Run one engine step, and log statistics if due."""
        changed = self._engine.step()
        if self._stats is not None and self._stats.is_due():
            self._stats.log(self._engine.metrics())
        return changed

    def _submit(self, inputs: list[PromptInput], priorities: Sequence[int]) -> list[RequestState]:
        """Submit all requests, or none if a prompt or a grammar is invalid."""
        arrival_s = time.monotonic()
        requests: list[RequestState] = []
        for index, (prompt, priority) in enumerate(zip(inputs, priorities, strict=True)):
            try:
                params = prompt.params or self._defaults
                requests.append(self._engine.prepare(prompt, params, priority=priority, arrival_s=arrival_s))
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
