"""Owner of what is on the devices of one data slice: parameters, pages, compiled steps. Takes plans, gives tokens."""

from typing import NamedTuple

import jax
import numpy as np

from jaxserve.engine.batch import BatchBuilder
from jaxserve.engine.compiled_steps import CompiledSteps
from jaxserve.engine.masks import TokenMasks
from jaxserve.engine.memory import return_freed_memory
from jaxserve.engine.plan import PageCopy, PageGrant, Row, Sampling, SlotSetup, StepPlan
from jaxserve.engine.row_arrays import row_arrays
from jaxserve.engine.steps import StepOutput
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS


class StepResult(NamedTuple):
    """What the host learns of a step.

    Attributes:
        tokens: The tokens of each row; none for a row that does not sample, or whose logits are NaN or all masked.
        logprobs: Those of the tokens, where a row asked for any.
        prompt_logprobs: Those of the prompt tokens behind each query token, where a chunk asked for any.
        sums: [R, D] float32, hidden states summed up over each row's prompt, where a chunk completes any.
    """

    tokens: list[list[int]]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    sums: np.ndarray | None = None


class PendingStep:
    """A launched step whose outputs are on their way to the host."""

    def __init__(self, output: StepOutput, plan: StepPlan):
        self._output = output
        self._plan = plan
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def wait(self) -> StepResult:
        """Waits for the step."""
        output = jax.tree.map(np.asarray, self._output)
        return StepResult(self._token_lists(output.tokens), output.logprobs, output.prompt_logprobs, output.sums)

    def _token_lists(self, tokens: np.ndarray) -> list[list[int]]:
        tokens = tokens[: self._plan.num_rows]
        lists = tokens[:, None].tolist()
        is_empty = (tokens == NO_TOKEN) | (row_arrays(self._plan.columns).num_samples == 0)
        for row in is_empty.nonzero()[0].tolist():
            lists[row] = []
        return lists


class StepRunner:
    """Runs plans on one data slice.

    Args:
        steps: Compiled programs.
        params: Parameters as the program packs them (``ModelProgram.packing``).
    """

    def __init__(self, steps: CompiledSteps, params: tuple[jax.Array, ...]):
        self._steps = steps
        self._params = params
        program = steps.program
        self._builder = BatchBuilder(
            program.num_slots,
            steps.buckets.table_pages,
            program.page_size,
            program.num_pages,
            tuple(program.arguments.values()),
        )
        self._masks = TokenMasks(program.config.vocab_size)
        self._biased_slots: set[int] = set()
        self._state = program.empty_state()
        self._open_masks = {
            rows: jax.device_put(np.full(program.mask_shape(rows), -1, np.int32), program.replicated)
            for rows in {shape.num_rows for shape in steps.buckets.shapes()}
        }

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step and returns without waiting for it; steps run in the order they are launched."""
        builder, masks = self._builder, self._masks
        builder.apply(plan)
        masks.apply(plan.setups)
        setups = [setup for setup in plan.setups if self._needs_row(setup)]
        if setups or plan.copies:
            self._state = self._steps.prepare(self._state, setups, plan.copies)
        masked = masks.rows(plan, builder.starts)
        is_full = bool(masked) or self._steps.program.is_always_full
        variant = builder.variant(plan, is_full)
        shape, step = self._steps.choose(plan, variant)
        mask = masks.array(masked, shape.num_rows) if masked else self._open_masks[shape.num_rows]
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        self._state, output = step(self._params, self._state, buffer, mask)
        if variant != "full":
            output = output._replace(logprobs=None)
        if not any(pooling is not None and pooling.is_last for pooling in plan.columns.pooling):
            output = output._replace(sums=None)
        return PendingStep(output, plan)

    def warm_up(self) -> None:
        """Run every program at least once, before the first request, and wait for them.

        XLA defers part of its work until then: on CPUs its matrix multiplications generate their kernels, which takes
        0.3 to 0.6 s in each program of a model of 30 layers. Mixed steps have a row of two tokens, which kernels do not
        compute as they compute rows of one.
        """
        slot, page, token = 0, 0, 0
        decode = StepPlan(0, [], [PageGrant(slot, 0, [page])], [Row(slot, 0, [token], 1)])
        self._builder.apply(decode)
        self._state = self._steps.prepare(self._state, [SlotSetup(slot, Sampling(), 1)], [PageCopy(page, page)])
        for (shape, variant), step in self._steps.items():
            number = VARIANTS.index("greedy" if variant == "any" else variant)
            chunk = [token] * min(2, shape.num_tokens, self._builder.page_size)
            mixed = StepPlan(0, [], [], [Row(slot, 0, chunk, 1, targets=chunk)])
            buffer = self._builder.build(decode if shape.decode_only else mixed, shape, number)
            ran = step(self._params, self._state, buffer, self._open_masks[shape.num_rows])
            self._state, _ = jax.block_until_ready(ran)
        return_freed_memory()

    def _needs_row(self, setup: SlotSetup) -> bool:
        """Whether a slot's tables must be written: its request reads them, or would find the bias of the one before."""
        slot, sampling = setup.slot, setup.sampling
        was_biased = slot in self._biased_slots
        if sampling.logit_bias:
            self._biased_slots.add(slot)
        elif was_biased:
            self._biased_slots.remove(slot)
        return was_biased or bool(sampling.logit_bias or sampling.tracked_ids) or sampling.has_penalties

    def release(self) -> None:
        """Gives the device's memory back."""
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()
