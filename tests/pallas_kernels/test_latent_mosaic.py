"""Test the Pallas Mosaic GPU kernel of attention over latents: interpreted on a CPU with the race detector, and lowered
for a GPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention, latent_attention_mosaic
from pallas_kernels.combine_attention_mosaic import combine_splits
from pallas_kernels.latent_attention_mosaic import INTERPRET, MOSAIC
from pallas_kernels.latent_decode_mosaic import decode_latents
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.mosaic_ring import Splits
from pallas_kernels.mosaic_support import interpreter, missing_jax
from pallas_kernels.operation import compare_rows, prepared_shapes
from pallas_kernels.paged_attention import token_contexts
from pallas_kernels.paged_attention_cases import Case
from tests.compiled import compiled

needs_mosaic = pytest.mark.skipif(missing_jax() is not None, reason=str(missing_jax()))
SMALL = Case((), num_kv_heads=1, head_dim=192, value_dim=128, dtype="bfloat16", spare_rows=1)
# Heads, widths, pages, splits: of a tile and its neighbours, empty rows, more splits than tiles.
CASES = {
    "edges_of_a_tile": (SMALL._replace(rows=((1, 1), (63, 1), (64, 1), (65, 1))), 1),
    "three_tiles_in_turn": (SMALL._replace(rows=((300, 1), (129, 1)), num_heads=5, page_size=64), 1),
    "two_blocks_of_heads": (SMALL._replace(rows=((200, 1), (1, 1)), num_heads=72, page_size=32), 2),
    "more_splits_than_pages": (SMALL._replace(rows=((200, 1),), num_heads=16, page_size=128), 5),
    "several_tiles_of_a_split": (SMALL._replace(rows=((570, 1), (1, 1)), num_heads=1, page_size=128), 2),
    "pieces_of_wgmma": (SMALL._replace(rows=((150, 1),), head_dim=576, value_dim=512, num_heads=16), 2),
    "no_rotated_key": (SMALL._replace(rows=((70, 1),), head_dim=256, value_dim=256, dtype="float16"), 1),
}


@pytest.fixture
def races():
    """Return a function that tells whether the race detector found races; reset the interpreter after each test."""
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    yield lambda: callbacks.get_races().races_found
    callbacks.reset_gpu_interpret_mode_state()


def problem(case: Case):
    """Return a case's operands, with unused pages full of NaN, and the expected result."""
    inputs = compiled(latent_attention.make_inputs, case)(jax.random.key(case.rows[0][0]))
    prepared = latent_attention.prepare(INTERPRET, case, inputs)
    return prepared, np.array(compiled(latent_attention.expected, case)(inputs), np.float32)


def assert_right(case: Case, found, expected) -> None:
    """Every row is within what the operation allows."""
    is_real = np.ones(expected.shape[:-1], bool)
    comparison = compare_rows(("attention",), found, expected, is_real, latent_attention.tolerance(case))
    assert comparison.is_right, comparison


def decode(prepared, case: Case, num_splits: int, tokens: tuple[int, ...]):
    """Run the kernel on some of a case's query tokens."""
    rows, lens = token_contexts(prepared.batch, case.num_tokens)
    chosen = jnp.asarray(tokens, jnp.int32)
    return decode_latents(
        prepared.query[chosen],
        *prepared.pools,
        prepared.batch.page_table,
        rows[chosen],
        lens[chosen],
        value_dim=case.value_width,
        scale=case.head_dim**-0.5,
        num_splits=num_splits,
        interpret=interpreter(detect_races=True),
    )


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_decode_matches_reference(name, races):
    case, num_splits = CASES[name]
    prepared, expected = problem(case)
    found = decode(prepared, case, num_splits, tuple(range(case.num_tokens)))
    assert_right(case, found, expected)
    assert not np.asarray(found[len(case.rows) :], np.float32).any()
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("num_splits, group, lens", [(5, 8, (320, 0, 65)), (8, 64, (64 * 7,))])
def test_combine_of_heads_in_rows_matches_reference(num_splits, group, lens, races):
    """Two pieces of 128 columns; heads after the group and splits without tiles are NaN and not read."""
    splits, random = Splits(num_splits, 64, None), np.random.default_rng(group)
    parts = random.normal(size=(len(lens), 2, num_splits, 64, 256)).astype(np.float32)
    lse = random.normal(scale=3, size=parts.shape[:-1]).astype(np.float32)
    for row, length in enumerate(lens):
        parts[row, :, -(-length // 64) :], lse[row, :, -(-length // 64) :] = np.nan, np.nan
    parts[:, :, :, group:] = np.nan
    settings = {"splits": splits, "group": group, "dtype": jnp.bfloat16, "by_head": True}
    arrays = jnp.asarray(parts), jnp.asarray(lse), jnp.asarray(lens, jnp.int32)
    found = np.asarray(combine_splits(*arrays, interpret=interpreter(detect_races=True), **settings), np.float32)
    weights = np.exp2(np.where(np.isnan(lse), -np.inf, lse))[:, :, :, :group, None]
    used = np.where(np.isnan(parts), 0, parts)[:, :, :, :group]
    means = (used * weights).sum(2) / np.maximum(weights.sum(2), 1e-30)
    np.testing.assert_allclose(found, means, rtol=2**-8, atol=1e-6)
    assert not races()


@needs_mosaic
def test_mixed_rows_are_computed_token_by_token(races):
    case = SMALL._replace(rows=((130, 1), (70, 6)), spare_tokens=2)
    prepared, expected = problem(case)
    assert_right(case, latent_attention.run(INTERPRET, case, prepared), expected)
    assert not races()


@needs_mosaic
def test_deterministic_mode_does_not_depend_on_the_step(monkeypatch, races):
    """Calls of three tokens: of a chunk, and of the chunk's last token among other rows."""
    monkeypatch.setattr(latent_attention_mosaic, "_MOST_PARTS", 24)
    case = SMALL._replace(rows=((70, 1), (66, 3)), row_tile=8, spare_tokens=1)
    prepared, expected = problem(case)
    found = latent_attention.run(INTERPRET, case, prepared)
    assert_right(case, found, expected)
    np.testing.assert_array_equal(np.asarray(decode(prepared, case, 8, (3,))[0]), np.asarray(found[3]))
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_does_not_depend_on_the_number_of_rows(num_splits, races):
    case = SMALL._replace(rows=((250, 1), (65, 1)), page_size=64)
    prepared, _ = problem(case)
    alone, of_five = (np.asarray(decode(prepared, case, num_splits, rows)) for rows in ((0,), (2, 1, 0, 1, 0)))
    np.testing.assert_array_equal(alone[0], of_five[2])
    np.testing.assert_array_equal(of_five[1], of_five[3])
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("settings, num_kernels", [({}, 1), ({"rows": ((4000, 1),)}, 2), ({"row_tile": 8}, 4)])
def test_lowers_for_an_h200(settings, num_kernels):
    """A chunk takes one kernel that does not split, decode rows one more to combine; the deterministic mode both for
    calls of 128 tokens and for the rest."""
    case = Case(((4000, 1), (900, 300)), 16, 1, 576, 64, dtype="bfloat16", value_dim=512)._replace(**settings)
    prepared = prepared_shapes(latent_attention, MOSAIC, case)
    text = lower_for_cuda(functools.partial(latent_attention.run, MOSAIC, case), prepared)
    assert text.count("custom_call @mosaic_gpu") == num_kernels


def test_the_pool_keeps_latents_as_they_are():
    """A latent that is not finite leaves zeros and a NaN in its rotated key."""
    case = SMALL._replace(rows=((3, 1),), head_dim=192)
    prepared = latent_attention.prepare(MOSAIC, case, latent_attention.make_inputs(case, jax.random.key(0)))
    latent = jnp.ones((prepared.batch.token_pages.shape[0], 1, 128)).at[0, 0, 5].set(jnp.inf)
    (pool,) = MOSAIC.write_kv(prepared.pools, latent[..., :64], latent, prepared.batch, case.page_size)
    stored = np.asarray(pool[prepared.batch.token_pages[0], prepared.batch.token_offsets[0]], np.float32)
    np.testing.assert_array_equal(stored[:128], np.where(np.arange(128) == 5, 0, 1))
    assert np.isnan(stored[128:]).all()
    (copied,) = MOSAIC.copy_pages((pool,), jnp.array([0, 1]), jnp.array([1, pool.shape[0]]))
    np.testing.assert_array_equal(np.asarray(copied[1], np.float32), np.asarray(pool[0], np.float32))
    np.testing.assert_array_equal(np.asarray(copied[2:], np.float32), np.asarray(pool[2:], np.float32))


@pytest.mark.parametrize(
    "device_kind, dtype, sizes, reason",
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", {}, "needs an NVIDIA Hopper GPU (H100, H200, H800, GH200)"),
        ("NVIDIA H200", "float32", {}, "keys and values must be bfloat16 or float16, not float32"),
        ("NVIDIA H200", "bfloat16", {"page_size": 8}, "page_size must be one of 16, 32, 64, 128, not 8"),
        ("NVIDIA H200", "bfloat16", {"head_dim": 288}, "head_dim must be a multiple of 64 up to 576, not 288"),
        ("NVIDIA H200", "bfloat16", {"head_dim": 640}, "head_dim must be a multiple of 64 up to 576, not 640"),
        ("NVIDIA H200", "bfloat16", {"value_dim": 64}, "value_dim must be a multiple of 128 up to 512, not 64"),
        ("NVIDIA H200", "bfloat16", {"head_dim": 576, "value_dim": 512, "page_size": 64, "num_heads": 128}, None),
    ],
)
def test_says_what_it_cannot_do(device_kind, dtype, sizes, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert MOSAIC.unsupported("gpu", device_kind, dtype, **sizes) == reason


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_needs_the_jax_it_is_checked_with(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    reason = "needs JAX 0.11, has " + ".".join(map(str, version))
    assert MOSAIC.unsupported("gpu", "NVIDIA H200", "bfloat16") == reason
    assert INTERPRET.unsupported("cpu", "cpu", "bfloat16") == reason


def test_the_interpreter_runs_on_cpus():
    reason = "the interpreter of Mosaic GPU kernels runs on CPUs"
    assert INTERPRET.unsupported("gpu", "NVIDIA H200", "bfloat16") == reason
