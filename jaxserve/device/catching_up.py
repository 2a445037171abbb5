"""What a draft model takes in later, on CPUs: the tokens of decode steps after which it makes no drafts.

A pass of the draft model over a token of each row reads all its weights, as does one over 32 of each. So such tokens
wait until there are many, the rows change, or drafts are wanted, and are then taken in as a chunk of each row. Their
entries are not read before: the draft model runs only then, and other rows that use the same pages come with a plan of
other rows.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.device.draft_inputs import DraftInputs, StepTokens, abstract_tokens, widened
from jaxserve.device.drafting import Drafted
from jaxserve.device.sampler_batch import unpack_arrays
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.step_state import StepState
from jaxserve.scheduling.plan import StepPlan

_MOST_STEPS = 32
_MOST_STATES = 512  # tokens whose hidden states wait for a draft head


def chunk_steps(sharded: ShardedModel, shape: BatchShape) -> int:
    """Return the most steps of a decode shape whose tokens the drafter takes in at once; 1: it does not wait."""
    return _MOST_STEPS if sharded.aux_layers is None else max(1, min(_MOST_STEPS, _MOST_STATES // shape.num_tokens))


def trace_chunks(sharded: ShardedModel, shape: BatchShape, larger: BatchShape) -> jax.stages.Traced:
    """Trace the inputs of the drafter for chunks of the tokens of decode steps.

    The traced function maps (buffer of the latest step, ``StepTokens`` of each of ``chunk_steps`` steps, number of
    those steps that count) to ``DraftInputs``.

    Args:
        sharded: The model.
        shape: Shape of the drafting after each of the steps.
        larger: Shape of the drafting after chunks.
    """

    def chunks(
        buffer: Int[Array, " size"], steps: tuple[StepTokens, ...], num_steps: Int[Array, " one"]
    ) -> DraftInputs:
        narrow = DraftInputs(buffer, StepTokens(steps[0].tokens, steps[0].starts))
        wide = widened(sharded, narrow, shape, larger)
        num_rows, length = unpack_arrays(buffer, shape.fields)["num_rows"], num_steps[0]
        index, row = (jnp.arange(size, dtype=jnp.int32) for size in (larger.num_tokens, larger.num_rows))
        row_of = index // length
        changed = {
            "token_rows": jnp.where(row_of < num_rows, row_of, larger.num_rows),
            "query_starts": row * length,
            "query_lens": jnp.where(row < num_rows, length, 0),
        }
        buffer = wide.buffer
        for name, values in changed.items():
            field = larger.fields[name]
            buffer = buffer.at[field.start : field.stop].set(values)

        def chosen(*arrays: Array) -> Array:
            return jnp.stack(arrays).at[index % length, row_of].get(mode="clip")

        return DraftInputs(buffer, jax.tree.map(chosen, *steps)._replace(starts=wide.given.starts))

    buffer, one = (sharded.rows_struct((size,), jnp.int32) for size in (shape.buffer_size, 1))
    steps = (abstract_tokens(sharded, shape),) * chunk_steps(sharded, shape)
    return sharded.trace(chunks, (buffer, steps, one))


class CatchUp:
    """Keeps what a draft model has to take in, on the devices, until it does.

    Args:
        sharded: The model.
        chunks: Compiled ``trace_chunks`` of each shape of steps that can wait.
        drafts: The compiled drafting after chunks.
        num_tokens: Most tokens of the chunks of a step.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        chunks: Mapping[BatchShape, jax.stages.Compiled],
        drafts: jax.stages.Compiled,
        num_tokens: int,
    ):
        self._sharded = sharded
        self._chunks = chunks
        self._drafts = drafts
        self._num_tokens = num_tokens
        self._plans: Sequence[StepPlan] = ()
        self._shape: BatchShape | None = None
        self._postponed: list[DraftInputs] = []

    def waits(self, plans: Sequence[StepPlan], shape: BatchShape) -> bool:
        """Return whether the drafter can take in the tokens of a step of these plans later."""
        return shape in self._chunks and not any(plan.num_drafts for plan in plans)

    def goes_on(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether nothing waits, or these plans have the same rows, of one token each, and draft nothing."""
        return not self._postponed or all(
            plan.slots == before.slots
            and plan.num_tokens == plan.num_rows
            and plan.is_decode_only
            and not (plan.num_drafts or plan.setups or plan.copies or plan.state_copies)
            for plan, before in zip(plans, self._plans, strict=True)
        )

    def add(self, plans: Sequence[StepPlan], shape: BatchShape, inputs: DraftInputs) -> bool:
        """Add what is to be taken in after a step of a shape; return whether there is room for a step more."""
        self._plans, self._shape = plans, shape
        self._postponed.append(inputs)
        most = min(chunk_steps(self._sharded, shape), self._num_tokens // max(plan.num_rows for plan in plans))
        return len(self._postponed) < most

    def run(self, params: tuple[jax.Array, ...], state: StepState) -> StepState:
        """Let the drafter take in what waits; return the state."""
        if not self._postponed:
            return state
        assert self._shape is not None
        last, count = self._postponed[-1], len(self._postponed)
        steps = [each.given for each in self._postponed]
        steps += [last.given] * (chunk_steps(self._sharded, self._shape) - count)
        counts = np.full(self._sharded.num_lanes, count, np.int32)
        inputs = self._chunks[self._shape](last.buffer, tuple(steps), counts)
        self.forget()
        return self._drafts(params, Drafted.before(state), inputs).put_into(state)

    def forget(self) -> None:
        """Forget what waits."""
        self._postponed = []
