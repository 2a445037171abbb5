"""Devices that keep the logits of their part of the vocabulary: the tokens that one device with all of them samples."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from jaxserve.api.sampling_options import OptionValues
from jaxserve.layers.parallel import VOCAB_BLOCK, Parallel
from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import IN_PROMPT, SamplerInputs, SlotTables
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS, SamplerSettings, sample
from jaxserve.sampling.vocab_split import VocabSplit
from pallas_kernels import argmax_native, argmax_xla
from pallas_kernels.argmax import ArgmaxKernel
from sharding import MeshShape, get_layout, make_mesh
from sharding.plan import collectives, count_collectives, stated_sampling
from tests.sampler_rows import call_sample, mask_of, open_mask
from tests.tiny_programs import make_program, tiny_config

LAYOUT = get_layout("split_logits")
NUM_ROWS, NUM_TRACKED = 48, 3
Sampled = tuple[np.ndarray, TokenLogprobs]


@functools.cache
def sampler(vocab_size: int, num_devices: int, variant: str, settings: SamplerSettings) -> jax.stages.Wrapped:
    """``sample`` on devices that share the vocabulary, whose arguments have padding; the settings have no split."""
    mesh = make_mesh(MeshShape(tensor=num_devices))
    split = VocabSplit("tensor", vocab_size)

    def sampled(logits: Any, inputs: Any, mask: Any, tables: Any) -> Any:
        chosen = SamplerSettings(
            settings.max_logprobs,
            settings.logprobs_mode,
            settings.processors,
            settings.truncation,
            settings.argmax,
            split,
        )
        return sample(logits, inputs, mask, tables, variant, chosen)

    vocab, whole = LAYOUT.spec(None, "vocab"), LAYOUT.spec()
    in_specs = (vocab, whole, whole, SlotTables._make([vocab, vocab, whole]))
    return jax.jit(jax.shard_map(sampled, mesh=mesh, in_specs=in_specs, out_specs=whole, check_vma=False))


def padded(array: Any, num_devices: int, fill: float = 0.0) -> np.ndarray:
    """Columns for whole blocks on every device."""
    width = Parallel.from_layout(LAYOUT, num_devices).padded_vocab(array.shape[1])
    assert width % (num_devices * VOCAB_BLOCK) == 0
    return np.pad(np.asarray(array), ((0, 0), (0, width - array.shape[1])), constant_values=fill)


def call_split(
    num_devices: int,
    logits: np.ndarray,
    inputs: SamplerInputs,
    mask: np.ndarray,
    tables: SlotTables,
    variant: str,
    settings: SamplerSettings = SamplerSettings(),  # noqa: B008 - frozen
) -> Sampled:
    """Tokens and logprobs from the devices together."""
    parts = padded(logits, num_devices, -np.inf)
    counts, bias = padded(tables.token_counts, num_devices), padded(tables.bias, num_devices)
    call = sampler(logits.shape[1], num_devices, variant, settings)
    found = call(parts, inputs, mask, SlotTables._make([counts, bias, tables.tracked_ids]))
    return jax.tree.map(np.asarray, found)


def random_inputs(random: np.random.Generator, vocab_size: int) -> SamplerInputs:
    """Every option at several values, in random combinations; drafts that the counts do not include."""

    def some(*values: float, dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray(random.choice(np.array(values, dtype), NUM_ROWS))

    options = OptionValues(
        temperature=some(0.0, 0.4, 1.0, 1.7),
        top_k=some(0, 1, 7, 300, 2000, dtype=np.int32),
        top_p=some(1.0, 0.95, 0.6, 1e-6),
        min_p=some(0.0, 0.03),
        repetition_penalty=some(1.0, 1.3),
        frequency_penalty=some(0.0, 0.7),
        presence_penalty=some(0.0, -0.6),
    )
    drafts = random.integers(0, vocab_size, (NUM_ROWS, 2))
    drafts[::3] = np.iinfo(np.int32).max
    return SamplerInputs(
        options,
        jnp.asarray(random.integers(0, 2**31, NUM_ROWS), jnp.int32),
        jnp.asarray(random.integers(0, 500, NUM_ROWS), jnp.int32),
        jnp.arange(NUM_ROWS, dtype=jnp.int32),
        jnp.zeros((NUM_ROWS, 0)),
        jnp.asarray(drafts, jnp.int32),
    )


def random_tables(random: np.random.Generator, vocab_size: int) -> SlotTables:
    shape = NUM_ROWS, vocab_size
    counts = random.integers(0, 4, shape) * (random.random(shape) < 0.1) + IN_PROMPT * (random.random(shape) < 0.1)
    bias = random.normal(0, 2, shape) * (random.random(shape) < 0.05)
    tracked = random.integers(0, vocab_size, (NUM_ROWS, NUM_TRACKED))
    return SlotTables(*(jnp.asarray(each) for each in (np.int32(counts), np.float32(bias), np.int32(tracked))))


def assert_equal(found: Sampled, expected: Sampled) -> None:
    """The same tokens, ranks and alternatives; their logprobs but for the order of sums."""
    np.testing.assert_array_equal(found[0], expected[0])
    kept, logprobs, others = expected[0] != NO_TOKEN, found[1], expected[1]
    for name in ("ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(logprobs, name)[kept], getattr(others, name)[kept])
    for name in ("chosen", "top", "tracked"):
        np.testing.assert_allclose(getattr(logprobs, name)[kept], getattr(others, name)[kept], rtol=1e-5, atol=1e-5)


SPREADS = {"distinct": (2.0, None), "ties": (2.0, 2), "flat": (0.01, None)}
"""Standard deviation of the logits, and levels per unit; in the flat ones, top-p keeps more than the candidates."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("num_devices", "vocab_size"),
    [(2, 5001), (4, 1000), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(8, 300), (8, 20011), (2, 512)])],
)
def test_tokens_are_those_of_whole_rows(num_devices: int, vocab_size: int, spread: str, variant: str) -> None:
    """Every option, and a vocabulary that ends in the middle of a device's part, or before it."""
    random = np.random.default_rng(vocab_size)
    deviation, levels = SPREADS[spread]
    logits = random.normal(0, deviation, (NUM_ROWS, vocab_size)).astype(np.float32)
    if levels is not None:
        logits = np.round(logits * levels) / np.float32(levels)
    allowed = random.random((NUM_ROWS, vocab_size)) < random.choice([0.01, 0.5, 1.0], (NUM_ROWS, 1))
    allowed[:, random.integers(0, vocab_size)] = True
    inputs, tables = random_inputs(random, vocab_size), random_tables(random, vocab_size)
    expected = call_sample(logits, inputs, mask_of(allowed), tables=tables, variant=variant)
    assert_equal(call_split(num_devices, logits, inputs, mask_of(allowed), tables, variant), expected)
    assert len(set(expected[0].tolist())) > 20


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("max_logprobs", [0, 600])
def test_logprobs_of_every_mode(mode: str, max_logprobs: int) -> None:
    """As many alternatives as a row has, and more than a device has."""
    random = np.random.default_rng(1)
    vocab_size = 590
    logits = random.normal(0, 2, (NUM_ROWS, vocab_size)).astype(np.float32)
    inputs, tables = random_inputs(random, vocab_size), random_tables(random, vocab_size)
    settings = SamplerSettings(max_logprobs=max_logprobs, logprobs_mode=mode)
    mask = open_mask(NUM_ROWS, vocab_size)
    expected = call_sample(logits, inputs, mask, tables=tables, settings=settings)
    assert_equal(call_split(2, logits, inputs, mask, tables, "full", settings), expected)


KERNELS = {"xla": argmax_xla, "native": argmax_native}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_rows_without_a_token(kernel: str, num_devices: int) -> None:
    """NaN on any device, or -inf on all of them; -inf on some of them leaves the others' tokens."""
    implementation: ArgmaxKernel = KERNELS[kernel]  # pyright: ignore[reportAssignmentType]
    reason = implementation.unsupported("cpu", "cpu", "float32")
    if reason is not None:
        pytest.skip(reason)
    vocab_size, nan, inf = 1000, np.float32(np.nan), np.float32(np.inf)
    logits = np.random.default_rng(0).normal(size=(8, vocab_size)).astype(np.float32)
    logits[0, 3], logits[1, 999], logits[2] = nan, -nan, -inf
    logits[3], logits[3, 700] = -inf, -50.0
    logits[4], logits[4, 20], logits[4, 998] = -inf, 1.5, 1.5
    logits[5, :512] = -inf
    logits[6] = nan
    logits[7], logits[7, 500] = -inf, nan
    random = np.random.default_rng(2)
    inputs = jax.tree.map(lambda array: array[:8], random_inputs(random, vocab_size))
    tables = random_tables(random, vocab_size)._replace(bias=jnp.zeros((NUM_ROWS, vocab_size)))
    expected = [NO_TOKEN] * 3 + [700, 20, int(logits[5].argmax())] + [NO_TOKEN] * 2
    settings, mask = SamplerSettings(argmax=implementation), open_mask(8, vocab_size)
    tokens, _ = call_split(num_devices, logits, inputs, mask, tables, "greedy", settings)
    assert tokens.tolist() == expected
    for variant in ("sampled", "full"):
        tokens, _ = call_split(num_devices, logits, inputs, mask, tables, variant, settings)
        whole, _ = call_sample(logits, inputs, mask, tables=tables, variant=variant, settings=settings)
        np.testing.assert_array_equal(tokens, whole)
        assert [token == NO_TOKEN for token in tokens] == [token == NO_TOKEN for token in expected]


class Mirror:
    """A processor that needs whole rows: it reverses them."""

    @property
    def arguments(self) -> Mapping[str, float]:
        return {}

    def __call__(
        self, logits: Float[Array, "R V"], arguments: dict[str, Float[Array, " R"]], positions: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        return logits[:, ::-1]


def test_processors_see_whole_rows() -> None:
    random = np.random.default_rng(3)
    vocab_size = 700
    logits = random.normal(0, 2, (NUM_ROWS, vocab_size)).astype(np.float32)
    inputs, tables = random_inputs(random, vocab_size), random_tables(random, vocab_size)
    settings, mask = SamplerSettings(processors=(Mirror(),)), open_mask(NUM_ROWS, vocab_size)
    expected = call_sample(logits, inputs, mask, tables=tables, settings=settings)
    assert_equal(call_split(2, logits, inputs, mask, tables, "full", settings), expected)
    plain, _ = call_sample(logits, inputs, mask, tables=tables)
    assert (plain != expected[0]).mean() > 0.5


def test_logprobs_of_prompt_tokens() -> None:
    """Without tracked tokens, of given ones."""
    random = np.random.default_rng(4)
    logits = random.normal(0, 2, (6, 530)).astype(np.float32)
    tokens = jnp.asarray(random.integers(0, 530, 6), jnp.int32)
    untracked = jnp.zeros((6, 0), jnp.int32)
    mesh, split = make_mesh(MeshShape(tensor=2)), VocabSplit("tensor", 530)

    def scored(logits: Any) -> TokenLogprobs:
        return token_logprobs(logits, tokens, untracked, 5, True, split)

    call = jax.shard_map(
        scored, mesh=mesh, in_specs=LAYOUT.spec(None, "vocab"), out_specs=LAYOUT.spec(), check_vma=False
    )
    found = jax.tree.map(np.asarray, jax.jit(call)(padded(logits, 2, -np.inf)))
    expected = jax.tree.map(np.asarray, token_logprobs(jnp.asarray(logits), tokens, untracked, 5))
    assert_equal((np.asarray(tokens), found), (np.asarray(tokens), expected))


def test_slots_have_counts_and_biases_of_the_parts() -> None:
    """A part each of a vocabulary of 513 tokens, padded to whole blocks; the memory plan counts them."""
    config = tiny_config(vocab_size=513)
    split, gathered = (make_program(config, tensor=2, layout=name) for name in ("split_logits", "tensor_parallel"))
    assert split.vocab_width == 1024 and gathered.vocab_width == 513
    for table in split.abstract_state().tables[:2]:
        assert table.sharding.shard_shape(table.shape) == (split.num_slots, 512)
    assert gathered.slot_state_bytes - split.slot_state_bytes == split.num_slots * 2 * 4
    assert split.abstract_model.params["embed.weight"].shape == (1024, config.hidden_size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_collectives(variant: str) -> None:
    """As stated, and none of them receives anything like the logits of a row; processors alone need those."""
    random = np.random.default_rng(5)
    vocab_size = 1 << 17
    logits = np.zeros((NUM_ROWS, vocab_size), np.float32)
    inputs = random_inputs(random, vocab_size)
    tables = SlotTables._make([np.zeros(logits.shape, np.int32), logits, np.zeros((NUM_ROWS, NUM_TRACKED), np.int32)])
    arguments = logits, inputs, open_mask(NUM_ROWS, vocab_size), tables
    traced = sampler(vocab_size, 2, variant, SamplerSettings()).trace(*arguments)
    assert count_collectives(traced) == stated_sampling(LAYOUT, variant)
    largest = max(collective.num_bytes for collective in collectives(traced.jaxpr.jaxpr))
    assert largest == {"greedy": 2 * 2}.get(variant, 2 * 1024) * 4 * NUM_ROWS
    traced = sampler(vocab_size, 2, variant, SamplerSettings(processors=(Mirror(),))).trace(*arguments)
    largest = max(collective.num_bytes for collective in collectives(traced.jaxpr.jaxpr))
    assert (largest == logits.nbytes) == (variant == "full")
    assert count_collectives(traced) == stated_sampling(LAYOUT, variant, has_processors=True)
