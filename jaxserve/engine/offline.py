"""Run requests to completion on the caller's thread, for ``LLM``."""

import time
from collections.abc import Callable, Generator, Iterable

from tqdm import tqdm

from jaxserve.api.errors import RequestError, RequestFailedError
from jaxserve.api.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.signal_delay import SignalDelay
from jaxserve.engine.stats_log import StatsLogger


class ProgressBar:
    """Shows the number of finished samples and the tokens per second.

    Args:
        requests: The requests to count.
        make: Makes the bar; may be a function of the user.
        signals: Lets handlers of signals run while the bar, which may be the user's, does something.
    """

    def __init__(self, requests: list[RequestState], make: Callable[..., tqdm], signals: SignalDelay):
        self._signals = signals
        self._unfinished = set(requests)
        self._num_input = self._num_output = 0
        signals.is_held = False
        try:
            self._bar = make(
                total=sum(len(request.samples) for request in requests),
                desc="Processed prompts",
                dynamic_ncols=True,
                postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
            )
        finally:
            signals.is_held = True

    def update(self, requests: Iterable[RequestState]) -> None:
        """Count those of the requests that have finished, each once."""
        for request in requests:
            if request in self._unfinished and request.is_finished():
                self._unfinished.remove(request)
                self._count(request)

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.close()

    def _count(self, request: RequestState) -> None:
        bar, count = self._bar, len(request.samples)
        self._num_input += len(request.prompt_token_ids) * count
        self._num_output += sum(sample.sequence.num_output_tokens for sample in request.samples)
        self._signals.is_held = False
        try:
            elapsed = max(bar.format_dict["elapsed"], 1e-9)
            bar.postfix = (
                f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
                f"output: {self._num_output / elapsed:.2f} toks/s"
            )
            bar.update(count)
        finally:
            self._signals.is_held = True


class OfflineRunner:
    """Steps an engine until the submitted requests have finished. Threads may call it at the same time.

    Signals are handled between steps, so that an exception of a handler, such as the KeyboardInterrupt of Ctrl-C, ends
    the call and its requests only.

    Args:
        engine: The engine.
        stats: Logs statistics periodically; None for no log and no ``metrics`` in outputs.
    """

    def __init__(self, engine: Engine, stats: StatsLogger | None):
        self._engine = engine
        self._stats = stats

    def pool(self, inputs: list[Request], use_tqdm: bool | Callable[..., tqdm]) -> list[PoolingRequestOutput]:
        """Return the embeddings of prompts.

        Raises:
            RequestError: A prompt is invalid; no prompt has run.
            RequestFailedError: An embedding has non-finite values.
        """
        outputs = self.run(inputs, use_tqdm)
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise RequestFailedError(f"prompt {index}: {output.error}")
        return [PoolingRequestOutput.of(output) for output in outputs]

    def run(self, inputs: list[Request], use_tqdm: bool | Callable[..., tqdm]) -> list[RequestOutput]:
        """Run all prompts to completion; return their outputs in order.

        Raises:
            RequestError: A prompt is invalid; no prompt has run.
        """
        requests: list[RequestState] = []
        bar: ProgressBar | None = None
        with SignalDelay() as signals:
            try:
                self._submit(requests, inputs, signals)
                if use_tqdm:
                    bar = ProgressBar(requests, tqdm if use_tqdm is True else use_tqdm, signals)
                pending = requests[::-1]
                while pending:
                    changed = self._step()
                    if bar is not None:
                        bar.update(changed)
                    signals.run_pending()
                    while pending and pending[-1].is_finished():
                        pending.pop()
                if bar is not None:
                    bar.update(requests)  # steps of other threads may have finished some
            except BaseException:
                signals.is_held = True
                self._engine.abort(*requests)
                raise
            finally:
                signals.is_held = True
                if bar is not None:
                    bar.close()
            return [
                self._engine.make(each, lambda each=each: each.output(self._stats is not None)) for each in requests
            ]

    def stream(self, prompt: Request) -> Generator[RequestOutput, None, None]:
        """Yield the outputs of one request as they arrive; closing the generator aborts the request."""
        requests: list[RequestState] = []
        try:
            with SignalDelay() as signals:
                self._submit(requests, [prompt], signals)
            (request,) = requests
            is_last = False
            while not is_last:
                output = None
                with SignalDelay():
                    # The steps of another call, or resharding, may have finished it.
                    if request.is_finished() or request in self._step():
                        is_last = request.is_finished()
                        output = self._engine.make(request, lambda: request.next_output(self._stats is not None))
                if output is not None:
                    yield output
        finally:
            self._engine.aborted.extend(requests)  # an interrupt cannot come before
            self._engine.abort()

    def _step(self) -> list[RequestState]:
        """Run one engine step, and log statistics if due."""
        changed = self._engine.step()
        if self._stats is not None and self._stats.is_due():
            self._stats.log(self._engine.metrics())
        return changed

    def _submit(self, requests: list[RequestState], inputs: list[Request], signals: SignalDelay) -> None:
        """Add a request of each prompt to ``requests`` and submit all, or none if a prompt or a grammar is invalid."""
        arrival_s = time.monotonic()
        for index, prompt in enumerate(inputs):
            try:
                requests.append(self._engine.prepare(prompt, arrival_s))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
            signals.run_pending()
        for index, request in enumerate(requests):
            if request.grammar is None:
                continue
            signals.is_held = False
            try:
                request.grammar.result()
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
            finally:
                signals.is_held = True
        for request in requests:
            self._engine.enqueue(request)
        if self._stats is not None:
            self._stats.resume()
