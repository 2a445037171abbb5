"""Test the Pallas Mosaic GPU kernels: interpreted on a CPU with the race detector, and lowered for a GPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.combine_attention_mosaic import combine_splits
from pallas_kernels.decode_attention_mosaic import decode_attention
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.mosaic_ring import Splits
from pallas_kernels.mosaic_support import interpreter, missing_jax, registers_of
from pallas_kernels.operation import compare_rows, prepared_shapes
from pallas_kernels.paged_attention_cases import Case
from pallas_kernels.paged_attention_mosaic import INTERPRET, MOSAIC
from pallas_kernels.prefill_attention_mosaic import prefill_attention
from tests.compiled import compiled

needs_mosaic = pytest.mark.skipif(missing_jax() is not None, reason=str(missing_jax()))
SMALL = {"dtype": "bfloat16", "spare_rows": 1}
DECODE_CASES = {
    "groups_of_four": (Case(((1, 1), (15, 1), (16, 1), (17, 1)), 8, 2, 64, 16, **SMALL), 2),
    "group_of_seven": (Case(((63, 1), (64, 1), (65, 1), (300, 1)), 7, 1, 128, 32, **SMALL), 1),
    "one_head_in_a_window": (Case(((129, 1), (333, 1)), 1, 1, 64, 64, window=70, **SMALL), 4),
    "more_splits_than_pages": (Case(((200, 1),), 8, 1, 128, 128, soft_cap=5.0, **SMALL), 5),
    "group_of_ten_that_sees_itself": (Case(((77, 1), (5, 1)), 10, 1, 64, 16, window=1, **SMALL), 1),
    "sinks": (Case(((63, 1), (300, 1)), 7, 1, 64, 32, has_sinks=True, **SMALL), 1),
    "sinks_in_splits": (Case(((77, 1), (300, 1)), 12, 2, 64, 32, window=150, has_sinks=True, **SMALL), 4),
    "group_of_seven_in_eight_splits": (Case(((570, 1), (1, 1)), 7, 1, 64, 64, **SMALL), 8),
}
# (splits, kv heads, head_dim, group, window, lens): from no token to more tiles than splits.
COMBINE_CASES = {
    "two_splits": (2, 2, 64, 4, None, (1, 64, 65, 300)),
    "four_splits_of_a_window": (4, 1, 64, 1, 70, (0, 63, 129, 333)),
    "eight_splits": (8, 1, 128, 7, None, (513, 0, 100)),
    "more_splits_than_tiles": (32, 1, 64, 8, None, (320, 1)),
    "slots_refilled": (32, 1, 64, 8, None, (64 * 70,)),
    "one_split_per_slot": (5, 1, 256, 32, None, (64 * 5, 65)),
    "only_empty_rows": (8, 1, 64, 1, None, (0, 0)),
}
PREFILL_CASES = {
    "mixed": Case(((33, 1), (64, 64), (150, 20)), 8, 2, 64, 16, **SMALL),
    "group_of_seven": Case(((300, 30),), 7, 1, 128, 32, soft_cap=5.0, **SMALL),
    "window_over_blocks": Case(((260, 140),), 1, 1, 64, 64, window=40, **SMALL),
    "sinks": Case(((33, 1), (100, 40)), 10, 2, 64, 32, window=50, has_sinks=True, **SMALL),
    "wide_head": Case(((140, 70),), 2, 1, 256, 128, **SMALL),
}


@pytest.fixture
def races():
    """Return a function that tells whether the race detector found races; reset the interpreter after each test."""
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    yield lambda: callbacks.get_races().races_found
    callbacks.reset_gpu_interpret_mode_state()


def problem(case: Case):
    """Return a case's operands, with unused pages full of NaN, and the expected result."""
    inputs = compiled(paged_attention.make_inputs, case)(jax.random.key(case.rows[0][0]))
    prepared = jax.jit(functools.partial(paged_attention.prepare, INTERPRET, case))(inputs)
    return prepared, np.array(compiled(paged_attention.expected, case)(inputs), np.float32)


def assert_right(case: Case, found, expected) -> None:
    """Every row is within what the operation allows."""
    is_real = np.ones(expected.shape[:-1], bool)
    comparison = compare_rows(("attention",), found, expected, is_real, paged_attention.tolerance(case))
    assert comparison.is_right, comparison


def decode(prepared, case: Case, num_splits: int, rows: tuple[int, ...], query_tokens: tuple[int, ...] | None = None):
    """Run decode attention on some of a case's rows."""
    chosen = jnp.asarray(rows, jnp.int32)
    return decode_attention(
        prepared.query[chosen if query_tokens is None else jnp.asarray(query_tokens)],
        *prepared.pools,
        prepared.batch.page_table,
        chosen,
        prepared.batch.context_lens[chosen],
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=paged_attention.case_sinks(case),
        num_splits=num_splits,
        interpret=interpreter(detect_races=True),
    )


@needs_mosaic
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode_matches_reference(name, races):
    case, num_splits = DECODE_CASES[name]
    prepared, expected = problem(case)
    found = decode(prepared, case, num_splits, tuple(range(case.num_rows)))
    assert_right(case, found[: len(case.rows)], expected[: len(case.rows)])
    assert not np.asarray(found[len(case.rows) :], np.float32).any()
    assert not races()


def combine(parts, lse, lens, splits: Splits, group: int):
    """Run the combining kernel."""
    arrays = jnp.asarray(parts), jnp.asarray(lse), jnp.asarray(lens, jnp.int32)
    settings = {"splits": splits, "group": group, "dtype": jnp.bfloat16}
    return combine_splits(*arrays, interpret=interpreter(detect_races=True), **settings)


def parts_of_splits(lens, splits: Splits, num_kv_heads: int, head_dim: int, group: int):
    """Return random parts and sums of each split; NaN where a split has no tokens, as nothing is written there."""
    columns = -(-group // 8) * 8
    random = np.random.default_rng(len(lens))
    parts = random.normal(size=(len(lens), num_kv_heads, splits.num_splits, head_dim, columns)).astype(np.float32)
    lse = random.normal(scale=3, size=(*parts.shape[:3], columns)).astype(np.float32)
    for row, length in enumerate(lens):
        first = 0 if splits.window is None else max(length - splits.window, 0) // splits.tile
        num_tiles = -(-length // splits.tile) - first
        num_used = -(-num_tiles // max(-(-num_tiles // splits.num_splits), 1))
        parts[row, :, num_used:], lse[row, :, num_used:] = np.nan, np.nan
    return parts, lse


@needs_mosaic
@pytest.mark.parametrize("name", COMBINE_CASES)
def test_combine_matches_reference(name, races):
    num_splits, num_kv_heads, head_dim, group, window, lens = COMBINE_CASES[name]
    splits = Splits(num_splits, 64, window)
    parts, lse = parts_of_splits(lens, splits, num_kv_heads, head_dim, group)
    found = np.asarray(combine(parts, lse, lens, splits, group), np.float32)
    weights = np.exp2(np.where(np.isnan(lse), -np.inf, lse))[:, :, :, None]
    means = (np.where(np.isnan(parts), 0, parts) * weights).sum(2) / np.maximum(weights.sum(2), 1e-30)
    np.testing.assert_allclose(found, means.swapaxes(2, 3)[:, :, :group], rtol=2**-8, atol=1e-6)
    assert not races()


@needs_mosaic
def test_combine_does_not_depend_on_the_number_of_rows(races):
    splits, lens = Splits(8, 64, None), (700, 1, 65, 0, 129, 512, 300, 64, 577, 2000)
    parts, lse = parts_of_splits(lens, splits, 1, 64, 4)
    alone, of_four, of_ten = (np.asarray(combine(parts[:n], lse[:n], lens[:n], splits, 4)) for n in (1, 4, 10))
    np.testing.assert_array_equal(alone[0], of_ten[0])
    np.testing.assert_array_equal(of_four, of_ten[:4])
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("num_splits", [1, 8])
def test_decode_does_not_depend_on_the_number_of_rows(num_splits, races):
    case = Case(((450, 1), (65, 1), (1, 1)), 4, 1, 64, 64, **SMALL)
    prepared, _ = problem(case)
    alone, of_four, of_ten = (
        np.asarray(decode(prepared, case, num_splits, rows))
        for rows in ((0,), (1, 0, 2, 3), (3, 2, 1, 0, 3, 2, 3, 1, 3, 2))
    )
    np.testing.assert_array_equal(alone[0], of_four[1])
    np.testing.assert_array_equal(alone[0], of_ten[3])
    np.testing.assert_array_equal(of_four[0], of_ten[2])
    assert not races()


@needs_mosaic
def test_deterministic_mode_does_not_depend_on_the_step(races):
    case = Case(((200, 1), (66, 3)), 4, 1, 64, 16, row_tile=8, spare_tokens=1, **SMALL)
    prepared, expected = problem(case)
    found = paged_attention.run(INTERPRET, case, prepared)
    assert_right(case, found, expected)
    last = decode(prepared, case, 8, (1,), query_tokens=(3,))
    np.testing.assert_array_equal(np.asarray(last[0]), np.asarray(found[3]))
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("name", PREFILL_CASES)
def test_prefill_matches_reference(name, races):
    case = PREFILL_CASES[name]
    prepared, expected = problem(case)
    found = prefill_attention(
        prepared.query,
        *prepared.pools,
        prepared.batch,
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=paged_attention.case_sinks(case),
        interpret=interpreter(detect_races=True),
    )
    used = sum(length for _, length in case.rows)
    assert_right(case, found[case.num_single : used], expected[case.num_single : used])
    assert not races()


@needs_mosaic
@pytest.mark.parametrize(
    "settings, num_kernels",
    [
        ({"window": 100, "soft_cap": 30.0}, 3),
        ({"row_tile": 8}, 2),
        ({"has_sinks": True}, 3),
        ({"has_sinks": True, "spare_rows": 100}, 2),  # contexts that are not split
    ],
)
def test_lowers_for_an_h200(settings, num_kernels):
    case = Case(((4000, 1), (900, 300)), 40, 8, 128, 16, dtype="bfloat16", **settings)
    prepared = prepared_shapes(paged_attention, MOSAIC, case)
    text = lower_for_cuda(functools.partial(paged_attention.run, MOSAIC, case), prepared)
    assert text.count("custom_call @mosaic_gpu") == num_kernels


def test_warpgroups_get_the_registers_that_they_ask_for():
    assert registers_of(40, 232, 232) == (40, 232, 232)  # of 168 each
    assert registers_of(24, 240) == (24, 240)
    with pytest.raises(ValueError, match=r"start with 168 .* 504 in all; they ask for 48 \+ 232 \+ 232 = 512"):
        registers_of(48, 232, 232)


@pytest.mark.parametrize(
    "device_kind, dtype, sizes, reason",
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", {}, "needs an NVIDIA Hopper GPU (H100, H200, H800, GH200)"),
        ("NVIDIA H200", "float32", {}, "keys and values must be bfloat16 or float16, not float32"),
        ("NVIDIA H100 80GB HBM3", "float16", {"head_dim": 80}, "head_dim must be one of 64, 128, 256, not 80"),
        ("NVIDIA H200", "bfloat16", {"page_size": 8}, "page_size must be one of 16, 32, 64, 128, not 8"),
        ("NVIDIA H200", "bfloat16", {"num_heads": 71, "num_kv_heads": 1}, "71 query heads share a key/value head"),
        ("NVIDIA H200", "bfloat16", {"num_heads": 96, "num_kv_heads": 2, "head_dim": 256}, "48 query heads share a"),
        ("NVIDIA H200", "bfloat16", {"head_dim": 128, "page_size": 64, "num_heads": 32, "num_kv_heads": 8}, None),
    ],
)
def test_says_what_it_cannot_do(device_kind, dtype, sizes, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    found = MOSAIC.unsupported("gpu", device_kind, dtype, **sizes)
    if reason is None:
        assert found is None
    else:
        assert found is not None and found.startswith(reason)


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_needs_the_jax_it_is_checked_with(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    reason = "needs JAX 0.11, has " + ".".join(map(str, version))
    for implementation, platform, device_kind in ((MOSAIC, "gpu", "NVIDIA H200"), (INTERPRET, "cpu", "cpu")):
        assert implementation.unsupported(platform, device_kind, "bfloat16") == reason


def test_the_interpreter_runs_on_cpus():
    assert (
        INTERPRET.unsupported("gpu", "NVIDIA H200", "bfloat16") == "the interpreter of Mosaic GPU kernels runs on CPUs"
    )
