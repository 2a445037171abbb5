"""What a draft model takes in later, on CPUs: the tokens of decode steps after which it makes no drafts.

A pass of the draft model over a token of each row reads all its weights, as does one over 32 of each. So such tokens
wait until there are many, the rows change, or drafts are wanted, and are then taken in as a chunk of each row. Their
entries are not read before: the draft model runs only then, and other rows that use the same pages come with a plan of
other rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.device.draft_inputs import DraftInputs, StepTokens, widened
from jaxserve.device.drafting import Drafted
from jaxserve.device.sampler_batch import unpack_arrays
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.step_state import StepState
from jaxserve.scheduling.plan import StepPlan

_MOST_STEPS = 32


def trace_chunks(sharded: ShardedModel, shape: BatchShape, larger: BatchShape) -> jax.stages.Traced:
    """Trace the inputs of the drafter for chunks of the tokens of decode steps.

    The traced function maps (buffer of the latest step, starts of the rows in the first one, tokens of each of
    ``_MOST_STEPS`` steps, number of those steps that count) to ``DraftInputs``.

    Args:
        sharded: The model.
        shape: Shape of the drafting after each of the steps.
        larger: Shape of the drafting after chunks.
    """

    def chunks(
        buffer: Int[Array, " size"],
        starts: Int[Array, " R"],
        tokens: tuple[Int[Array, " T"], ...],
        num_steps: Int[Array, " one"],
    ) -> DraftInputs:
        wide = widened(sharded, DraftInputs(buffer, StepTokens(tokens[0], starts)), shape, larger)
        num_rows, length = unpack_arrays(buffer, shape.fields)["num_rows"], num_steps[0]
        index, row = (jnp.arange(size, dtype=jnp.int32) for size in (larger.num_tokens, larger.num_rows))
        of_steps = jnp.stack(tokens)
        own, row_of = of_steps.at[index % length, index // length].get(mode="clip"), index // length
        changed = {
            "token_rows": jnp.where(row_of < num_rows, row_of, larger.num_rows),
            "query_starts": row * length,
            "query_lens": jnp.where(row < num_rows, length, 0),
        }
        buffer = wide.buffer
        for name, values in changed.items():
            field = larger.fields[name]
            buffer = buffer.at[field.start : field.stop].set(values)
        return DraftInputs(buffer, StepTokens(own, wide.given.starts))

    buffer = sharded.rows_struct((shape.buffer_size,), jnp.int32)
    starts, tokens, count = (sharded.rows_struct((n,), jnp.int32) for n in (shape.num_rows, shape.num_tokens, 1))
    return sharded.trace(chunks, (buffer, starts, (tokens,) * _MOST_STEPS, count))


class CatchUp:
    """Keeps what a draft model has to take in, on the devices, until it does.

    Args:
        chunks: Compiled ``trace_chunks``.
        drafts: The compiled drafting of the larger shape.
        num_tokens: Most tokens of its chunks.
        num_lanes: Number of lanes.
    """

    def __init__(self, chunks: jax.stages.Compiled, drafts: jax.stages.Compiled, num_tokens: int, num_lanes: int):
        self._chunks = chunks
        self._drafts = drafts
        self._num_tokens = num_tokens
        self._num_lanes = num_lanes
        self._plans: Sequence[StepPlan] = ()
        self._postponed: list[DraftInputs] = []

    @staticmethod
    def waits(plans: Sequence[StepPlan], shape: BatchShape) -> bool:
        """Return whether the drafter can take in the tokens of a step of these plans later."""
        return shape.decode_only and not shape.has_drafts and not any(plan.num_drafts for plan in plans)

    def goes_on(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether nothing waits, or these plans have the same rows, of one token each, and draft nothing."""
        return not self._postponed or all(
            plan.slots == before.slots
            and plan.num_tokens == plan.num_rows
            and plan.is_decode_only
            and not (plan.num_drafts or plan.setups or plan.copies or plan.state_copies)
            for plan, before in zip(plans, self._plans, strict=True)
        )

    def add(self, plans: Sequence[StepPlan], inputs: DraftInputs) -> bool:
        """Add what is to be taken in after a step; return whether there is room for a step more."""
        self._plans = plans
        self._postponed.append(inputs)
        num_rows = max(plan.num_rows for plan in plans)
        return len(self._postponed) < _MOST_STEPS and (len(self._postponed) + 1) * num_rows <= self._num_tokens

    def run(self, params: tuple[jax.Array, ...], state: StepState) -> StepState:
        """Let the drafter take in what waits; return the state."""
        if not self._postponed:
            return state
        first, last, count = self._postponed[0], self._postponed[-1], len(self._postponed)
        tokens = [each.given.tokens for each in self._postponed]
        tokens += [tokens[-1]] * (_MOST_STEPS - count)
        counts = np.full(self._num_lanes, count, np.int32)
        inputs = self._chunks(last.buffer, first.given.starts, tuple(tokens), counts)
        self.forget()
        return self._drafts(params, Drafted.before(state), inputs).put_into(state)

    def forget(self) -> None:
        """Forget what waits."""
        self._postponed = []
