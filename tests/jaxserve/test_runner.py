"""Requests that ask for more than a few numbers, through the runner: what their slots keep from step to step."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.buckets import Buckets
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.stage import Stage, step_keys
from jaxserve.device.state_updates import COPY_CAPACITY, copy_arrays
from jaxserve.scheduling.plan import ON_DEVICE, PageCopy, PageGrant, Sampling, SlotMask, SlotSetup, StepPlan
from tests.plan_rows import Row, decode_rows, make_plan
from tests.runners import run_step
from tests.sampler_rows import mask_of
from tests.tiny_programs import make_program, make_runner, random_params, tiny_config

NUM_SLOTS, TABLE_PAGES, NUM_PAGES = 4, 4, 20
BUCKETS = Buckets(decode_rows=(4,), mixed_tokens=(64,), max_num_seqs=4, table_pages=TABLE_PAGES)
VOCAB_SIZE = tiny_config().vocab_size
PROMPT = [3, 50, 7, 21, 0, 9, 9, 30, 2, 17, 44]


class Favour:
    """Adds ``favour`` to token 11."""

    arguments: Mapping[str, float] = {"favour": 0.0}

    def __call__(self, logits: jax.Array, arguments: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        del positions
        return logits + jnp.where(jnp.arange(logits.shape[1]) == 11, arguments["favour"][:, None], 0.0)


@functools.cache
def compiled_stage(
    tensor: int, processors: tuple = (Favour(),), row_tile: int | None = None, buckets: Buckets = BUCKETS
) -> Stage:
    """Programs that report logprobs of the whole vocabulary, compiled once for all tests."""
    settings: dict[str, Any] = {"max_logprobs": VOCAB_SIZE, "processors": processors, "row_tile": row_tile}
    program = make_program(tiny_config(), tensor=tensor, num_pages=NUM_PAGES, **settings)
    stage = Stage(program, buckets)
    stage.compile()
    return stage


class Driver:
    """A runner, and texts that run in its slots, a page table each of pages of their own."""

    def __init__(self, tensor: int = 1, params: Any = None, stage: Stage | None = None):
        self.stage = compiled_stage(tensor) if stage is None else stage
        self.runner = make_runner(self.stage, params)
        self.texts: dict[int, list[int]] = {}
        self.number = 0

    def start(self, texts: dict[int, tuple[Sampling, list[int]]], num_prompt_tokens: int | None = None) -> StepResult:
        """Sets slots up and computes their texts in one chunk; returns the step's result."""
        setups, grants, prefill = [], [], []
        for slot, (sampling, tokens) in texts.items():
            known = tokens if sampling.has_penalties else []
            setups.append(SlotSetup(slot, sampling, 30, known, num_prompt_tokens or len(tokens)))
            grants.append(PageGrant(slot, 0, [slot * TABLE_PAGES + i for i in range(TABLE_PAGES)]))
            prefill.append(Row(slot, 0, tokens, 1))
            self.texts[slot] = [*tokens]
        return self._run(make_plan(self.number, setups, grants, prefill), [*texts])

    def decode(self, slots: list[int], masks: tuple[SlotMask, ...] = ()) -> StepResult:
        """One token more for each slot; the host leaves naming and placing it to the device."""
        plan = make_plan(self.number, [], [], decode_rows(slots, [ON_DEVICE] * len(slots)), masks=masks)
        return self._run(plan, slots)

    def _run(self, plan: StepPlan, slots: list[int]) -> StepResult:
        self.number += 1
        result = run_step(self.runner, plan)
        for slot, tokens in zip(slots, result.tokens, strict=True):
            self.texts[slot] += tokens
        return result


def raw_logprobs(result: StepResult, row: int) -> np.ndarray:
    """A row's logprobs of the whole vocabulary."""
    assert result.logprobs is not None
    found = np.zeros(VOCAB_SIZE)
    found[result.logprobs.top_ids[row]] = result.logprobs.top[row]
    return found


def penalized(scores: np.ndarray, text: list[int], num_prompt_tokens: int, sampling: Sampling) -> np.ndarray:
    """Penalties and bias on logprobs, whose differences are the logits' own; exact for a repetition penalty of 1."""
    scores = scores.copy()
    for token, added in sampling.logit_bias:
        scores[token] += added
    for token in set(text[num_prompt_tokens:]):
        count = text[num_prompt_tokens:].count(token)
        scores[token] -= sampling.options.frequency_penalty * count + sampling.options.presence_penalty
    return scores


def check_greedy(driver: Driver, result: StepResult, slots: list[int], samplings: dict[int, Sampling]) -> None:
    """The tokens just appended are those that counting the texts on the host gives."""
    for row, slot in enumerate(slots):
        text = driver.texts[slot][:-1]
        scores = penalized(raw_logprobs(result, row), text, len(PROMPT), samplings[slot])
        assert driver.texts[slot][-1] == scores.argmax(), f"slot {slot} behind {text}"


def test_penalties_follow_the_text() -> None:
    """From prefill to decode, together with others, in a slot set up again midway, and in one that changes hands."""
    strict = Sampling(OptionValues(frequency_penalty=3.0, presence_penalty=2.0), num_logprobs=5)
    biased = Sampling(OptionValues(frequency_penalty=0.75), num_logprobs=5, logit_bias=((11, 40.0), (12, 39.0)))
    samplings = {0: strict, 1: biased, 2: Sampling(num_logprobs=5)}
    driver = Driver()
    result = driver.start({slot: (sampling, PROMPT) for slot, sampling in samplings.items()})
    check_greedy(driver, result, [0, 1, 2], samplings)
    for slots in ([0, 1, 2], [2, 1], [1, 0], [0, 1, 2]):
        check_greedy(driver, driver.decode(slots), slots, samplings)
    assert driver.texts[1][-5:].count(11) > 1 and 12 in driver.texts[1], "11 until it is worth less than 12"
    # Slot 0 loses its pages and is computed again elsewhere: its output tokens count as output.
    again = driver.texts[0]
    check_greedy(driver, driver.start({3: (strict, again)}, len(PROMPT)), [3], {3: strict})
    samplings[3] = strict
    for _ in range(3):
        check_greedy(driver, driver.decode([3, 0]), [3, 0], samplings)
    assert driver.texts[3][:-1] == driver.texts[0]
    # Slot 1 goes to a request without bias or penalties: nothing is left of either.
    samplings[1] = Sampling(num_logprobs=5)
    check_greedy(driver, driver.start({1: (samplings[1], PROMPT)}), [1], samplings)
    for _ in range(3):
        check_greedy(driver, driver.decode([1, 2]), [1, 2], samplings)
    assert driver.texts[1] == driver.texts[2][: len(driver.texts[1])]
    driver.runner.close()


def test_a_decode_row_of_a_known_token_is_not_counted_twice() -> None:
    """The last chunk of a text that is computed again may be one token, as a decode row."""
    sampling = Sampling(OptionValues(frequency_penalty=3.0), num_logprobs=5)
    text = [*PROMPT, 5, 5, 6]
    whole, parts = Driver(), Driver()
    whole.start({0: (sampling, text)}, len(PROMPT))
    setup = SlotSetup(0, sampling, 30, text, len(PROMPT))
    grant = PageGrant(0, 0, [0, 1, 2, 3])
    run_step(parts.runner, make_plan(0, [setup], [grant], [Row(0, 0, text[:-1], 0)]))
    last = run_step(parts.runner, make_plan(1, [], [], decode_rows([0], [len(text) - 1], [6])))
    assert last.tokens == [whole.texts[0][-1:]]
    parts.texts[0] = [*text, *last.tokens[0]]
    for _ in range(4):
        whole.decode([0])
        parts.decode([0])
    assert parts.texts == whole.texts
    whole.runner.close()
    parts.runner.close()


def test_steps_whose_rows_go_on_are_as_those_made_anew() -> None:
    """Plans that name the first with their rows take the inputs of the one before, until a slot gets a page."""
    samplings = [
        Sampling(OptionValues(frequency_penalty=3.0)),
        Sampling(OptionValues(temperature=1.0), seed=3),
        Sampling(OptionValues(temperature=1.0), seed=4, num_logprobs=2),
    ]
    found, num_made = list[list[Any]](), list[int]()
    for shares in (True, False):
        driver, tokens, inputs = Driver(), list[Any](), list[Any]()
        driver.start({slot: (sampling, PROMPT) for slot, sampling in enumerate(samplings)})
        for number in range(6):
            grants = [PageGrant(1, 3, [7])] if number == 3 else []
            plan = make_plan(1 + number, [], grants, [Row(slot, ON_DEVICE, [ON_DEVICE], 1) for slot in range(3)])
            plan.same_rows_as = 1 if shares and number else None
            tokens.append(run_step(driver.runner, plan).tokens)
            inputs.append(driver.runner._inputs[-1])
        driver.runner.close()
        found.append(tokens)
        num_made.append(len({id(one) for one in inputs}))
    assert found[0] == found[1]
    assert num_made == [2, 6]


def test_mixed_rows_are_each_row_alone() -> None:
    """Greedy, seeded, penalised, biased, masked, constrained, tracked and processed requests in one batch."""
    allowed = np.arange(VOCAB_SIZE) % 2 == 0
    samplings = [
        Sampling(),
        Sampling(OptionValues(temperature=1.0, top_k=20, top_p=0.9), seed=3, num_logprobs=2),
        Sampling(
            OptionValues(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5), seed=4, tracked_ids=(4, 52)
        ),
        Sampling(
            OptionValues(temperature=0.9, min_p=0.02), seed=5, bad_ids=(0, 9), logit_bias=((7, 2.0),), arguments=(1.5,)
        ),
        Sampling(
            OptionValues(temperature=1.2), seed=6, allowed_ids=tuple(range(20)), banned_ids=(2, 3), banned_until=14
        ),
        Sampling(OptionValues(temperature=1.0), seed=7, num_logprobs=0),
    ]

    def masks(slots: list[int], names: list[int]) -> tuple[SlotMask, ...]:
        words = mask_of(allowed[None]).tobytes()
        return tuple(SlotMask(slot, words) for slot, name in zip(slots, names, strict=True) if name == 5)

    def run(names: list[int]) -> dict[int, tuple[list[int], list[np.ndarray]]]:
        driver = Driver()
        slots = [*range(len(names))]
        driver.start({slot: (samplings[name], [*PROMPT, name]) for slot, name in zip(slots, names, strict=True)})
        tracked = []
        for _ in range(8):
            result = driver.decode(slots, masks(slots, names))
            tracked.append(None if result.logprobs is None else result.logprobs.tracked)
        driver.runner.close()
        return {
            name: (driver.texts[slot], [row[slot, :2] for row in tracked if row is not None])
            for slot, name in zip(slots, names, strict=True)
        }

    alone = {name: run([name])[name] for name in range(len(samplings))}
    for names in ([0, 1, 2, 3], [5, 4, 3, 2], [1, 5, 0, 4]):
        for name, (text, tracked) in run(names).items():
            assert text == alone[name][0], f"request {name} among {names}"
            if name == 2:
                np.testing.assert_allclose(tracked, alone[name][1], atol=1e-5)
    assert all(token % 2 == 0 for token in alone[5][0][len(PROMPT) + 2 :])
    assert not {0, 9} & set(alone[3][0][len(PROMPT) + 1 :])
    assert set(alone[4][0][len(PROMPT) + 1 :]) <= set(range(20))


def test_row_tiles_make_rows_the_same_bits_in_every_program() -> None:
    """Logprobs of a text, and of its prompt, alone or among others, in decode shapes of one tile and of two."""
    samplings = [
        Sampling(
            OptionValues(temperature=0.8, top_p=0.9, frequency_penalty=0.3),
            seed=seed,
            num_logprobs=VOCAB_SIZE,
            tracked_ids=(4,),
        )
        for seed in range(4)
    ]
    buckets = Buckets(decode_rows=(2, 4), mixed_tokens=(16, 64), max_num_seqs=4, table_pages=TABLE_PAGES)
    stage = compiled_stage(1, (), 2, buckets)

    def run(groups: list[list[int]]) -> dict[int, list[Any]]:
        """What is reported of each request: those of a group start together, and all there are go on together."""
        driver = Driver(stage=stage)
        reports: dict[int, list[Any]] = {}
        for group in [*groups, [], [], []]:
            slots = [*reports]
            if slots:
                note(reports, driver.decode(slots), slots)
            if group:
                reports |= {name: [] for name in group}
                note(reports, driver.start({name: (samplings[name], [*PROMPT, name]) for name in group}), group)
        driver.runner.close()
        return {name: [driver.texts[name][: len(PROMPT) + 5], *found[:4]] for name, found in reports.items()}

    def note(reports: dict[int, list[Any]], result: StepResult, slots: list[int]) -> None:
        for row, slot in enumerate(slots):
            reports[slot].append([np.array(array[row]) for array in jax.tree.leaves(result.logprobs)])

    alone = {name: run([[name]])[name] for name in range(4)}
    for groups in ([[0, 1, 2, 3]], [[2], [1, 3], [0]]):
        for name, reports in run(groups).items():
            for found, expected in zip(jax.tree.leaves(reports), jax.tree.leaves(alone[name]), strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("tensor", "row_tile"), [(1, None), (2, None), (1, 2)])
def test_decode_steps_larger_than_every_decode_shape_run_as_mixed_steps(
    tensor: int, row_tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens and scores of the usual shapes; with row tiles these have the same bits."""
    samplings = {
        0: Sampling(num_logprobs=VOCAB_SIZE),
        1: Sampling(OptionValues(temperature=0.9, top_p=0.9), seed=3, num_logprobs=5),
        2: Sampling(OptionValues(frequency_penalty=2.0, presence_penalty=1.0), num_logprobs=5),
        3: Sampling(OptionValues(temperature=0.8), seed=4, tracked_ids=(4, 52), logit_bias=((7, 2.0),)),
    }
    few = Buckets.make(4, 64, TABLE_PAGES, row_tile or 1, {"decode": [2], "mixed": [4, 64]})
    assert len(few.shapes()) == 3
    decode_slots, reports = ([0, 1, 2, 3], [3, 1, 0], [2, 0], [1, 0, 2, 3]), []
    for buckets in (BUCKETS, few):
        stage = compiled_stage(tensor, (), row_tile, buckets)
        shapes, choose = [], stage.choose

        def noted(plans: list[StepPlan], variant: str, choose: Any = choose, shapes: list = shapes) -> Any:
            shape, compiled = choose(plans, variant)
            shapes.append((shape.num_tokens, shape.decode_only))
            return shape, compiled

        monkeypatch.setattr(stage, "choose", noted)
        driver = Driver(stage=stage)
        results = [driver.start({slot: (sampling, PROMPT) for slot, sampling in samplings.items()})]
        results += [driver.decode(slots) for slots in decode_slots]
        reports.append((driver.texts, [[array[:2] for array in jax.tree.leaves(one.logprobs)] for one in results]))
        driver.runner.close()
        wide = (4, buckets is BUCKETS)
        assert shapes == [(64, False), wide, wide, (4 if buckets is BUCKETS else 2, True), wide]
    (texts, expected), (found_texts, found) = reports
    assert found_texts == texts
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=0 if row_tile else 1e-4)


def test_tracked_tokens() -> None:
    """Values of the tokens asked for, in their order, in every step."""
    ids = (4, 52, 0)
    driver = Driver()
    results = [driver.start({0: (Sampling(tracked_ids=ids), PROMPT)}), driver.decode([0]), driver.decode([0])]
    for result in results:
        assert result.logprobs is not None
        np.testing.assert_array_equal(result.logprobs.tracked[0, :3], raw_logprobs(result, 0)[list(ids)])
    driver.runner.close()


def test_the_engines_processors() -> None:
    """A request that gives its argument is in one batch with one that does not."""
    driver = Driver()
    driver.start({0: (Sampling(arguments=(1000.0,)), PROMPT), 1: (Sampling(), PROMPT)})
    for _ in range(3):
        driver.decode([1, 0])
    assert driver.texts[0][len(PROMPT) :] == [11] * 4 != driver.texts[1][len(PROMPT) :]
    driver.runner.close()


class Always:
    """Leaves token 13 alone."""

    arguments: Mapping[str, float] = {}

    def __call__(self, logits: jax.Array, arguments: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        del arguments, positions
        return jnp.where(jnp.arange(logits.shape[1]) == 13, logits, -jnp.inf)


def test_a_processor_without_arguments_applies_to_every_row() -> None:
    stage = compiled_stage(1, (Always(),))
    runner = make_runner(stage)
    plan = make_plan(0, [SlotSetup(0, Sampling(), 9)], [PageGrant(0, 0, [3])], decode_rows([0], [0], [5]))
    assert run_step(runner, plan).tokens == [[13]]
    runner.close()


def test_programs_of_an_accelerator() -> None:
    """Decode shapes for greedy and for sampled rows; where every row needs more, for that alone."""
    for always_full, decode in ((False, ["greedy", "sampled"]), (True, ["full"])):
        keys = step_keys(BUCKETS, "gpu", always_full)
        assert [variant for shape, variant in keys if shape.decode_only] == decode
        assert [variant for shape, variant in keys if not shape.decode_only] == ["any", "any"]


def test_programs_of_given_sizes() -> None:
    """On an accelerator, decode steps with too many rows run in a mixed program, whatever their sampler variant."""
    buckets = Buckets.make(4, 64, TABLE_PAGES, 2, {"decode": [2], "mixed": [64]})
    stage = Stage(make_program(tiny_config(), num_pages=NUM_PAGES), buckets, "gpu")
    assert [(shape.num_tokens, variant) for shape, variant in stage.keys] == [
        (2, "greedy"),
        (2, "sampled"),
        (64, "any"),
        (64, "any"),
    ]
    stage._steps = stage._plain_steps = {key: object.__new__(jax.stages.Compiled) for key in stage.keys}
    for rows, variant, size, expected in (
        (2, "greedy", 2, "greedy"),
        (2, "sampled", 2, "sampled"),
        (2, "full", 64, "any"),
        (3, "greedy", 64, "any"),
        (4, "full", 64, "any"),
    ):
        plan = make_plan(0, [], [], decode_rows(range(rows), [0] * rows, [5] * rows))
        shape, compiled = stage.choose([plan], variant)
        assert (shape.num_tokens, shape.decode_only, shape.scores_prompt) == (size, size == 2, False)
        assert compiled is stage._steps[shape, expected]


def poisoned_params(program: ShardedModel, token: int) -> tuple[jax.Array, ...]:
    """A model whose embedding of a token is NaN."""
    params = []
    for name, array in zip(program.abstract_model.params, random_params(program), strict=True):
        values = np.array(array)
        if name.startswith("embed"):
            values[token] = np.nan
        params.append(jax.device_put(values, array.sharding))
    return tuple(params)


def test_a_row_of_nan_leaves_its_neighbours_alone() -> None:
    """It has no token; other rows get what they would have got, bit for bit, also in later steps."""
    program = compiled_stage(1).model
    good = Sampling(OptionValues(temperature=1.0), seed=1, num_logprobs=3)
    results: list[list[StepResult]] = []
    for bad_prompt in ([1, 2, 3], [1, 40, 3]):
        driver = Driver(params=poisoned_params(program, 40))
        texts = {0: (good, [3, 1]), 1: (Sampling(num_logprobs=1), bad_prompt), 2: (Sampling(num_logprobs=1), [9, 8])}
        results.append([driver.start(texts), *(driver.decode([2, 0, 1]) for _ in range(3))])
        driver.runner.close()
    for step, (clean, broken) in enumerate(zip(*results, strict=True)):
        rows, bad = ([0, 2], 1) if step == 0 else ([0, 1], 2)
        assert broken.tokens[bad] == [] != clean.tokens[bad]
        for found, expected in zip(jax.tree.leaves(broken.logprobs), jax.tree.leaves(clean.logprobs), strict=True):
            np.testing.assert_array_equal(found[rows], expected[rows])
        assert [broken.tokens[row] for row in rows] == [clean.tokens[row] for row in rows]


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_warm_up_runs_every_program_and_changes_no_answer(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = compiled_stage(tensor)
    fresh, warm = Driver(tensor), Driver(tensor)
    programs, runs = list(stage.items()), []

    def noted(key: Any, compiled: Any) -> Any:
        return lambda *arguments: runs.append(key) or compiled(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(warm.runner._last, "items", lambda: [(key, noted(key, compiled)) for key, compiled in programs])
        warm.runner.warm_up()
    assert runs == stage.keys
    penalized = Sampling(OptionValues(repetition_penalty=1.5, frequency_penalty=0.5), num_logprobs=VOCAB_SIZE)
    texts = {
        0: (penalized, PROMPT),
        2: (Sampling(OptionValues(temperature=1.0), seed=3, num_logprobs=VOCAB_SIZE), PROMPT[:5]),
    }
    results = []
    for driver in (fresh, warm):
        first = driver.start(texts, num_prompt_tokens=4)
        results.append([first, *(driver.decode([0, 2]) for _ in range(6))])
    for expected, found in zip(*results, strict=True):
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def pool_pages(runner: LocalRunner) -> list[np.ndarray]:
    """Every pool, whole."""
    return [np.array(pool) for pool in jax.tree.leaves(runner._last.state.pools)]


@pytest.mark.parametrize("num_copies", [1, 3, COPY_CAPACITY // 2, 9])
@pytest.mark.parametrize("tensor", [1, 2])
def test_page_copies_move_the_pages_asked(tensor: int, num_copies: int) -> None:
    """Before the step writes, on every device, and no other page changes."""
    driver = Driver(tensor)
    runner = driver.runner
    pools = jax.tree.map(
        lambda pool: jax.device_put(np.random.default_rng(0).normal(size=pool.shape).astype(np.float32), pool.sharding),
        runner._last.state.pools,
    )
    runner._last.state = runner._last.state._replace(pools=pools)
    before = pool_pages(runner)
    pages = np.random.default_rng(num_copies).permutation(NUM_PAGES)[: 2 * num_copies].tolist()
    copies = [PageCopy(*pair) for pair in zip(pages[:num_copies], pages[num_copies:], strict=True)]
    written = copies[0].source  # the step's own token goes to the page just copied from
    plan = make_plan(0, [SlotSetup(0, Sampling(), 9)], [PageGrant(0, 0, [written])], decode_rows([0], [0], [5]), copies)
    run_step(runner, plan)
    untouched = [page for page in range(NUM_PAGES + 1) if page not in (written, *(copy.target for copy in copies))]
    for old, new in zip(before, pool_pages(runner), strict=True):
        for source, target in copies:
            np.testing.assert_array_equal(new[target], old[source])
        np.testing.assert_array_equal(new[untouched], old[untouched])
        assert (new[written] != old[written]).any()
    runner.close()


def test_copies_beyond_a_call() -> None:
    """Several calls of fixed size; what fills the last names no page of the pool."""
    copies = [PageCopy(i, 100 + i) for i in range(COPY_CAPACITY + 3)]
    calls = copy_arrays([copies], 200)
    assert [sources.shape for sources, _ in calls] == [(COPY_CAPACITY,)] * 2
    pairs = [pair for sources, targets in calls for pair in zip(sources.tolist(), targets.tolist(), strict=True)]
    assert [pair for pair in pairs if pair[1] < 202] == copies
