"""The hand-over of hidden states and tokens between pipeline stages.

Every stage runs every step, one after the other, and while one stage runs a step, the stages before it can run the next
ones. Hidden states go from each stage to the next; the tokens that the last stage samples go back to the others. All of
that is queued on the devices, and the host waits for nothing, unless stages are those of other processes: then it waits
for what these send.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device.handed_over import abstract_input
from jaxserve.device.stage import Stage
from jaxserve.device.stage_link import HandOver, StageLink
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.scheduling.plan import ON_DEVICE, StepPlan
from jaxserve.scheduling.row_starts import as_array
from sharding import put


class _Returned(NamedTuple):
    """The latest tokens of all slots after a step, on the devices of each stage before the last; None for a stage of
    other processes."""

    step: int
    latest: list[LatestTokens | None]


class Pipeline:
    """The stages of a model that has more than one: what goes to the last one and comes back.

    A row whose first token or drafts are ``ON_DEVICE`` needs those of the step that last sampled for its slot, and so
    cannot begin before that step has passed the last stage. ``run`` uses the latest tokens after the earliest step that
    has all of them, so that stages wait for no other steps.

    Args:
        stages: The stages, in order.
        link: Leads to the processes that have the other stages; None if this one has all.
    """

    def __init__(self, stages: Sequence[Stage], link: StageLink | None = None):
        *earlier, last = stages
        meshes = [stage.model.mesh for stage in stages]
        self._earlier = tuple(earlier)
        self._next = stages[1:]
        count = len(earlier)
        self._forward = [
            HandOver(meshes[index], meshes[index + 1], index, link, is_forward=True) for index in range(count)
        ]
        self._back = [HandOver(meshes[-1], meshes[index], count + index, link) for index in range(count)]
        self._kept = None if link is None else jax.jit(lambda latest: jax.tree.map(jnp.copy, latest))
        self._latest = [jax.tree.flatten(stage.model.abstract_latest()) for stage in earlier]
        self._returned = collections.deque([_Returned(-1, self._nothing())], maxlen=len(stages) + 1)
        self._on_way = collections.deque[int]()  # steps whose latest tokens were not received yet
        self._sampled_at = np.full((last.model.num_lanes, last.model.num_slots), -1)
        self._step = 0

    def _nothing(self) -> list[LatestTokens | None]:
        """Return the latest tokens of each stage before the first step."""
        return [
            jax.tree.unflatten(tree, [put(np.zeros(struct.shape, struct.dtype), struct.sharding) for struct in structs])
            if stage.is_here
            else None
            for stage, (structs, tree) in zip(self._earlier, self._latest, strict=True)
        ]

    def run(
        self, plans: Sequence[StepPlan], shape: BatchShape, buffer: np.ndarray
    ) -> tuple[list[jax.Array], list[Any]]:
        """Launch a step of every stage but the last; return the last stage's ``abstract_input``, and the expert tokens
        of each stage that counts them, here and not in another process that reports them.

        Args:
            plans: Plan of each lane.
            shape: Batch shape.
            buffer: The step's buffer.
        """
        hidden, expert_tokens = list[jax.Array](), []
        returned = self._needed(plans) if any(stage.is_here for stage in self._earlier) else None
        for index, (stage, following) in enumerate(zip(self._earlier, self._next, strict=True)):
            given = None
            if stage.is_here and returned is not None:
                latest = returned.latest[index]
                assert latest is not None
                output = stage.run_layers(shape, latest, buffer, *hidden)
                given = [output.hidden, *([] if output.aux is None else [output.aux])]
                if output.expert_tokens is not None:
                    expert_tokens += stage.reported(output.expert_tokens)
            hidden = self._forward[index](given, abstract_input(following.model, shape.num_tokens))
        return hidden, expert_tokens

    def send_back(self, plans: Sequence[StepPlan], latest: LatestTokens | None) -> None:
        """Send the latest tokens of all slots back from the last stage, once the step is launched there.

        Args:
            plans: Plan of each lane.
            latest: The latest tokens; None in a process without devices of the last stage.
        """
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            sampled_at[as_array(plan.slots)[as_array(plan.num_samples) > 0]] = self._step
        arrays = None if latest is None else jax.tree.leaves(latest)
        if arrays is not None and self._kept is not None:  # the next step takes the memory of these
            arrays = self._kept(arrays)
        for hand_over, (structs, _) in zip(self._back, self._latest, strict=True):
            hand_over.send(arrays, structs)
        self._on_way.append(self._step)
        self._step += 1
        if latest is not None or len(self._on_way) > len(self._earlier) + 2:  # the scheduler has had the oldest
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        """Wait for the latest tokens after the oldest step that has not returned."""
        latest = [
            jax.tree.unflatten(tree, found) if (found := hand_over.receive()) else None
            for hand_over, (_, tree) in zip(self._back, self._latest, strict=True)
        ]
        self._returned.append(_Returned(self._on_way.popleft(), latest))

    def _needed(self, plans: Sequence[StepPlan]) -> _Returned:
        """Return the latest tokens after the earliest step that has those that the plans read, drafts included."""
        needed = -1
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            last_tokens = as_array(plan.token_ids)[np.cumsum(as_array(plan.lengths)) - 1]
            reads = (as_array(plan.starts) == ON_DEVICE) | (last_tokens == ON_DEVICE)
            needed = max(needed, sampled_at[as_array(plan.slots)[reads]].max(initial=-1))
        while self._on_way and self._on_way[0] <= needed:
            self._receive_oldest()
        return next(returned for returned in self._returned if returned.step >= needed)
