"""Masks, bias and penalties against a slow construction from the texts themselves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.slots import TokenMasks
from jaxserve.device.state_updates import slot_row
from jaxserve.sampling.penalties import IN_PROMPT, MAX_TRACKED, SlotTables, adjust, counted
from jaxserve.scheduling.plan import Sampling, SlotMask, SlotSetup
from jaxserve.scheduling.row_starts import RowStarts
from tests.plan_rows import decode_rows, make_plan
from tests.sampler_rows import call_sample, inputs_for, mask_of, open_mask, take


@dataclasses.dataclass
class Text:
    """A request and its tokens so far."""

    sampling: Sampling
    prompt: list[int]
    output: list[int]
    constraint: np.ndarray | None = None


def random_text(generator: np.random.Generator, vocab_size: int) -> Text:
    """Each of a request's wishes with probability one half, in every combination."""

    def tokens(most: int) -> list[int]:
        return generator.integers(0, vocab_size, generator.integers(0, most + 1)).tolist()

    def wants() -> bool:
        return bool(generator.random() < 0.5)

    prompt, output = [*tokens(30), 1], tokens(30)
    allowed = None
    if wants():
        allowed = tuple({*tokens(60), int(generator.integers(0, vocab_size))})
    sampling = Sampling(
        OptionValues(
            temperature=float(np.float32(generator.choice([0.0, 0.8]))),
            presence_penalty=float(np.float32(generator.uniform(-2, 2))) if wants() else 0.0,
            frequency_penalty=float(np.float32(generator.uniform(-2, 2))) if wants() else 0.0,
            repetition_penalty=float(np.float32(generator.uniform(0.5, 2))) if wants() else 1.0,
        ),
        seed=int(generator.integers(0, 2**32)),
        logit_bias=tuple((token, float(token % 7 - 3)) for token in {*tokens(8)}) if wants() else (),
        allowed_ids=allowed,
        bad_ids=tuple(tokens(20)) if wants() else (),
        banned_ids=tuple(tokens(20)) if wants() else (),
        banned_until=len(prompt) + int(generator.integers(0, 40)),
    )
    constraint = None
    if wants():
        constraint = generator.random(vocab_size) < 0.3
        constraint[generator.integers(0, vocab_size)] = True
    return Text(sampling, prompt, output, constraint)


def allowed_tokens(text: Text, vocab_size: int) -> np.ndarray:
    """What a text may go on with."""
    sampling = text.sampling
    left = set(range(vocab_size)) if sampling.allowed_ids is None else set(sampling.allowed_ids)
    left = (left - set(sampling.bad_ids)) or left
    if len(text.prompt) + len(text.output) < sampling.banned_until:
        left = (left - set(sampling.banned_ids)) or left
    allowed = np.isin(np.arange(vocab_size), [*left])
    if text.constraint is None:
        return allowed
    both = allowed & text.constraint
    return both if both.any() else text.constraint


def expected_scores(logits: np.ndarray, text: Text) -> np.ndarray:
    """Token by token, in float64."""
    sampling, scores = text.sampling, logits.astype(np.float64)
    bias = dict(sampling.logit_bias)
    allowed = allowed_tokens(text, len(scores))
    for token in range(len(scores)):
        score = scores[token] + bias.get(token, 0.0)
        if token in text.prompt or token in text.output:
            factor = sampling.options.repetition_penalty
            score = score / factor if score > 0 else score * factor
        score -= sampling.options.frequency_penalty * text.output.count(token)
        score -= sampling.options.presence_penalty * (token in text.output)
        scores[token] = score if allowed[token] else -np.inf
    return scores


def tables_of(texts: list[Text], vocab_size: int) -> SlotTables:
    """A slot a text, made from what the host writes."""
    rows = []
    for slot, text in enumerate(texts):
        setup = SlotSetup(slot, text.sampling, 99, text.prompt + text.output, len(text.prompt))
        rows.append(slot_row(setup, vocab_size))
    table = np.array(rows)
    assert table[:, 0].tolist() == [*range(len(texts))]
    counts, bias, tracked_ids = np.split(table[:, 1:], [vocab_size, 2 * vocab_size], axis=1)
    assert tracked_ids.shape[1] == MAX_TRACKED
    return SlotTables(jnp.asarray(counts), jnp.asarray(bias.copy().view(np.float32)), jnp.asarray(tracked_ids))


def masks_of(texts: list[Text], vocab_size: int) -> np.ndarray:
    """Made as the runner makes them, from a plan in which all texts decode."""
    setups = [SlotSetup(slot, text.sampling, 99) for slot, text in enumerate(texts)]
    masks = TokenMasks(vocab_size)
    masks.apply(setups)
    constrained = [(slot, text.constraint) for slot, text in enumerate(texts) if text.constraint is not None]
    given = [SlotMask(slot, mask_of(allowed[None]).tobytes()) for slot, allowed in constrained]
    positions = [len(text.prompt) + len(text.output) - 1 for text in texts]
    plan = make_plan(0, setups, [], decode_rows(range(len(texts)), positions), masks=given)
    return masks.array(masks.samples(plan, RowStarts(len(texts)), {}), len(texts))


def inputs_of(texts: list[Text]) -> Any:
    """Numbers of each text's row; row r has slot r."""
    columns = {
        name: [getattr(text.sampling.options, name) for text in texts]
        for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
    }
    seeds = np.array([text.sampling.seed for text in texts], np.uint32).view(np.int32)
    positions = [len(text.prompt) + len(text.output) for text in texts]
    return inputs_for(len(texts), seeds=seeds, positions=positions, slots=np.arange(len(texts)), **columns)


@pytest.fixture(scope="module", params=[33, 96])
def texts(request: pytest.FixtureRequest) -> tuple[list[Text], np.ndarray]:
    """200 random texts and logits for them."""
    generator = np.random.default_rng(request.param)
    made = [random_text(generator, request.param) for _ in range(200)]
    return made, generator.normal(0, 3, (200, request.param)).astype(np.float32)


def test_scores_are_those_of_the_texts(texts: tuple[list[Text], np.ndarray]) -> None:
    made, logits = texts
    vocab_size = logits.shape[1]
    call = jax.jit(adjust, static_argnames="processors")
    found = call(logits, inputs_of(made), masks_of(made, vocab_size), tables_of(made, vocab_size), processors=())
    expected = np.array([expected_scores(row, text) for row, text in zip(logits, made, strict=True)])
    assert np.isfinite(expected).any(1).all(), "every text can go on"
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)


def test_rows_together_are_the_rows_alone(texts: tuple[list[Text], np.ndarray]) -> None:
    """Mixed requests, greedy and random, in slots of their own: bit for bit what each gives alone."""
    made, logits = texts
    made, logits = made[:24], logits[:24]
    vocab_size = logits.shape[1]
    inputs, tables, mask = inputs_of(made), tables_of(made, vocab_size), masks_of(made, vocab_size)
    tokens, logprobs = call_sample(logits, inputs, mask, tables=tables)
    for row in range(24):
        rows = np.array([row])
        alone = call_sample(logits[rows], take(inputs, rows), mask[rows], tables=tables)
        for found, whole in zip(jax.tree.leaves(alone), jax.tree.leaves((tokens, logprobs)), strict=True):
            np.testing.assert_allclose(found[0], whole[row], atol=1e-6)
        assert alone[0][0] == tokens[row]
    scores = np.array([expected_scores(row, text) for row, text in zip(logits, made, strict=True)])
    greedy = np.array([text.sampling.options.temperature == 0 for text in made])
    np.testing.assert_array_equal(tokens[greedy], scores.argmax(1)[greedy])
    assert np.isfinite(scores[np.arange(24), tokens]).all()


def test_neutral_numbers_change_nothing() -> None:
    """A request without penalties reads nothing of what its slot's former request left behind."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (4, 50)).astype(np.float32)
    logits[0, :3] = [0.0, np.inf, -np.inf]
    counts = generator.integers(0, 5, (4, 50)).astype(np.int32) + IN_PROMPT * generator.integers(0, 2, (4, 50))
    tables = SlotTables(jnp.asarray(counts, jnp.int32), jnp.zeros((4, 50)), jnp.zeros((4, 1), jnp.int32))
    inputs = inputs_for(4, slots=[3, 1, 2, 9])
    found = jax.jit(adjust, static_argnames="processors")(logits, inputs, open_mask(4, 50), tables, processors=())
    np.testing.assert_array_equal(found, logits)


def test_counting() -> None:
    """One more where a slot is named; out of range is nobody."""
    counts = jnp.zeros((3, 5), jnp.int32).at[1, 2].set(IN_PROMPT + 4)
    found = jax.jit(counted)(counts, jnp.array([1, 3, 0, 3]), jnp.array([2, 2, 4, 0]))
    expected = np.zeros((3, 5), np.int32)
    expected[1, 2], expected[0, 4] = IN_PROMPT + 5, 1
    np.testing.assert_array_equal(found, expected)
