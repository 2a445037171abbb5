"""Pallas Mosaic GPU kernels: interpreted on a CPU with its detector of races, and lowered for a GPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.decode_attention_mosaic import decode_attention
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.mosaic_support import interpreter, missing_jax
from pallas_kernels.operation import largest_error, prepared_shapes
from pallas_kernels.paged_attention_cases import Case
from pallas_kernels.paged_attention_mosaic import INTERPRET, MOSAIC
from pallas_kernels.prefill_attention_mosaic import prefill_attention

needs_mosaic = pytest.mark.skipif(missing_jax() is not None, reason=str(missing_jax()))
SMALL = {"dtype": "bfloat16", "spare_rows": 1}
DECODE_CASES = {
    "groups_of_four": (Case(((1, 1), (15, 1), (16, 1), (17, 1)), 8, 2, 64, 16, **SMALL), 2),
    "group_of_seven": (Case(((63, 1), (64, 1), (65, 1), (300, 1)), 7, 1, 128, 32, **SMALL), 1),
    "one_head_in_a_window": (Case(((129, 1), (333, 1)), 1, 1, 64, 64, window=70, **SMALL), 4),
    "more_splits_than_pages": (Case(((200, 1),), 8, 1, 128, 128, soft_cap=5.0, **SMALL), 5),
    "group_of_ten_that_sees_itself": (Case(((77, 1), (5, 1)), 10, 1, 64, 16, window=1, **SMALL), 1),
}
PREFILL_CASES = {
    "mixed": Case(((33, 1), (64, 64), (150, 20)), 8, 2, 64, 16, **SMALL),
    "group_of_seven": Case(((300, 30),), 7, 1, 128, 32, soft_cap=5.0, **SMALL),
    "window_over_blocks": Case(((260, 140),), 1, 1, 64, 64, window=40, **SMALL),
    "wide_head": Case(((140, 70),), 2, 1, 256, 128, **SMALL),
}


@pytest.fixture
def races():
    """Counts what the interpreter's detector finds; a failed run's state is dropped behind each test."""
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    yield lambda: callbacks.get_races().races_found
    callbacks.reset_gpu_interpret_mode_state()


def problem(case: Case):
    """A case's operands with unused pages full of NaN, and the right answer."""
    inputs = paged_attention.make_inputs(case, jax.random.key(case.rows[0][0]))
    prepared = jax.jit(functools.partial(paged_attention.prepare, INTERPRET, case))(inputs)
    return prepared, np.array(paged_attention.expected(case, inputs), np.float32)


def decode(prepared, case: Case, num_splits: int, rows: tuple[int, ...]):
    """Attention of some of a case's rows."""
    chosen = jnp.asarray(rows, jnp.int32)
    return decode_attention(
        prepared.query[chosen],
        *prepared.pools,
        prepared.batch.page_table,
        chosen,
        prepared.batch.context_lens[chosen],
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        num_splits=num_splits,
        interpret=interpreter(detect_races=True),
    )


@needs_mosaic
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode_matches_reference(name, races):
    case, num_splits = DECODE_CASES[name]
    prepared, expected = problem(case)
    found = decode(prepared, case, num_splits, tuple(range(case.num_rows)))
    assert largest_error(found[: len(case.rows)], expected[: len(case.rows)]) <= paged_attention.tolerance(case)
    assert not np.asarray(found[len(case.rows) :], np.float32).any()
    assert not races()


@needs_mosaic
def test_a_row_does_not_depend_on_the_others(races):
    case, num_splits = DECODE_CASES["group_of_seven"]
    prepared, _ = problem(case)
    together = decode(prepared, case, num_splits, (1, 0, 2))
    assert (decode(prepared, case, num_splits, (1,))[0] == together[0]).all()
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
        interpret=interpreter(detect_races=True),
    )
    expected[: case.num_decode] = np.nan
    assert largest_error(found, expected) <= paged_attention.tolerance(case)
    assert not races()


@needs_mosaic
@pytest.mark.parametrize("settings, num_kernels", [({"window": 100, "soft_cap": 30.0}, 2), ({"row_tile": 8}, 1)])
def test_lowers_for_an_h200(settings, num_kernels):
    case = Case(((4000, 1), (900, 300)), 40, 8, 128, 16, dtype="bfloat16", **settings)
    prepared = prepared_shapes(paged_attention, MOSAIC, case)
    text = lower_for_cuda(functools.partial(paged_attention.run, MOSAIC, case), prepared)
    assert text.count("custom_call @mosaic_gpu") == num_kernels


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
