"""Outputs of requests as messages to the front end."""

from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.server.engine_frames import error_to_proto
from jaxserve.server.output_codec import completion_to_proto, prompt_to_proto
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2

_MESSAGE_BYTES = 32
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 32


def news_to_proto(number: int, output: RequestOutput, is_first: bool) -> engine_pb2.Output:
    """What is new of a request.

    Args:
        number: The front end's for it.
        output: Of the kind DELTA or FINAL_ONLY.
        is_first: Whether to say what its prompt is.
    """
    message = engine_pb2.Output(id=number, is_finished=output.finished)
    if is_first:
        message.prompt.CopyFrom(prompt_to_proto(output))
    message.completions.extend([completion_to_proto(completion) for completion in output.outputs])
    if output.embedding is not None:
        message.embedding.extend(output.embedding)
    if output.finished and output.metrics is not None:
        message.times.CopyFrom(_times(output.metrics))
    return message


def error_news(number: int, error: JaxserveError) -> engine_pb2.Output:
    """The end of a request that failed; of an engine's failure its log has the details."""
    if isinstance(error, EngineDeadError) and error.__cause__ is not None:
        error = EngineDeadError("the engine stopped after a failure")
    return engine_pb2.Output(id=number, is_finished=True, error=error_to_proto(error))


def weight_of(content: RequestOutput | JaxserveError) -> int:
    """About how many bytes a message will have, at little cost; the prompt is not counted, which nobody copies."""
    if isinstance(content, JaxserveError):
        return _MESSAGE_BYTES
    return _MESSAGE_BYTES + sum(_completion_weight(completion) for completion in content.outputs)


def _completion_weight(output: CompletionOutput) -> int:
    weight = _MESSAGE_BYTES + len(output.text) + _TOKEN_BYTES * len(output.token_ids)
    if output.logprobs:
        weight += _LOGPROB_BYTES * len(output.logprobs) * (len(output.logprobs[0]) + 1)
    return weight


def _times(metrics: RequestMetrics) -> engine_pb2.Times:
    message = engine_pb2.Times()
    for name in ("queued_s", "scheduled_s", "first_token_s", "finished_s"):
        value = getattr(metrics, name)
        if value is not None:
            setattr(message, name, value - metrics.arrival_s)
    return message
