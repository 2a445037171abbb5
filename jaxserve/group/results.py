"""Results of steps in stages that process 0 has no part of, as bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from jaxserve.device.runner_interface import StepResult
from jaxserve.sampling.logprobs import TokenLogprobs


def encode_results(results: Sequence[StepResult]) -> bytes:
    """Return the results of a step, one per lane, as bytes, without the rows that failed alone: all processes know."""
    return msgpack.Packer().pack(
        [[result.tokens, *map(_written, result[1:-1])] for result in results]  # the last one are the rows that failed
    )


def decode_results(data: bytes) -> list[StepResult]:
    """Return the results that were encoded."""
    return [
        StepResult(tokens, _scores(scores), _scores(prompt_scores), _array(sums), _array(expert_tokens))
        for tokens, scores, prompt_scores, sums, expert_tokens in msgpack.unpackb(data)
    ]


def merged(own: Sequence[StepResult], found: Mapping[int, Sequence[StepResult]], sampler: int) -> list[StepResult]:
    """Return the results of a step, one per lane, of all stages.

    Args:
        own: Those that process 0 knows.
        found: Those of other ranks, in their order, which is that of the stages that they report.
        sampler: The rank that knows the last stage's.
    """
    lanes = list[StepResult]()
    for lane, mine in enumerate(own):
        parts = [mine, *(each[lane] for each in found.values())]
        counted = [part.expert_tokens for part in parts if part.expert_tokens is not None]
        sampled = mine if sampler == 0 else found[sampler][lane]
        expert_tokens = np.concatenate(counted) if counted else None
        lanes.append(sampled._replace(expert_tokens=expert_tokens, errors=mine.errors))
    return lanes


def _written(value: Any) -> Any:
    """Return an array as its type, shape and bytes; a tuple of arrays as a list of them."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    return [_written(each) for each in value]


def _scores(values: Sequence[Any] | None) -> TokenLogprobs | None:
    return None if values is None else TokenLogprobs(*map(_array, values))


def _array(values: Sequence[Any] | None) -> Any:
    if values is None:
        return None
    dtype, shape, data = values
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
