"""Rows with drafts, through the runner: the tokens are those that rows of one token give, whatever the drafts are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.batch import build
from jaxserve.device.buckets import Buckets
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.slots import Slots
from jaxserve.device.stage import Stage
from jaxserve.device.step_batch import BatchShape
from jaxserve.sampling.sampler import NO_TOKEN
from jaxserve.sampling.verification import NOWHERE, Verification
from jaxserve.scheduling.plan import ON_DEVICE, PageGrant, Sampling, SlotSetup, StepPlan
from tests.plan_rows import Row, make_plan, rows_of
from tests.runners import run_step
from tests.tiny_programs import make_program, make_runner, random_params, tiny_config

MAX_SAMPLES, TABLE_PAGES, NUM_TOKENS = 4, 5, 24
BUCKETS = Buckets(
    (8,), (16, 64), max_num_seqs=8, table_pages=TABLE_PAGES, multiple=8, max_samples=MAX_SAMPLES, draft_rows=(8,)
)
PROMPT = [3, 50, 7, 21, 0, 9, 9, 30, 2, 17, 44]
NAN_TOKEN = 45
SAMPLINGS = [
    Sampling(num_logprobs=3),
    Sampling(OptionValues(temperature=1.0, top_k=20), num_logprobs=3, seed=7),
    Sampling(OptionValues(frequency_penalty=1.5, presence_penalty=0.5)),
    Sampling(OptionValues(temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4), seed=2**31 + 5),
    Sampling(OptionValues(frequency_penalty=0.75), logit_bias=((11, 40.0), (12, 39.5)), num_logprobs=0),
    Sampling(bad_ids=tuple(range(5, 30)), tracked_ids=(3, 4), num_logprobs=0),
]


@functools.cache
def compiled_stage(tensor: int, platform: str) -> Stage:
    """Deterministic programs, so that a row has the same bits in steps of one token a row and of several."""
    program = make_program(tiny_config(), tensor=tensor, num_pages=40, num_slots=8, row_tile=8)
    stage = Stage(program, BUCKETS, platform)
    stage.compile()
    return stage


def params_with_nan(stage: Stage) -> tuple[jax.Array, ...]:
    """Random parameters; the embedding of ``NAN_TOKEN`` is NaN."""
    params = []
    for name, array in zip(stage.model.abstract_model.params, random_params(stage.model), strict=True):
        values = np.array(array)
        if name.startswith("embed"):
            values[NAN_TOKEN] = np.nan
        params.append(jax.device_put(values, array.sharding))
    return tuple(params)


class Driver:
    """A runner with one text for each of ``SAMPLINGS``; keeps the tokens and the logprobs of each slot."""

    def __init__(self, stage: Stage):
        self.runner = make_runner(stage, params_with_nan(stage))
        self.tokens: list[list[int]] = [[] for _ in SAMPLINGS]
        self.logprobs: list[list[list[np.ndarray]]] = [[] for _ in SAMPLINGS]
        slots = range(len(SAMPLINGS))
        setups = [SlotSetup(i, SAMPLINGS[i], 40, PROMPT if SAMPLINGS[i].has_penalties else (), 11) for i in slots]
        grants = [PageGrant(slot, 0, [slot * TABLE_PAGES + i for i in range(TABLE_PAGES)]) for slot in slots]
        self.run(make_plan(0, setups, grants, [Row(slot, 0, PROMPT, 1) for slot in range(3)]))
        self.run(make_plan(1, [], [], [Row(0, ON_DEVICE, [ON_DEVICE], 1), *(Row(i, 0, PROMPT, 1) for i in (3, 4, 5))]))

    def run(self, plan: StepPlan) -> StepResult:
        """A step, and what it gives its slots."""
        result = run_step(self.runner, plan)
        for row, first, tokens in zip(rows_of(plan), plan.first_samples, result.tokens, strict=True):
            assert len(tokens) <= row.num_samples
            self.tokens[row.slot] += tokens
            for index in range(first, first + len(tokens)):
                found = [] if result.logprobs is None else [np.asarray(array)[index] for array in result.logprobs]
                self.logprobs[row.slot].append(found)
        return result


@functools.cache
def one_by_one(tensor: int, platform: str) -> Driver:
    """The texts as rows of one token give them."""
    driver = Driver(compiled_stage(tensor, platform))
    for _ in range(NUM_TOKENS):
        driver.run(make_plan(2, [], [], [Row(slot, ON_DEVICE, [ON_DEVICE], 1) for slot in range(len(SAMPLINGS))]))
    assert all(len(tokens) >= NUM_TOKENS and NAN_TOKEN not in tokens for tokens in driver.tokens)
    return driver


def right(expected: list[int], rng: np.random.Generator) -> list[int]:
    """What comes next."""
    return expected[: int(rng.integers(0, MAX_SAMPLES))]


def wrong(expected: list[int], rng: np.random.Generator) -> list[int]:
    """Never what comes next; a token whose keys and values are NaN among it."""
    drafts = [(token + 1) % 40 for token in expected[: MAX_SAMPLES - 1]]
    return [*drafts[:1], NAN_TOKEN, *drafts[2:]] if rng.random() < 0.5 else drafts


def mixed(expected: list[int], rng: np.random.Generator) -> list[int]:
    """Right at first."""
    num_right = int(rng.integers(0, MAX_SAMPLES))
    return [*expected[:num_right], *wrong(expected[num_right:], rng)][: int(rng.integers(0, MAX_SAMPLES))]


@pytest.mark.parametrize(("tensor", "platform"), [(1, "cpu"), (2, "cpu"), (1, "gpu")])
@pytest.mark.parametrize("propose", [right, wrong, mixed])
def test_drafts_change_no_token(
    propose: Callable[[list[int], np.random.Generator], list[int]], tensor: int, platform: str
) -> None:
    """Starts and latest tokens are left to the device; tokens and the bits of all logprobs stay the same."""
    expected = one_by_one(tensor, platform)
    driver = Driver(compiled_stage(tensor, platform))
    rng = np.random.default_rng(3)
    num_steps = 0
    while any(len(tokens) < NUM_TOKENS for tokens in driver.tokens):
        slots = rng.permutation([slot for slot, tokens in enumerate(driver.tokens) if len(tokens) < NUM_TOKENS])
        drafts = [propose(expected.tokens[slot][len(driver.tokens[slot]) :], rng) for slot in slots.tolist()]
        rows = [
            Row(slot, ON_DEVICE, [ON_DEVICE, *some], 1 + len(some))
            for slot, some in zip(slots.tolist(), drafts, strict=True)
        ]
        plan = make_plan(2, [], [], sorted(rows, key=lambda row: row.num_samples))
        shape, _ = compiled_stage(tensor, platform).choose([plan], "any" if platform == "cpu" else "sampled")
        assert shape.decode_only and shape.has_drafts == plan.has_drafts
        driver.run(plan)
        num_steps += 1
    assert num_steps < NUM_TOKENS - 3 or propose is wrong
    for slot in range(len(SAMPLINGS)):
        assert driver.tokens[slot][:NUM_TOKENS] == expected.tokens[slot][:NUM_TOKENS], SAMPLINGS[slot]
        if SAMPLINGS[slot].num_logprobs < 0:
            continue
        pairs = zip(driver.logprobs[slot][:NUM_TOKENS], expected.logprobs[slot], strict=False)
        for found, wanted in pairs:
            for array, other in zip(found, wanted, strict=False):
                np.testing.assert_array_equal(array, other)
    driver.runner.close()


def test_a_row_with_drafts_beside_a_chunk_and_a_row_that_samples_nothing() -> None:
    """Samples are counted from the row's own; the host may name the row's first token and its place."""
    expected = one_by_one(1, "cpu")
    driver = Driver(compiled_stage(1, "cpu"))
    text = expected.tokens[1]
    rows = [
        Row(0, ON_DEVICE, [ON_DEVICE], 1),
        Row(6, 0, PROMPT, 0),
        Row(1, 11, text[:2], 2),
        Row(7, 0, PROMPT, 1),
        Row(2, ON_DEVICE, [ON_DEVICE, *expected.tokens[2][1:4]], 4),
    ]
    setups = [SlotSetup(slot, Sampling(), 40) for slot in (6, 7)]
    grants = [PageGrant(slot, 0, [30 + 2 * (slot - 6), 31 + 2 * (slot - 6)]) for slot in (6, 7)]
    plan = make_plan(2, setups, grants, rows)
    assert list(plan.first_samples) == [0, 1, 2, 4, 5]
    result = run_step(driver.runner, plan)
    assert result.tokens[:3] == [[expected.tokens[0][2]], [], text[1:3]]
    assert result.tokens[3] == [expected.tokens[0][0]], "the prompt of slot 0, greedy too"
    assert result.tokens[4] == expected.tokens[2][1:5]
    driver.runner.close()


def test_shapes_without_drafts_have_the_buffers_they_had() -> None:
    shapes: dict[str, Any] = {"num_tokens": 64, "num_rows": 8, "table_pages": 4, "decode_only": False}
    plain, several = BatchShape(**shapes), BatchShape(**shapes, max_samples=4)
    assert plain.sampler.num_samples == 8 and several.sampler.num_samples == 32
    assert several.buffer_size - plain.buffer_size == (32 - 8) * 2 + 32 * 2 + 1
    assert not {"followed", "sample_rows", "num_samples"} & set(plain.fields)
    assert [shape.max_samples for shape in BUCKETS.shapes()] == [1, 4, 4, 4] and BUCKETS.scoring_shape.max_samples == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_token_stays_while_the_drafts_before_it_are_what_was_sampled(seed: int) -> None:
    """Against a loop over the samples of each row."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, MAX_SAMPLES + 1, int(rng.integers(1, 8)))
    num_samples, num_padding = int(counts.sum()), int(rng.integers(0, 4))
    rows = np.concatenate([np.arange(len(counts)).repeat(counts), np.full(num_padding, len(counts))]).astype(np.int32)
    tokens = rng.integers(NO_TOKEN, 3, len(rows)).astype(np.int32)
    followed = np.where(rng.random(len(rows)) < 0.7, np.roll(tokens, 1), 1).astype(np.int32)
    verification = Verification(jax.numpy.asarray(rows), jax.numpy.asarray(followed))
    found = verification.keep(jax.numpy.asarray(tokens))
    drafts = np.asarray(verification.drafts_before(MAX_SAMPLES - 1))
    for first, count in zip((counts.cumsum() - counts).tolist(), counts.tolist(), strict=True):
        stays = [tokens[first] >= 0]
        for i in range(first + 1, first + count):
            stays.append(stays[-1] and tokens[i] >= 0 and followed[i] == tokens[i - 1])
            padded = [*followed[first + 1 : i + 1][::-1], *[NOWHERE] * MAX_SAMPLES]
            assert drafts[i].tolist() == padded[: MAX_SAMPLES - 1]
        assert np.asarray(found.is_kept)[first : first + count].tolist() == stays
        latest = max(sum(map(bool, stays)), 1) - 1
        assert np.asarray(found.is_latest)[first : first + count].nonzero()[0].tolist() == [latest]
    assert num_samples + num_padding == len(rows)


def test_a_position_after_drafts_is_the_least_it_can_be() -> None:
    """So that a page counts as shared by all rows only where it is full whatever stays."""
    slots = Slots(2, TABLE_PAGES, 8, 40, 53)
    shape = BatchShape(num_tokens=8, num_rows=2, table_pages=TABLE_PAGES, decode_only=False, max_samples=4)
    slots.apply(make_plan(0, [SlotSetup(1, Sampling(), 40)], [PageGrant(1, 0, [3, 4])], []))
    starts = []
    for row in (Row(1, 5, [9, 8, 7, 6], 4), Row(1, ON_DEVICE, [ON_DEVICE, 5], 2), Row(1, ON_DEVICE, [ON_DEVICE], 1)):
        plan = make_plan(0, [], [], [row])
        starts += slots.starts.of(plan).tolist()
        buffer = build(slots, plan, shape, 0)
    field = shape.fields["num_shared_pages"]
    assert starts == [5, 6, 7] and buffer[field.start] == 1, "eight tokens fill a page"
    assert slots.starts.of(make_plan(0, [], [], [Row(1, 9, [1], 1)])).tolist() == [9]
