"""Outputs with many log-probabilities are written on a thread."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs

MAX_ENTRIES_ON_LOOP = 4096
"""Entries of an output that are written on the event loop; more are written on a thread."""
Result = TypeVar("Result")


def is_long(output: RequestOutput) -> bool:
    """Whether an output has more log-probabilities than may be written on the event loop."""
    found = (output.prompt_logprobs, *(one.logprobs for one in output.outputs))
    return sum(each.num_entries for each in found if isinstance(each, PackedLogprobs)) > MAX_ENTRIES_ON_LOOP


async def write_output(output: RequestOutput, write: Callable[..., Result], *arguments: Any) -> Result:
    """Call ``write``, which reads the log-probabilities of an output: on a thread if they are many."""
    return await asyncio.to_thread(write, *arguments) if is_long(output) else write(*arguments)
