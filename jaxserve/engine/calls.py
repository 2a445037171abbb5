"""Calls that block until a loop has their outputs, for ``LLM``."""

import concurrent.futures
import dataclasses
import queue
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tqdm import tqdm

from jaxserve.api.errors import RequestError, RequestFailedError
from jaxserve.api.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.engine.loop import Loop
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stream import Content, Stream

Prepare = Callable[[Request, float], RequestState]
"""Validates and tokenizes a request that arrived at a time of ``time.monotonic()``."""


class Caller:
    """A thread that waits for outputs."""

    def __init__(self) -> None:
        self._taken: queue.SimpleQueue[Sequence[tuple[CallStream, Content]]] = queue.SimpleQueue()

    def take(self, contents: "Sequence[tuple[CallStream, Content]]") -> None:
        """See ``Readers``."""
        self._taken.put(contents)

    def wait(self) -> "Sequence[tuple[CallStream, Content]]":
        """Wait for outputs and errors; return them with their streams. A signal handler may raise meanwhile."""
        return self._taken.get()

    @property
    def has_contents(self) -> bool:
        """Whether ``wait`` returns at once."""
        return not self._taken.empty()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class CallStream(Stream):
    """The outputs of a request go to the call that waits for them, as they come.

    Attributes:
        caller: The thread of the call.
    """

    caller: Caller

    @property
    def readers(self) -> Caller:
        """See ``Stream``."""
        return self.caller

    @property
    def has_room(self) -> bool:
        """See ``Stream``."""
        return True


class ProgressBar:
    """Shows the number of finished samples and the tokens per second.

    Args:
        requests: The requests to count.
        make: Makes the bar; may be a function of the user.
    """

    def __init__(self, requests: Sequence[RequestState], make: Callable[..., tqdm]):
        self._num_input = self._num_output = 0
        self._bar = make(
            total=sum(len(request.samples) for request in requests),
            desc="Processed prompts",
            dynamic_ncols=True,
            postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
        )

    def count(self, stream: CallStream) -> None:
        """Count a request that has finished."""
        request = stream.request
        assert request is not None
        bar, count = self._bar, len(request.samples)
        self._num_input += len(request.prompt_token_ids) * count
        self._num_output += sum(sample.sequence.num_output_tokens for sample in request.samples)
        elapsed = max(bar.format_dict["elapsed"], 1e-9)
        bar.postfix = (
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, output: {self._num_output / elapsed:.2f} toks/s"
        )
        bar.update(count)

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.close()


class Calls:
    """Runs requests on a loop that steps on demand, and waits for them. Thread-safe.

    An exception, such as the KeyboardInterrupt of Ctrl-C while a call waits, ends the call and its requests only.

    Args:
        loop: Steps the engine.
        prepare: See ``Prepare``.
        with_metrics: Whether outputs have ``metrics``.
    """

    def __init__(self, loop: Loop, prepare: Prepare, with_metrics: bool):
        self._loop = loop
        self._prepare = prepare
        self._with_metrics = with_metrics

    def pool(self, inputs: Sequence[Request], use_tqdm: bool | Callable[..., tqdm]) -> list[PoolingRequestOutput]:
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

    def run(self, inputs: Sequence[Request], use_tqdm: bool | Callable[..., tqdm] = False) -> list[RequestOutput]:
        """Run all prompts to completion; return their outputs in order.

        Raises:
            RequestError: A prompt is invalid; no prompt has run.
        """
        self._loop.check_outside()
        prepared = self._prepared(inputs)
        caller, metrics = Caller(), "last" if self._with_metrics else "none"
        streams = [
            CallStream(caller=caller, metrics=metrics, request=request, is_read_whole=True) for request in prepared
        ]
        bar: ProgressBar | None = None
        try:
            self._loop.begin(streams)
            if use_tqdm:
                bar = ProgressBar(prepared, tqdm if use_tqdm is True else use_tqdm)
            contents = dict[CallStream, Content]()
            while len(contents) < len(streams):
                for stream, content in caller.wait():
                    contents[stream] = content
                    if bar is not None:
                        bar.count(stream)
            return [self._output(request, contents[each]) for each, request in zip(streams, prepared, strict=True)]
        except BaseException:
            self._loop.drop_all(streams)
            raise
        finally:
            if bar is not None:
                bar.close()

    def stream(self, prompt: Request) -> Generator[RequestOutput, None, None]:
        """Yield the outputs of one request as they arrive; closing the generator aborts the request.

        The request runs only while the caller waits for the next output, or other requests run.
        """
        self._loop.check_outside()
        (request,) = self._prepared([prompt])
        caller = Caller()
        stream = CallStream(caller=caller, request=request, metrics="all" if self._with_metrics else "none")
        try:
            self._loop.begin([stream])
            while True:
                for _, content in caller.wait():
                    output = self._output(request, content)
                    yield output
                    if output.finished:
                        return
                if not caller.has_contents:
                    self._loop.want(stream)
        finally:
            if not request.is_finished():
                self._loop.drop_all([stream])

    def _prepared(self, inputs: Sequence[Request]) -> list[RequestState]:
        """Prepare requests and wait for their grammars."""
        arrival_s = time.monotonic()
        requests: list[RequestState] = []
        for index, prompt in enumerate(inputs):
            try:
                requests.append(self._prepare(prompt, arrival_s))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        for index, request in enumerate(requests):
            if request.grammar is not None:
                _wait_for_grammar(index, request.grammar)
        return requests

    def _output(self, request: RequestState, content: Content) -> RequestOutput:
        """Return the output that was handed over; a request that has failed gets its error in its output."""
        if not isinstance(content, BaseException):
            return content
        if request.error is None:
            raise content
        return request.output(self._with_metrics)


def _wait_for_grammar(index: int, grammar: "concurrent.futures.Future[Any]") -> None:
    """Wait for the grammar of the prompt with this index.

    Raises:
        RequestError: It cannot be compiled.
    """
    try:
        grammar.result()
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from error
