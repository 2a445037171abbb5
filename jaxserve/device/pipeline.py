"""The hand-over of hidden states and tokens between pipeline stages.

Every stage runs every step, one after the other, and while one stage runs a step, the stages before it can run the next
ones. Hidden states go from each stage to the next; the tokens that the last stage samples go back to the others. All of
that is queued on the devices: the host waits for nothing.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device.handed_over import abstract_hidden
from jaxserve.device.stage import Stage
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.device.structs import shardings
from jaxserve.scheduling.plan import ON_DEVICE, StepPlan
from jaxserve.scheduling.row_starts import as_array
from sharding import hand_over


class _Returned(NamedTuple):
    """The latest tokens of all slots after a step, on the devices of each stage before the last."""

    step: int
    latest: list[LatestTokens]


class Pipeline:
    """The stages of a model that has more than one: what goes to the last one and comes back.

    A row whose first token or drafts are ``ON_DEVICE`` needs those of the step that last sampled for its slot, and so
    cannot begin before that step has passed the last stage. ``run`` uses the latest tokens after the earliest step that
    has all of them, so that stages wait for no other steps.

    Args:
        stages: The stages, in order.
    """

    def __init__(self, stages: Sequence[Stage]):
        *earlier, last = stages
        self._earlier = tuple(earlier)
        self._next = [abstract_hidden(stage.model, 1).sharding for stage in stages[1:]]
        self._latest = [shardings(stage.model.abstract_latest()) for stage in earlier]
        empty = jax.tree.map(lambda struct: np.zeros(struct.shape, struct.dtype), last.model.abstract_latest())
        self._returned = collections.deque([self._sent(-1, empty)], maxlen=len(stages) + 1)
        self._sampled_at = np.full((last.model.num_lanes, last.model.num_slots), -1)
        self._step = 0

    def run(
        self, plans: Sequence[StepPlan], shape: BatchShape, buffer: np.ndarray
    ) -> tuple[list[jax.Array], list[Any]]:
        """Launch a step of every stage but the last; return the last stage's ``abstract_input``, and the expert tokens
        of each stage that counts them.

        Args:
            plans: Plan of each lane.
            shape: Batch shape.
            buffer: The step's buffer.
        """
        hidden, expert_tokens = list[jax.Array](), []
        returned = self._needed(plans)
        for stage, latest, sharding in zip(self._earlier, returned.latest, self._next, strict=True):
            output = stage.run_layers(shape, latest, buffer, *hidden)
            given = [output.hidden, *([] if output.aux is None else [output.aux])]
            hidden = [hand_over(each, sharding) for each in given]
            if output.expert_tokens is not None:
                expert_tokens.append(output.expert_tokens)
        return hidden, expert_tokens

    def send_back(self, plans: Sequence[StepPlan], latest: LatestTokens) -> None:
        """Send the latest tokens of all slots back from the last stage, once the step is launched there."""
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            sampled_at[as_array(plan.slots)[as_array(plan.num_samples) > 0]] = self._step
        self._returned.append(self._sent(self._step, latest))
        self._step += 1

    def _sent(self, step: int, latest: LatestTokens) -> _Returned:
        """Copy the latest tokens after a step to each stage; equal shardings make the copies asynchronous."""
        return _Returned(step, [hand_over(latest, sharding) for sharding in self._latest])

    def _needed(self, plans: Sequence[StepPlan]) -> _Returned:
        """Return the latest tokens after the earliest step that has those that the plans read, drafts included."""
        needed = -1
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            last_tokens = as_array(plan.token_ids)[np.cumsum(as_array(plan.lengths)) - 1]
            reads = (as_array(plan.starts) == ON_DEVICE) | (last_tokens == ON_DEVICE)
            needed = max(needed, sampled_at[as_array(plan.slots)[reads]].max(initial=-1))
        return next(returned for returned in self._returned if returned.step >= needed)
