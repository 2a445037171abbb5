"""What a replica needs of the one who runs its plans, in this process or elsewhere."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.plan import StepPlan


class StepResult(NamedTuple):
    """What the host learns of a step, in arrays of the host.

    Attributes:
        tokens: The tokens of each row; none for a row that does not sample, or whose logits are NaN or all masked.
        logprobs: Those of the samples, where a row asked for any; see ``StepPlan.first_samples``.
        prompt_logprobs: Logprobs of the prompt token after each query token, where a chunk asked for any.
        sums: [R, D] float32, hidden states summed up over each row's prompt, where a chunk completes any.
    """

    tokens: list[list[int]]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    sums: np.ndarray | None = None


@runtime_checkable
class Runner(Protocol):
    """Runs the plans of one data slice, and keeps what its devices hold: parameters, pages, slots.

    Plans are its only input from the host while it runs, and results the only output: both are plain values that can be
    sent to another process. Calls come from one thread at a time.
    """

    def launch(self, plan: StepPlan) -> int:
        """Starts a step and returns its handle without waiting for it; steps run in the order they are launched."""
        ...

    def collect(self, handle: int) -> StepResult:
        """Waits for a step and returns its result, or raises its error; called once for each handle."""
        ...

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the parameters by their paths in the module, in the form in which the devices hold them."""
        ...

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replaces parameters by others of the form that ``weights`` gives; those not named stay.

        Steps launched before still run with the old ones. Pages keep what was computed with them.

        Raises:
            ValueError: There is no parameter of a name, or not of that shape and type; none is replaced then.
        """
        ...

    def close(self) -> None:
        """Waits for steps in flight and gives the devices' memory back; the runner is of no use afterwards."""
        ...
