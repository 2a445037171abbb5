"""What truncation keeps, how tokens are distributed, and that a row knows nothing of its neighbours."""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from jaxserve.api.config_checks import LOGPROBS_MODES
from jaxserve.sampling import draw
from jaxserve.sampling.logprobs import MAX_LOGPROBS, token_logprobs
from jaxserve.sampling.penalties import SamplerInputs
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS, SamplerSettings, sample, select_truncation
from pallas_kernels import native_library, truncation_native, truncation_xla
from tests.sampler_rows import call_sample, empty_tables, inputs_for, mask_of, take
from tests.tiny_programs import make_program, tiny_config

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


@jax.jit
def truncate(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The tokens each row keeps."""
    return scores >= truncation_xla.floor(scores, top_k, top_p, min_p)[:, None]


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
    columns = settings_arrays(SETTINGS)
    for row in rows:
        scores = np.tile(row, (len(SETTINGS), 1))
        kept = np.asarray(truncate(scores, *columns))
        for i, setting in enumerate(SETTINGS):
            check_kept(kept[i], row, setting[0], float(columns[1][i]), float(columns[2][i]))


def test_each_setting_alone_equals_the_mixed_batch() -> None:
    """Rows that need no bisection, or no cut at all, are not changed by rows that do."""
    row = score_rows(5000)[3]
    columns = settings_arrays(SETTINGS)
    together = np.asarray(truncate(np.tile(row, (len(SETTINGS), 1)), *columns))
    for i in range(len(SETTINGS)):
        alone = np.asarray(truncate(row[None], *(column[i : i + 1] for column in columns)))
        np.testing.assert_array_equal(alone[0], together[i])


def test_no_setting_keeps_everything() -> None:
    """``top_p=1`` drops nothing, however small: a float32 sum would lose the tail."""
    scores = np.stack([np.linspace(0, -80, 5000, dtype=np.float32), np.zeros(5000, np.float32)])
    kept = truncate(jnp.asarray(scores), *map(jnp.asarray, settings_arrays([(0, 1.0, 0.0), (0, 0.5, 0.0)])))
    assert np.asarray(kept)[0].all()


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
    tokens, _ = call_sample(rows, inputs, variant="sampled")
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
    tokens, _ = call_sample(rows, inputs_for(4096, seeds=seeds, positions=positions), variant="sampled")
    grid = np.asarray(tokens).reshape(64, 64)
    for other in (grid.T, np.roll(grid, 1, 0), np.roll(grid, 1, 1), np.roll(np.roll(grid, 1, 0), -1, 1)):
        agree = (grid == other)[~np.eye(64, dtype=bool)].mean()
        assert abs(agree - 1 / 16) < 6 * np.sqrt(15 / 256 / 2000)


def test_the_seed_is_32_bits() -> None:
    """Seeds from 2**31 on arrive as negative numbers and count like any other."""
    seeds = np.array([1, 2**31 + 1, 2**32 - 1, 0], np.uint32).view(np.int32)
    rows = jnp.zeros((4, 5000))
    tokens, _ = call_sample(rows, inputs_for(4, seeds=seeds, positions=3), variant="sampled")
    assert len(set(np.asarray(tokens).tolist())) == 4


def test_random_bits_are_those_of_jax() -> None:
    """Threefry-2x32 as JAX has it, for keys and counters of all sizes."""
    words = np.random.default_rng(0).integers(0, 2**32, (4, 50), np.uint32)
    words[:, 0], words[:, 1] = 0, 2**32 - 1
    key, counter = jnp.asarray(words[:2]), jnp.asarray(words[2:])
    found = draw.threefry((key[0], key[1]), (counter[0], counter[1]))
    expected = jax.vmap(threefry_2x32, in_axes=1, out_axes=1)(key, counter)
    np.testing.assert_array_equal(np.stack(found), expected)


def test_waiting_times_are_positive_and_finite() -> None:
    """At 0 a token would win whatever its weight; were all infinite, none would."""
    bits = np.array([0, 1, 255, 2**31, 2**32 - 256, 2**32 - 2, 2**32 - 1], np.uint32)
    times = np.asarray(draw._waiting_time(jnp.asarray(bits)), np.float64)
    assert (times > 0).all() and np.isfinite(times).all() and (np.diff(times) >= 0).all()
    np.testing.assert_allclose(times[:4], -np.log1p(-(bits[:4] + 0.5) / 2**32), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 255, 257, 5000])
def test_tokens_of_weight_zero_are_never_drawn(size: int) -> None:
    """However small the weights that are left, and wherever they stand."""
    generator = np.random.default_rng(size)
    weights = (10.0 ** generator.uniform(-30, 0, (4096, size))).astype(np.float32)
    weights[generator.random(weights.shape) < 0.9] = 0
    weights[:, generator.integers(0, size)] += 1e-30
    tokens, drawn = jax.jit(draw.draw)(weights, np.arange(4096, dtype=np.int32), np.zeros(4096, np.int32))
    np.testing.assert_array_equal(drawn, weights[np.arange(4096), tokens])
    assert (np.asarray(drawn) > 0).all()


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    """Two tokens of a block share one in 2,000; another block has one in 2,000 more."""
    weights = np.zeros(600, np.float32)
    weights[[3, 40, 41, 500]] = [1.0, 2.5e-4, 2.5e-4, 5e-4]
    counts = np.zeros(600, int)
    call = jax.jit(draw.draw)
    rows = jnp.broadcast_to(jnp.asarray(weights), (8192, 600))
    for position in range(8):
        tokens, _ = call(rows, jnp.arange(8192, dtype=jnp.int32), jnp.full(8192, position, jnp.int32))
        counts += np.bincount(np.asarray(tokens), minlength=600)
    check_distribution(counts, weights.astype(np.float64) / weights.sum(dtype=np.float64))


def test_a_large_vocabulary_is_drawn_row_by_row() -> None:
    """594 blocks: sums of a row do not depend on how many rows there are."""
    generator = np.random.default_rng(2)
    weights = np.exp(generator.normal(0.0, 2.0, (12, 152_000))).astype(np.float32)
    seeds, positions = generator.integers(0, 2**31, (2, 12)).astype(np.int32)
    call = jax.jit(draw.draw)
    whole = np.asarray(call(weights, seeds, positions)[0])
    for rows in [*np.split(np.arange(12), 12), np.arange(5), np.arange(11, -1, -1)]:
        some = call(weights[rows], seeds[rows], positions[rows])[0]
        np.testing.assert_array_equal(np.asarray(some), whole[rows])


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
    allowed = np.ones((num_rows, vocab_size), bool)
    allowed[::3] = generator.random((len(allowed[::3]), vocab_size)) < 0.5
    return logits, inputs, mask_of(allowed)


@pytest.mark.parametrize(("vocab_size", "variant"), [(700, "sampled"), (5000, "full")])
def test_a_row_knows_nothing_of_its_batch_mates(vocab_size: int, variant: str) -> None:
    logits, inputs, mask = mixed_rows(vocab_size)
    whole = call_sample(logits, inputs, mask, variant=variant)[0]
    order = np.random.default_rng(0).permutation(len(logits))
    shuffled = call_sample(logits[order], take(inputs, order), mask[order], variant=variant)[0]
    np.testing.assert_array_equal(shuffled, whole[order])
    for size in (1, 6):
        for rows in np.split(order, range(size, len(order), size)):
            some = call_sample(logits[rows], take(inputs, rows), mask[rows], variant=variant)[0]
            np.testing.assert_array_equal(some, whole[rows], err_msg=f"{size} rows a batch")


def test_a_program_takes_truncation_by_its_devices_or_as_it_is_told() -> None:
    """Tokens are the same, as far as sums agree on where top-p cuts."""
    kernel = select_truncation(jax.devices()[0], "pallas-interpret")
    program = make_program(tiny_config(), truncation=None)
    on_cpu = truncation_xla if native_library.unavailable() else truncation_native
    assert program.sampler == SamplerSettings(truncation=on_cpu)
    settings = dataclasses.replace(program, truncation=kernel).sampler
    assert settings.truncation is kernel
    logits, inputs, mask = mixed_rows(5000)
    expected = call_sample(logits, inputs, mask, variant="sampled")[0]
    found = call_sample(logits, inputs, mask, variant="sampled", settings=settings)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("top_k", [0, 20])
def test_forbidden_tokens_are_never_drawn(top_k: int) -> None:
    vocab_size, num_rows = 70, 2048
    generator = np.random.default_rng(1)
    allowed = generator.random((num_rows, vocab_size)) < 0.5
    mask = mask_of(allowed)
    logits = generator.normal(0.0, 1.0, (num_rows, vocab_size)).astype(np.float32)
    logits[~allowed] += 5.0
    inputs = inputs_for(
        num_rows, temperature=np.arange(num_rows) % 2, top_k=top_k, seeds=np.arange(num_rows), positions=1
    )
    tokens, _ = call_sample(logits, inputs, mask)
    assert allowed[np.arange(num_rows), tokens].all()
    greedy = np.arange(num_rows) % 2 == 0
    np.testing.assert_array_equal(tokens[greedy], np.where(allowed, logits, -np.inf).argmax(1)[greedy])


@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 69])
def test_a_single_allowed_token_is_drawn(token: int) -> None:
    mask = np.zeros((2, 3), np.uint32)
    mask[:, token // 32] = 1 << token % 32
    logits = -jnp.arange(140.0).reshape(2, 70) * (1 if token else -1)
    inputs = inputs_for(2, temperature=[0.0, 1.0], seeds=9, positions=4)
    tokens, _ = call_sample(logits, inputs, mask.view(np.int32))
    assert tokens.tolist() == [token, token]


@pytest.mark.parametrize("variant", VARIANTS)
def test_choosing_the_variant_at_run_time_changes_nothing(variant: str) -> None:
    logits, inputs, mask = mixed_rows(700)
    if variant == "greedy":
        inputs = inputs._replace(options=inputs.options._replace(temperature=jnp.zeros(len(logits))))
    fixed = call_sample(logits, inputs, mask, variant=variant)
    chosen = call_sample(logits, inputs, mask, variant=variant, at_run_time=True)
    for expected, found in zip(jax.tree.leaves(fixed), jax.tree.leaves(chosen), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ties_go_to_the_lowest_id(variant: str) -> None:
    """Rows at temperature 0 in any program; -0.0 ties with 0.0."""
    logits = np.full((4, 600), -1.0, np.float32)
    logits[0, [300, 7, 599]] = 2.0
    logits[1] = 0.0
    logits[2, [599, 256]] = 1e30
    logits[3, [500, 20]] = 5.0
    inputs = inputs_for(4, temperature=[0, 0, 0, 0], top_k=[0, 1, 5, 0], top_p=[1, 0.5, 1, 1], seeds=1, positions=2)
    tokens, _ = call_sample(logits, inputs, variant=variant)
    assert tokens.tolist() == [7, 0, 256, 20]


@pytest.mark.parametrize("max_logprobs", [3, MAX_LOGPROBS, 700])
@pytest.mark.parametrize("vocab_size", [7, 20, 700])
def test_logprobs_are_those_of_float64(vocab_size: int, max_logprobs: int) -> None:
    generator = np.random.default_rng(4)
    logits = generator.normal(0.0, 4.0, (6, vocab_size)).astype(np.float32)
    logits[1] = np.round(logits[1]) + 0.0  # no -0.0, which ranks below 0.0
    tokens = generator.integers(0, vocab_size, 6).astype(np.int32)
    tracked = generator.integers(0, vocab_size, (6, 5)).astype(np.int32)
    call = jax.jit(token_logprobs, static_argnums=(3, 4))
    found = jax.tree.map(np.asarray, call(logits, tokens, tracked, max_logprobs, True))
    exact = log_softmax(logits)
    rows, count = np.arange(6), min(max_logprobs, vocab_size)
    np.testing.assert_allclose(found.chosen, exact[rows, tokens], atol=4e-6)
    np.testing.assert_array_equal(found.ranks, 1 + (logits > logits[rows, tokens][:, None]).sum(1))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(found.top_ids[:, :count], best)
    np.testing.assert_allclose(found.top[:, :count], np.take_along_axis(exact, best, 1), atol=4e-6)
    np.testing.assert_allclose(found.tracked, np.take_along_axis(exact, tracked, 1), atol=4e-6)
    assert found.top.shape == (6, max_logprobs) and (found.top[:, count:] == -np.inf).all()
    plain = call(logits, tokens, tracked, max_logprobs, False)
    np.testing.assert_array_equal(plain.top[:, :count], np.take_along_axis(logits, best, 1))
    np.testing.assert_array_equal(plain.tracked, np.take_along_axis(logits, tracked, 1))
    np.testing.assert_array_equal(plain.chosen, logits[rows, tokens])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    exact = logits.astype(np.float64)
    exact -= exact.max(1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(1, keepdims=True))


def test_the_greedy_token_leads_its_logprobs() -> None:
    """Scores a rounding apart, equal once they are log-probabilities, still rank as the greedy choice ranks them."""
    logits = np.full((1, 64), -2.0, np.float32)
    logits[0, 40] = 0.1
    logits[0, 9] = np.nextafter(np.float32(0.1), np.float32(0))
    tokens, logprobs = call_sample(logits, inputs_for(1, temperature=0.0))
    assert int(tokens[0]) == 40 == int(logprobs.top_ids[0, 0])
    assert int(logprobs.ranks[0]) == 1
    untracked = jnp.zeros((1, 0), jnp.int32)
    assert int(token_logprobs(jnp.asarray(logits), jnp.array([9]), untracked).ranks[0]) == 2


@pytest.mark.parametrize("at_run_time", [False, True])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_what_is_reported(mode: str, at_run_time: bool) -> None:
    """Raw: the model's own. Processed: what the token was drawn from; greedy rows are not cut or divided."""
    vocab_size = 700
    logits, inputs, mask = mixed_rows(vocab_size)
    num_rows = len(logits)
    tables = empty_tables(num_rows, vocab_size, num_tracked=4)
    ids = np.random.default_rng(1).integers(0, vocab_size, (num_rows, 4)).astype(np.int32)
    bias = np.random.default_rng(2).normal(0, 1, (num_rows, vocab_size)).astype(np.float32)
    tables = tables._replace(tracked_ids=jnp.asarray(ids), bias=jnp.asarray(bias))
    inputs = inputs._replace(slots=jnp.arange(num_rows, dtype=jnp.int32))
    settings = SamplerSettings(max_logprobs=8, logprobs_mode=mode)
    tokens, found = call_sample(logits, inputs, mask, tables=tables, settings=settings, at_run_time=at_run_time)
    scores = logits
    if mode.startswith("processed"):
        options = inputs.options
        temperature = np.asarray(options.temperature)
        allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
        scores = np.where(allowed, logits + bias, -np.inf) / np.where(temperature > 0, temperature, 1)[:, None]
        floors = [
            threshold(row, int(k), float(p), float(m)) if t > 0 else -np.inf
            for row, k, p, m, t in zip(scores, options.top_k, options.top_p, options.min_p, temperature, strict=True)
        ]
        scores = np.where(scores >= np.array(floors)[:, None] - 1e-6, scores, -np.inf)
    expected = log_softmax(scores) if mode.endswith("logprobs") else scores
    rows = np.arange(num_rows)
    np.testing.assert_allclose(found.chosen, expected[rows, tokens], atol=2e-5)
    np.testing.assert_allclose(found.tracked, np.take_along_axis(expected, ids, 1), atol=2e-5)
    np.testing.assert_allclose(found.top, -np.sort(-expected, axis=1)[:, :8], atol=2e-5)
    assert np.isfinite(found.chosen).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("where", ["one", "all", "forbidden"])
def test_rows_with_nan_are_told_and_leave_others_alone(where: str, sign: int, variant: str) -> None:
    """NaN with either sign (x86 makes it with a minus sign), in one logit or in all, or behind a mask."""
    logits, inputs, mask = mixed_rows(5000)
    if variant == "greedy":
        inputs = inputs._replace(options=inputs.options._replace(temperature=jnp.zeros(len(logits))))
    if where == "forbidden" and variant != "full":
        pytest.skip("masks belong to the full sampler")
    clean = call_sample(logits, inputs, mask, variant=variant)
    token = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:5000] == 0)[0]
    logits[[0, 4, 9], slice(None) if where == "all" else token] = np.copysign(np.float32(np.nan), sign)
    tokens, logprobs = call_sample(logits, inputs, mask, variant=variant)
    broken = np.isin(np.arange(len(logits)), [0, 4, 9])
    assert (tokens[broken] == NO_TOKEN).all() and (tokens[~broken] >= 0).all()
    for found, expected in zip(jax.tree.leaves((tokens, logprobs)), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(found[~broken], expected[~broken])


def test_infinite_logits() -> None:
    """A greedy row takes +inf; a random one has no probabilities to draw by. From nothing, nothing is taken."""
    logits = np.zeros((4, 40), np.float32)
    logits[:2, 7] = np.inf
    logits[2:] = -np.inf
    tokens, _ = call_sample(logits, inputs_for(4, temperature=[0.0, 1.0, 0.0, 1.0]), variant="sampled")
    assert tokens.tolist() == [7, NO_TOKEN, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_nothing_sorts_the_vocabulary(mode: str) -> None:
    """XLA makes a sort of a ``top_k`` whose result is sliced: 50 times slower on CPUs."""
    logits, inputs, mask = mixed_rows(5000)
    settings = SamplerSettings(logprobs_mode=mode)
    arguments = (logits, inputs, mask, empty_tables(1, 5000), jnp.int32(0))
    text = jax.jit(sample, static_argnames="settings").lower(*arguments, settings=settings).compile().as_text()
    assert text is not None and "TopK" in text and not re.search(r" sort\(", text)
