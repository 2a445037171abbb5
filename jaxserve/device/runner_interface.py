"""The interface between a replica and the runner of its plans, in this process or another."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.plan import StepPlan


class RowError(NamedTuple):
    """A row whose masks, sampling parameters or other inputs could not be built; its tokens mean nothing."""

    row: int
    error: Exception


class StepResult(NamedTuple):
    """Results of one lane's part of a step, in host memory.

    Attributes:
        tokens: Tokens of each row; empty if the row does not sample, or its logits are NaN or all masked.
        logprobs: Logprobs of the samples, indexed as in ``StepPlan.first_samples``; None if not requested.
        prompt_logprobs: Logprobs of the prompt token after each query token; None if not requested.
        sums: Sum of hidden states over each row's prompt, float32 [R, D]; None if no pooling completes.
        expert_tokens: Tokens routed to each expert of each layer with experts; None unless the engine counts them.
        errors: Rows that failed alone; the results of the other rows are valid.
    """

    tokens: list[list[int]]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    sums: np.ndarray | None = None
    expert_tokens: Int[np.ndarray, "layers E"] | None = None
    errors: tuple[RowError, ...] = ()


@runtime_checkable
class Runner(Protocol):
    """Runs the plans of one data slice; owns its parameters, pages and slots.

    A layout that splits rows over devices divides a data slice into lanes, each with its own pages and slots; every
    step runs a plan for each lane. Other layouts have one lane. Plans are the only input and results the only output;
    both can be serialized and sent to another process. Not thread-safe.
    """

    def warm_up(self) -> None:
        """Run every program once and wait for it; call it before the first step."""
        ...

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """Launch a step of one plan per lane, without waiting for it. Steps run in launch order."""
        ...

    def collect(self) -> list[StepResult]:
        """Wait for the oldest step in flight and return the result of each lane, or raise its error."""
        ...

    def reset(self) -> None:
        """Drop the steps in flight and allocate slots and pages anew, whatever state an interrupted launch has left."""
        ...

    def close(self) -> None:
        """Wait for steps in flight and free the devices' memory; the runner cannot be used afterwards."""
        ...
