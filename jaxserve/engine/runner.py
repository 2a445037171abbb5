"""Owner of what is on the devices of one data slice: parameters, pages, compiled steps. Takes plans, gives tokens."""

from typing import NamedTuple

import jax
import numpy as np

from jaxserve.engine.batch import BatchBuilder
from jaxserve.engine.compiled_steps import CompiledSteps
from jaxserve.engine.masks import TokenMasks
from jaxserve.engine.memory import return_freed_memory
from jaxserve.engine.plan import PageCopy, PageGrant, PrefillRow, Sampling, SlotSetup, StepPlan
from jaxserve.engine.steps import StepOutput
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS

_EMPTY_STEP = StepPlan(0, [], [], [], [], [], [])


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
        plan = self._plan
        tokens = tokens[: plan.num_rows]
        lists = tokens[:, None].tolist()
        empty = (tokens == NO_TOKEN).nonzero()[0].tolist()
        empty += [row for row, chunk in enumerate(plan.prefill, len(plan.decode_slots)) if not chunk.samples]
        for row in empty:
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
        masked = masks.rows(plan)
        is_full = bool(masked) or self._steps.program.is_always_full
        variant = builder.variant(plan, is_full)
        shape, step = self._steps.choose(plan, variant)
        mask = masks.array(masked, shape.num_rows) if masked else self._open_masks[shape.num_rows]
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        self._state, output = step(self._params, self._state, buffer, mask)
        if variant != "full":
            output = output._replace(logprobs=None)
        if not any(row.is_pooled for row in plan.prefill):
            output = output._replace(sums=None)
        return PendingStep(output, plan)

    def warm_up(self) -> None:
        """Runs every program at least once, with a row of one token, and waits for them; before the first request.

        XLA puts part of its work off until then: on CPUs its library of dots makes its kernels, 0.3 to 0.6 s in each
        program of a model of 30 layers.
        """
        slot, page, token = 0, 0, 0
        self._builder.apply(_EMPTY_STEP._replace(grants=[PageGrant(slot, 0, [page])]))
        decode = _EMPTY_STEP._replace(decode_slots=[slot], decode_positions=[0], decode_tokens=[token])
        prefill = _EMPTY_STEP._replace(prefill=[PrefillRow(slot, 0, [token], samples=True, targets=[token])])
        self._state = self._steps.prepare(self._state, [SlotSetup(slot, Sampling(), 1)], [PageCopy(page, page)])
        for (shape, variant), step in self._steps.items():
            number = VARIANTS.index("greedy" if variant == "any" else variant)
            buffer = self._builder.build(decode if shape.decode_only else prefill, shape, number)
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
