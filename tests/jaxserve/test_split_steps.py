"""Steps of several programs, as CPUs run them: which there are, and the sampler that serves all shapes of a size."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.batch import build
from jaxserve.device.buckets import Buckets
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.sampler_batch import SamplerShape
from jaxserve.device.slots import Slots
from jaxserve.device.split_steps import SplitStep, sampler_tile, trace_sampler
from jaxserve.device.stage import Stage, num_programs
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.engine.metrics import CompileCounter
from jaxserve.sampling.sampler import VARIANTS
from jaxserve.scheduling.plan import PageGrant, Sampling, SlotMask, SlotSetup, StepPlan
from tests.plan_rows import Row, decode_rows, make_plan
from tests.runners import run_step
from tests.sampler_rows import mask_of
from tests.tiny_programs import make_program, make_runner, tiny_config

TABLE_PAGES, NUM_PAGES = 4, 64
BUCKETS = Buckets(decode_rows=(2, 12), mixed_tokens=(16, 40), max_num_seqs=12, table_pages=TABLE_PAGES)
VOCAB_SIZE = tiny_config().vocab_size
PROMPT = [3, 50, 7, 21, 0, 9, 9]
VARIANT_SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(OptionValues(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01), seed=3),
    "full": Sampling(OptionValues(temperature=0.7, presence_penalty=0.5), seed=4, num_logprobs=3, tracked_ids=(4, 52)),
}


@pytest.fixture(scope="module")
def stage() -> Stage:
    """Compiled, every program once."""
    made = Stage(make_program(tiny_config(), num_pages=NUM_PAGES, num_slots=12), BUCKETS)
    counter = CompileCounter()
    with counter:
        made.compile()
    counter.close()
    # 2 decode and 2 mixed shapes, samplers for 2 and 12 rows, the scorer; and the two that run before steps.
    assert counter.count - 2 == num_programs(BUCKETS, "cpu") == 4 + 2 + 1
    return made


def test_steps_share_samplers_and_the_scorer(stage: Stage) -> None:
    found = {
        (shape.num_tokens, shape.decode_only): step for (shape, _), step in stage.items() if isinstance(step, SplitStep)
    }
    assert set(found) == {(2, True), (12, True), (16, False), (40, False)}
    small, large, *mixed = (found[key] for key in [(2, True), (12, True), (16, False), (40, False)])
    assert small.sampler is not large.sampler
    assert all(step.sampler is large.sampler for step in mixed)
    assert mixed[0].scorer is mixed[1].scorer is not None
    assert small.scorer is None and large.scorer is None


def test_nothing_compiles_behind_the_start(stage: Stage) -> None:
    """Whatever a step's requests ask for; and a prompt is scored by the smallest step that holds it."""
    runner = make_runner(stage)
    runner.warm_up()
    counter = CompileCounter()
    grants = [PageGrant(slot, 0, [slot * TABLE_PAGES + i for i in range(TABLE_PAGES)]) for slot in range(3)]
    masks = (SlotMask(0, mask_of(np.arange(VOCAB_SIZE)[None] % 2 == 0).tobytes()),)
    with counter:
        for number, (variant, sampling) in enumerate(VARIANT_SAMPLINGS.items()):
            known = PROMPT if sampling.has_penalties else []
            setups = [SlotSetup(slot, sampling, 30, known, len(PROMPT)) for slot in range(3)]
            targets = [*PROMPT[1:], -1]
            prefill = [Row(0, 0, PROMPT, 1, targets)]
            first = run(runner, make_plan(number, setups, grants, prefill))
            prefill = [Row(slot, 0, PROMPT, 1) for slot in (1, 2)]
            both = run(runner, make_plan(number, [], [], decode_rows([0], [len(PROMPT)]) + prefill))
            wide = run(runner, make_plan(number, [], [], decode_rows([0, 1, 2], [8, 7, 7])))
            masked = run(runner, make_plan(number, [], [], decode_rows([0], [9]), masks=masks))
            assert first.prompt_logprobs is not None and first.prompt_logprobs.chosen[: len(PROMPT) - 1].all()
            assert both.prompt_logprobs is None and masked.tokens[0][0] % 2 == 0
            assert all((result.logprobs is None) == (variant != "full") for result in (first, both, wide))
    counter.close()
    assert counter.count == 0
    plan = make_plan(0, [], [], [Row(0, 0, PROMPT, 1, PROMPT)])
    shape, step = stage.choose([plan], "greedy")
    assert shape.num_tokens == 16 and isinstance(step, SplitStep) and step.scorer is not None
    runner.close()


def run(runner: LocalRunner, plan: StepPlan) -> StepResult:
    return run_step(runner, plan)


def test_memory_of_a_step_includes_what_its_programs_hand_on(stage: Stage) -> None:
    logits, hidden = 4 * 12 * VOCAB_SIZE, 4 * 40 * tiny_config().hidden_size
    assert stage.temporary_bytes > logits + hidden


@pytest.mark.parametrize(
    ("num_rows", "row_tile", "expected"),
    [(1, None, None), (8, None, None), (16, None, 8), (96, None, 8), (12, None, 4), (10, None, 2), (13, None, None)]
    + [(8, 8, 8), (64, 8, 8), (4, 2, 2)],
)
def test_rows_that_a_sampler_takes_together(num_rows: int, row_tile: int | None, expected: int | None) -> None:
    assert sampler_tile(num_rows, row_tile) == expected


@pytest.mark.parametrize("num_rows", [4, 12, 13, 16])
def test_a_row_is_sampled_alone_as_among_others(num_rows: int) -> None:
    """The same token and the same bits of every logprob, whatever the others ask for and wherever the row is."""
    program = make_program(tiny_config(), num_slots=num_rows, num_pages=NUM_PAGES)
    sampler = trace_sampler(program, SamplerShape(num_rows, num_rows)).lower().compile()
    random = np.random.default_rng(num_rows)
    logits = random.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32)
    samplings = [list(VARIANT_SAMPLINGS.values())[row % 3]._replace(seed=row) for row in range(num_rows)]
    tables = program.empty_state().tables
    tables = tables._replace(bias=jax.device_put(random.normal(size=tables.bias.shape).astype(np.float32)))

    def sampled(slots: list[int], variant: str) -> list[np.ndarray]:
        """Tokens and logprobs of the slots' requests, in rows of that order; padding rows have anything as logits."""
        rows = random.permutation(np.resize(logits, (num_rows, VOCAB_SIZE)))
        rows[: len(slots)] = logits[slots]
        part = sampler_part(num_rows, slots, samplings, variant)
        mask = np.full(program.mask_shape(num_rows), -1, np.int32)
        found = sampler(rows, LatestTokens(*jnp.zeros((2, num_rows), jnp.int32)), tables, part, mask)
        latest, tokens = np.asarray(found.latest.token_ids), np.asarray(found.tokens)
        assert np.asarray(found.latest.positions)[slots].tolist() == [6 + slot for slot in slots]
        np.testing.assert_array_equal(latest[slots], tokens[: len(slots)])
        assert not np.delete(latest, slots).any(), "only rows in use set the latest token of a slot"
        return [np.asarray(array)[: len(slots)] for array in (tokens, *found.logprobs)]

    for variant in VARIANTS[1:]:
        order = random.permutation(num_rows).tolist()
        together = sampled(order, variant)
        for row, slot in enumerate(order):
            for found, expected in zip(sampled([slot], variant), together, strict=True):
                np.testing.assert_array_equal(found[0], expected[row], err_msg=f"slot {slot} in row {row}")


def sampler_part(num_rows: int, slots: list[int], samplings: list[Sampling], variant: str) -> np.ndarray:
    """The sampler's part of the buffer of a decode step of these slots."""
    shape = BatchShape(num_tokens=num_rows, num_rows=num_rows, table_pages=TABLE_PAGES, decode_only=True)
    held = Slots(num_rows, TABLE_PAGES, 8, NUM_PAGES, VOCAB_SIZE)
    setups = [SlotSetup(slot, samplings[slot], 30, [], 1) for slot in slots]
    positions = [5 + slot for slot in slots]
    plan = make_plan(0, setups, [], decode_rows(slots, positions))
    held.apply(plan)
    part = build(held, plan, shape, VARIANTS.index(variant))[shape.sampler_start :]
    part[: len(slots)] = [position + 1 for position in positions]  # as the model's program does
    return part


@pytest.mark.parametrize("num_rows", [4, 16])
def test_the_sampler_copies_no_table(num_rows: int) -> None:
    program = make_program(tiny_config(), num_slots=4000)
    analysis: Any = trace_sampler(program, SamplerShape(num_rows, num_rows)).lower().compile().memory_analysis()
    assert analysis.temp_size_in_bytes < min(math.prod(table.shape) for table in program.abstract_state().tables)
