"""``RequestOutput`` as messages and back."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from jaxserve.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from jaxserve.outputs import CompletionOutput, FinishReason, RequestOutput
from jaxserve.server.proto.jaxserve.v1 import generation_pb2

_REASONS: MappingProxyType[FinishReason, generation_pb2.FinishReason] = MappingProxyType(
    {
        "stop": generation_pb2.FINISH_REASON_STOP,
        "length": generation_pb2.FINISH_REASON_LENGTH,
        "abort": generation_pb2.FINISH_REASON_ABORT,
        "error": generation_pb2.FINISH_REASON_ERROR,
        "repetition": generation_pb2.FINISH_REASON_REPETITION,
    }
)
_NAMES: MappingProxyType[int, FinishReason] = MappingProxyType({value: name for name, value in _REASONS.items()})


def completion_to_proto(output: CompletionOutput) -> generation_pb2.Completion:
    """Convert a completion or its delta."""
    message = generation_pb2.Completion(index=output.index, text=output.text, token_ids=output.token_ids)
    if output.logprobs is not None:
        message.logprobs.extend(_positions(output.logprobs, output.token_ids))
    if output.cumulative_logprob is not None:
        message.cumulative_logprob = output.cumulative_logprob
    if output.finish_reason is not None:
        message.finish_reason = _REASONS[output.finish_reason]
    if isinstance(output.stop_reason, str):
        message.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        message.stop_token_id = output.stop_reason
    return message


def completion_from_proto(message: generation_pb2.Completion) -> CompletionOutput:
    """What ``completion_to_proto`` was given."""
    stop = message.WhichOneof("stop_reason")
    has_logprobs = message.HasField("cumulative_logprob")
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        cumulative_logprob=message.cumulative_logprob if has_logprobs else None,
        logprobs=[_entries(position) for position in message.logprobs] if has_logprobs else None,
        finish_reason=_NAMES.get(message.finish_reason),
        stop_reason=None if stop is None else getattr(message, stop),
    )


def prompt_to_proto(output: RequestOutput) -> generation_pb2.PromptInfo:
    """What an output says of its prompt, token ids and text included."""
    message = generation_pb2.PromptInfo(
        num_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens or 0,
        token_ids=output.prompt_token_ids,
    )
    if output.prompt is not None:
        message.text = output.prompt
    if output.prompt_logprobs is not None:
        message.logprobs.extend(_positions(output.prompt_logprobs, output.prompt_token_ids))
    return message


def prompt_logprobs_from_proto(message: generation_pb2.PromptInfo) -> PromptLogprobs | None:
    """Return one entry per prompt token, None for the first; None without logprobs."""
    if not message.logprobs:
        return None
    return [_entries(position) if position.entries else None for position in message.logprobs]


def _positions(
    logprobs: SampleLogprobs | PromptLogprobs, token_ids: Sequence[int]
) -> Iterable[generation_pb2.TokenLogprobs]:
    """One message a position, the token that stands there first."""
    for position, token_id in zip(logprobs, token_ids, strict=True):
        message = generation_pb2.TokenLogprobs()
        others = {} if position is None else position
        for other in sorted(others, key=lambda other: other != token_id):
            entry = others[other]
            message.entries.add(
                token_id=other, logprob=entry.logprob, rank=entry.rank, decoded_token=entry.decoded_token
            )
        yield message


def _entries(message: generation_pb2.TokenLogprobs) -> dict[int, Logprob]:
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank if entry.HasField("rank") else None,
            decoded_token=entry.decoded_token if entry.HasField("decoded_token") else None,
        )
        for entry in message.entries
    }
