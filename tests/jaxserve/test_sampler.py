"""What truncation keeps, how tokens are distributed, and that a row knows nothing of its neighbours."""

from functools import cache
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from jaxserve.sampling import sampler
from jaxserve.sampling.sampler import MAX_LOGPROBS, VARIANTS, SamplerInputs, sample, sample_any, token_logprobs
from jaxserve.sampling.truncation import truncate

MARGIN = 1e-5  # of the kept mass: what float32 sums may be off by
SETTINGS = [  # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (1024, 1.0, 0.0),
    (1025, 1.0, 0.0),
    (3000, 1.0, 0.0),
    (10**9, 1.0, 0.0),
    (0, 0.01, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (50, 0.9, 0.0),
    (2000, 0.95, 0.0),
    (0, 0.9, 0.02),
    (40, 0.9, 0.1),
    (4000, 0.97, 0.001),
]


def settings_arrays(settings: list[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns top_k, top_p, min_p."""
    top_k, top_p, min_p = zip(*settings, strict=True)
    return np.array(top_k, np.int32), np.array(top_p, np.float32), np.array(min_p, np.float32)


def threshold(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The lowest score kept, by sorting in float64."""
    scores = scores.astype(np.float64)
    floor = -np.inf if min_p <= 0 else scores.max() + np.log(min_p)
    ordered = np.sort(scores)[::-1]
    if top_k > 0:
        floor = max(floor, ordered[min(top_k, len(ordered)) - 1])
    if top_p >= 1:
        return floor
    weights = np.where(ordered >= floor, np.exp(ordered - ordered[0]), 0.0)
    cumulative = np.cumsum(weights)
    return max(floor, ordered[np.searchsorted(cumulative, top_p * cumulative[-1])])


def check_kept(kept: np.ndarray, scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """Fails unless ``kept`` is what sorting keeps, but for tokens within rounding of the boundary."""
    slack = 1e-5 if 0 < min_p < 1 else 0.0
    fewer, more = (top_p * (1 - MARGIN), min(1.0, top_p * (1 + MARGIN))) if top_p < 1 else (1.0, 1.0)
    surely = (scores >= threshold(scores, top_k, fewer, min_p) + slack) & (scores > -np.inf)
    perhaps = (scores >= threshold(scores, top_k, more, min_p) - slack) & (scores > -np.inf)
    assert (kept | ~surely).all(), "dropped a token that is surely kept"
    assert (perhaps | ~kept).all(), "kept a token that is surely dropped"
    assert (kept == ((scores >= scores[kept].min()) & (scores > -np.inf))).all(), "a tie was split"


@cache
def score_rows(vocab_size: int) -> np.ndarray:
    """Rows of several spreads, every second one with bfloat16's ties, one flat, one with forbidden tokens."""
    generator = np.random.default_rng(vocab_size)
    rows = []
    for i, spread in enumerate((0.0, 0.3, 0.3, 1.0, 1.0, 3.0, 3.0, 8.0, 3.0)):
        row = generator.normal(0.0, spread, vocab_size).astype(np.float32)
        rows.append(np.asarray(jnp.asarray(row).astype(jnp.bfloat16).astype(jnp.float32)) if i % 2 else row)
    rows[-1][generator.random(vocab_size) < 0.7] = -np.inf
    return np.array(rows)


@pytest.mark.parametrize("vocab_size", [10, 1000, 5000, 40000])
def test_truncation_keeps_what_sorting_keeps(vocab_size: int) -> None:
    rows = score_rows(vocab_size)
    call = jax.jit(truncate)
    columns = settings_arrays(SETTINGS)
    for row in rows:
        scores = np.tile(row, (len(SETTINGS), 1))
        kept = np.asarray(call(scores, *columns))
        for i, setting in enumerate(SETTINGS):
            check_kept(kept[i], row, setting[0], float(columns[1][i]), float(columns[2][i]))


def test_each_setting_alone_equals_the_mixed_batch() -> None:
    """Rows that need no bisection, or no cut at all, are not changed by rows that do."""
    row = score_rows(5000)[3]
    columns = settings_arrays(SETTINGS)
    call = jax.jit(truncate)
    together = np.asarray(call(np.tile(row, (len(SETTINGS), 1)), *columns))
    for i in range(len(SETTINGS)):
        alone = np.asarray(call(row[None], *(column[i : i + 1] for column in columns)))
        np.testing.assert_array_equal(alone[0], together[i])


def test_no_setting_keeps_everything() -> None:
    """``top_p=1`` drops nothing, however small: a float32 sum would lose the tail."""
    scores = np.stack([np.linspace(0, -80, 5000, dtype=np.float32), np.zeros(5000, np.float32)])
    kept = truncate(jnp.asarray(scores), *map(jnp.asarray, settings_arrays([(0, 1.0, 0.0), (0, 0.5, 0.0)])))
    assert np.asarray(kept)[0].all()


def inputs_for(
    num_rows: int,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seeds: Any,
    positions: Any,
) -> SamplerInputs:
    """Sampler numbers, scalars repeated for every row."""
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    floats = {name: np.broadcast_to(np.float32(value), num_rows) for name, value in numbers.items()}
    whole = {"top_k": top_k, "seeds": seeds, "positions": positions}
    ints = {name: np.broadcast_to(np.asarray(value, np.int32), num_rows) for name, value in whole.items()}
    return SamplerInputs(**{name: jnp.asarray(value) for name, value in (floats | ints).items()})


def open_mask(num_rows: int, vocab_size: int) -> np.ndarray:
    """All bits set."""
    return np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)


call_sample = jax.jit(sample, static_argnames="variant")
call_sample_any = jax.jit(sample_any)


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.5, 12, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.5, 30, 0.9, 0.02),
    ],
)
def test_tokens_are_distributed_as_their_probabilities(
    vary: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Over seeds at one position, and over positions of one seed; 300 tokens span two blocks of the draw."""
    vocab_size, num_rows = 300, 8192
    logits = np.random.default_rng(3).normal(0.0, 2.0, vocab_size).astype(np.float32)
    logits[[5, 256, 299]] += 4.0
    counters = {"seeds": 11, "positions": 5} | {vary: np.arange(num_rows)}
    inputs = inputs_for(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **counters)
    rows = jnp.broadcast_to(jnp.asarray(logits), (num_rows, vocab_size))
    tokens, _ = call_sample(rows, inputs, open_mask(num_rows, vocab_size), variant="sampled")
    scaled = logits.astype(np.float64) / temperature
    weights = np.where(scaled >= threshold(scaled, top_k, top_p, min_p) - 1e-9, np.exp(scaled - scaled.max()), 0.0)
    check_distribution(np.bincount(np.asarray(tokens), minlength=vocab_size), weights / weights.sum())


def check_distribution(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square, with all rare tokens in one class; a right sampler fails once in a million choices of seeds."""
    assert counts[probabilities == 0].sum() == 0, "drew a token that is not kept"
    expected = probabilities * counts.sum()
    common = expected >= 8
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-12))[expected > 1e-9].sum()
    assert statistic < stats.chi2.ppf(1 - 1e-6, max(1, len(expected) - 1))


def test_seeds_and_positions_are_unrelated() -> None:
    """Neighbouring seeds and positions, and the two swapped, share no randomness."""
    seeds, positions = (a.ravel() for a in np.meshgrid(np.arange(64), np.arange(64)))
    rows = jnp.zeros((4096, 16))
    tokens, _ = call_sample(
        rows, inputs_for(4096, seeds=seeds, positions=positions), open_mask(4096, 16), variant="sampled"
    )
    grid = np.asarray(tokens).reshape(64, 64)
    for other in (grid.T, np.roll(grid, 1, 0), np.roll(grid, 1, 1), np.roll(np.roll(grid, 1, 0), -1, 1)):
        agree = (grid == other)[~np.eye(64, dtype=bool)].mean()
        assert abs(agree - 1 / 16) < 6 * np.sqrt(15 / 256 / 2000)


def test_the_seed_is_32_bits() -> None:
    """Seeds from 2**31 on arrive as negative numbers and count like any other."""
    seeds = np.array([1, 2**31 + 1, 2**32 - 1, 0], np.uint32).view(np.int32)
    rows = jnp.zeros((4, 5000))
    tokens, _ = call_sample(rows, inputs_for(4, seeds=seeds, positions=3), open_mask(4, 5000), variant="sampled")
    assert len(set(np.asarray(tokens).tolist())) == 4


MAX_WEIGHTS = 64
WEIGHT = st.one_of(st.just(0.0), st.floats(-37.0, 0.0).map(lambda exponent: 10.0**exponent), st.just(1.0))


@cache
def jitted_invert() -> Any:
    return jax.jit(sampler._invert)


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 20), WEIGHT), min_size=1, max_size=20),
    st.floats(0.0, 1.0, exclude_max=True, width=32),
)
@hypothesis.example([(3, 0.0), (1, 1e-30), (20, 0.0)], 0.0)
@hypothesis.example([(3, 0.0), (1, 1e-30), (20, 0.0)], 1 - 2.0**-24)
@hypothesis.example([(1, 1.0), (40, 1e-9), (20, 0.0)], 1 - 2.0**-24)
def test_inversion_never_gives_a_token_of_weight_zero(runs: list[tuple[int, float]], uniform: float) -> None:
    weights = np.array([weight for count, weight in runs for _ in range(count)], np.float32)[:MAX_WEIGHTS]
    weights = np.pad(weights, (0, MAX_WEIGHTS - len(weights)))
    hypothesis.assume(weights.any())
    index = int(jitted_invert()(weights[None], np.array([uniform], np.float32))[0])
    assert weights[index] > 0
    cumulative = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    below = cumulative[index - 1] if index else 0.0
    assert below - 1e-5 <= uniform <= cumulative[index] + 1e-5


@pytest.mark.parametrize("size", [256, 594])
def test_inversion_where_rounded_sums_rise_at_weight_zero(size: int) -> None:
    """Parallel sums need not be monotonic: 594 blocks of a vocabulary of 152,000 are summed that way."""
    generator = np.random.default_rng(size)
    weights = (10.0 ** generator.uniform(-6, 0, (4096, size))).astype(np.float32)
    weights[generator.random(weights.shape) < 0.6] = 0
    cumulative = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=1))
    rises = (np.diff(cumulative, axis=1) > 0) & (weights[:, 1:] == 0)
    rows = np.arange(len(weights))
    uniform = cumulative[rows, rises.argmax(1)] / cumulative[:, -1]
    index = np.asarray(jax.jit(sampler._invert)(weights, np.minimum(uniform, np.float32(1 - 2.0**-24))))
    assert (weights[rows, index] > 0).all()


def test_a_large_vocabulary_is_drawn_row_by_row() -> None:
    """594 blocks: sums of a row do not depend on how many rows there are."""
    generator = np.random.default_rng(2)
    weights = np.exp(generator.normal(0.0, 2.0, (12, 152_000))).astype(np.float32)
    seeds, positions = generator.integers(0, 2**31, (2, 12)).astype(np.int32)
    draw = jax.jit(sampler._draw)
    whole = np.asarray(draw(weights, seeds, positions))
    for rows in [*np.split(np.arange(12), 12), np.arange(5), np.arange(11, -1, -1)]:
        np.testing.assert_array_equal(np.asarray(draw(weights[rows], seeds[rows], positions[rows])), whole[rows])


def test_uniform_numbers_stay_inside_zero_and_one() -> None:
    """At exactly 0 the first token of the vocabulary would be drawn whatever its weight, once in 17 million tokens."""
    bits = np.array([0, 1, 255, 511, 512, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    uniform = np.asarray(sampler._uniform(jnp.asarray(bits)), np.float64)
    assert (uniform > 0).all() and (uniform < 1).all()
    assert uniform[0] == 1 - uniform[-1], "both ends of the vocabulary are treated alike"
    np.testing.assert_allclose(uniform, bits / 2**32, atol=2.0**-23)


def mixed_rows(vocab_size: int) -> tuple[np.ndarray, SamplerInputs, np.ndarray]:
    """24 rows, all different: settings of every kind, a few greedy, masks on some."""
    generator = np.random.default_rng(vocab_size)
    num_rows = 24
    logits = generator.normal(0.0, 2.0, (num_rows, vocab_size)).astype(np.float32)
    settings = (SETTINGS * 2)[:num_rows]
    top_k, top_p, min_p = settings_arrays(settings)
    temperature = np.where(np.arange(num_rows) % 5 == 4, 0.0, generator.uniform(0.3, 2.0, num_rows))
    inputs = inputs_for(
        num_rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=generator.integers(-(2**31), 2**31, num_rows),
        positions=generator.integers(0, 5000, num_rows),
    )
    mask = open_mask(num_rows, vocab_size)
    mask[::3] = generator.integers(-(2**31), 2**31, mask[::3].shape)
    return logits, inputs, mask


def take(inputs: SamplerInputs, rows: np.ndarray) -> SamplerInputs:
    """Chosen rows."""
    return SamplerInputs(*(array[rows] for array in inputs))


@pytest.mark.parametrize(("vocab_size", "variant"), [(700, "sampled"), (5000, "full")])
def test_a_row_knows_nothing_of_its_batch_mates(vocab_size: int, variant: str) -> None:
    logits, inputs, mask = mixed_rows(vocab_size)
    whole = np.asarray(call_sample(logits, inputs, mask, variant=variant)[0])
    order = np.random.default_rng(0).permutation(len(logits))
    shuffled = call_sample(logits[order], take(inputs, order), mask[order], variant=variant)[0]
    np.testing.assert_array_equal(np.asarray(shuffled), whole[order])
    for size in (1, 6):
        for rows in np.split(order, range(size, len(order), size)):
            some = call_sample(logits[rows], take(inputs, rows), mask[rows], variant=variant)[0]
            np.testing.assert_array_equal(np.asarray(some), whole[rows], err_msg=f"{size} rows a batch")


def bits_of(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """The mask as booleans."""
    return np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)


@pytest.mark.parametrize("top_k", [0, 20])
def test_forbidden_tokens_are_never_drawn(top_k: int) -> None:
    vocab_size, num_rows = 70, 2048
    generator = np.random.default_rng(1)
    mask = generator.integers(-(2**31), 2**31, (num_rows, 3)).astype(np.int32)
    logits = generator.normal(0.0, 1.0, (num_rows, vocab_size)).astype(np.float32)
    allowed = bits_of(mask, vocab_size)
    logits[~allowed] += 5.0
    inputs = inputs_for(
        num_rows, temperature=np.arange(num_rows) % 2, top_k=top_k, seeds=np.arange(num_rows), positions=1
    )
    tokens = np.asarray(call_sample(logits, inputs, mask, variant="full")[0])
    assert allowed[np.arange(num_rows), tokens].all()
    greedy = np.arange(num_rows) % 2 == 0
    np.testing.assert_array_equal(tokens[greedy], np.where(allowed, logits, -np.inf).argmax(1)[greedy])


@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 69])
def test_a_single_allowed_token_is_drawn(token: int) -> None:
    mask = np.zeros((2, 3), np.uint32)
    mask[:, token // 32] = 1 << token % 32
    logits = -jnp.arange(140.0).reshape(2, 70) * (1 if token else -1)
    inputs = inputs_for(2, temperature=[0.0, 1.0], seeds=9, positions=4)
    tokens, _ = call_sample(logits, inputs, mask.view(np.int32), variant="full")
    assert np.asarray(tokens).tolist() == [token, token]


@pytest.mark.parametrize("variant", VARIANTS)
def test_choosing_the_variant_at_run_time_changes_nothing(variant: str) -> None:
    logits, inputs, mask = mixed_rows(700)
    if variant == "greedy":
        inputs = inputs._replace(temperature=jnp.zeros(len(logits)))
    fixed = call_sample(logits, inputs, mask, variant=variant)
    chosen = call_sample_any(logits, inputs, mask, np.int32(VARIANTS.index(variant)))
    for expected, found in zip(jax.tree.leaves(fixed), jax.tree.leaves(chosen), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ties_go_to_the_lowest_id(variant: str) -> None:
    """Rows at temperature 0 in any program; -0.0 ties with 0.0."""
    logits = np.full((4, 600), -1.0, np.float32)
    logits[0, [300, 7, 599]] = 2.0
    logits[1] = 0.0
    logits[2, [599, 256]] = 1e30
    logits[3, [500, 20]] = 5.0
    inputs = inputs_for(4, temperature=[0, 0, 0, 0], top_k=[0, 1, 5, 0], top_p=[1, 0.5, 1, 1], seeds=1, positions=2)
    tokens, _ = call_sample(logits, inputs, open_mask(4, 600), variant=variant)
    assert np.asarray(tokens).tolist() == [7, 0, 256, 20]


@pytest.mark.parametrize("vocab_size", [7, 20, 700])
def test_logprobs_are_those_of_float64(vocab_size: int) -> None:
    generator = np.random.default_rng(4)
    logits = generator.normal(0.0, 4.0, (6, vocab_size)).astype(np.float32)
    logits[1] = np.round(logits[1])
    tokens = generator.integers(0, vocab_size, 6).astype(np.int32)
    found = jax.tree.map(np.asarray, jax.jit(token_logprobs)(logits, tokens))
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    rows, count = np.arange(6), min(MAX_LOGPROBS, vocab_size)
    np.testing.assert_allclose(found.chosen, exact[rows, tokens], atol=4e-6)
    np.testing.assert_array_equal(found.ranks, 1 + (logits > logits[rows, tokens][:, None]).sum(1))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(found.top_ids[:, :count], best)
    np.testing.assert_allclose(found.top[:, :count], np.take_along_axis(exact, best, 1), atol=4e-6)
    assert found.top.shape == (6, MAX_LOGPROBS) and (found.top[:, count:] == -np.inf).all()


def test_the_greedy_token_leads_its_logprobs() -> None:
    """Scores a rounding apart, equal once they are log-probabilities, still rank as the greedy choice ranks them."""
    logits = np.full((1, 64), -2.0, np.float32)
    logits[0, 40] = 0.1
    logits[0, 9] = np.nextafter(np.float32(0.1), np.float32(0))
    tokens, logprobs = call_sample(
        logits, inputs_for(1, temperature=0.0, seeds=0, positions=0), open_mask(1, 64), variant="full"
    )
    assert int(tokens[0]) == 40 == int(logprobs.top_ids[0, 0])
    assert int(logprobs.ranks[0]) == 1
    assert int(token_logprobs(jnp.asarray(logits), jnp.array([9])).ranks[0]) == 2


def test_logprobs_ignore_temperature_and_masks() -> None:
    logits, inputs, mask = mixed_rows(700)
    tokens, found = call_sample(logits, inputs, mask, variant="full")
    plain = jax.jit(token_logprobs)(logits, tokens)
    for expected, array in zip(plain, found, strict=True):
        np.testing.assert_allclose(np.asarray(array), np.asarray(expected), atol=2e-6)
