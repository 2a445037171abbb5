"""What the engine gives as messages of the protocol."""

from jaxserve.errors import RequestFailedError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import MessageDelta, ParsedMessage
from jaxserve.server.grpc_api.conversations import answer_message
from jaxserve.server.grpc_api.requests import ReadRequest
from jaxserve.server.output_codec import completion_to_proto, prompt_to_proto
from jaxserve.server.proto.jaxserve.v1 import generation_pb2


class AnswerWriter:
    """Writes the answer to one request.

    Args:
        request_id: The server's name for it.
        request: What was asked.
        interval: Least number of tokens of a text in a message, but for its first and its last.
    """

    def __init__(self, request_id: str, request: ReadRequest, interval: int = 1):
        self._request_id = request_id
        self._answer = request.answer
        self._returns_prompt = request.returns_prompt
        self._interval = interval
        self._held: dict[int, CompletionOutput] = {}
        self._begun: set[int] = set()
        self._is_begun = False
        self._num_tokens = 0

    def whole(self, output: RequestOutput) -> generation_pb2.GenerateResponse:
        """The answer to a request that is answered at once.

        Raises:
            RequestFailedError: The engine failed at it.
        """
        _check(output)
        if self._answer is not None:
            self._answer.begin(output.prompt)
        made = generation_pb2.GenerateResponse(request_id=self._request_id, prompt=self._prompt(output))
        for completion in sorted(output.outputs, key=lambda one: one.index):
            self._num_tokens += len(completion.token_ids)
            message = None
            if self._answer is not None:
                self._answer.feed(completion.index, completion.text, is_end=True)
                message = self._answer.message(completion.index)
            made.completions.append(_completion(completion, message))
        made.usage.CopyFrom(self._usage(output))
        return made

    def part(self, output: RequestOutput) -> generation_pb2.StreamGenerateResponse | None:
        """What is new, or None where it can wait.

        Raises:
            RequestFailedError: The engine failed at it.
        """
        _check(output)
        made = generation_pb2.StreamGenerateResponse(request_id=self._request_id)
        is_first, self._is_begun = not self._is_begun, True
        if is_first:
            made.prompt.CopyFrom(self._prompt(output))
            if self._answer is not None:
                self._answer.begin(output.prompt)
        for completion in output.outputs:
            self._num_tokens += len(completion.token_ids)
            due = self._due(completion)
            if due is not None:
                made.completions.append(_completion(due, self._parsed(due)))
        if output.finished:
            made.usage.CopyFrom(self._usage(output))
        return made if is_first or output.finished or made.completions else None

    def _due(self, new: CompletionOutput) -> CompletionOutput | None:
        """What of a text is to be sent now, with what was held back."""
        due = self._held.pop(new.index, None)
        if due is None:
            due = new
        else:
            due.extend(new)
        if new.finish_reason is None and new.index in self._begun and len(due.token_ids) < self._interval:
            self._held[new.index] = due
            return None
        self._begun.add(new.index)
        return due

    def _parsed(self, due: CompletionOutput) -> MessageDelta | None:
        if self._answer is None:
            return None
        return self._answer.feed(due.index, due.text, is_end=due.finish_reason is not None)

    def _prompt(self, output: RequestOutput) -> generation_pb2.PromptInfo:
        made = prompt_to_proto(output)
        if not self._returns_prompt:
            made.ClearField("token_ids")
            made.ClearField("text")
        return made

    def _usage(self, output: RequestOutput) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=output.num_cached_tokens or 0,
        )


def _check(output: RequestOutput) -> None:
    """A failure is a status, never a message."""
    if any(completion.finish_reason == "error" for completion in output.outputs):
        raise RequestFailedError(output.error or "the engine failed at this request")


def _completion(
    completion: CompletionOutput, message: ParsedMessage | MessageDelta | None
) -> generation_pb2.Completion:
    made = completion_to_proto(completion)
    if message:
        made.message.CopyFrom(answer_message(message))
    return made
