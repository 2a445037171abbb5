"""Native kernels for quantized weights: the same bits in any company and on any instruction set, and packing."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear, native_library, quantized_grouped_matmul_native, quantized_linear_native
from pallas_kernels import quantized_linear as op
from pallas_kernels.quantized import Form, decode, random_records
from tests.compiled import compiled

REPOSITORY = Path(__file__).parents[2]
needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
# Forms that files do not have: a group that no vector divides, zeros of other types, factors without biases.
ODD_FORMS = {
    "groups_of_8": (op.AWQ._replace(span=8), 72),
    "groups_of_6": (Form("uint4", 6, 6, "float16", zeros="uint8"), 36),
    "groups_of_6_int8": (Form("int8", 6, 6, "float16", activations="group"), 36),
    "float_zeros": (Form("uint8", 16, 64, "bfloat16", zeros="float16"), 128),
    "signed_zeros": (Form("int8", 16, 64, "bfloat16", zeros="int8", activations="group"), 128),
    "scales_of_e5m2": (Form("uint4", 16, 16, "float8_e5m2", zero=8, factors="bfloat16", factor_group=48), 96),
    "int6_groups_of_8": (Form("int6", 8, 8, "float16", zero=3, activations="row"), 56),
    "table_of_bytes": (
        Form("uint4", 16, 32, "float16", table=tuple(16.0 * code - 127 for code in range(16)), activations="group"),
        96,
    ),
    "divided_scales": (op.NVFP4._replace(divides=True), 96),
    "int6_zeros": (Form("int6", 8, 24, "float16", zeros="int8", biases="float16"), 96),
    "zero_of_uint8": (Form("uint8", 32, 0, zero=128, activations="row"), 224),
}
BF16 = {name: form._replace(activations="bfloat16") for name, form in op.FORMS.items() if form.activations is None}
IN_THE_GATE = ("w8a8", "int8_channel", "awq", "q4_k_int8", "fp8_block", "awq_bf16")
FORMS = {
    **{name: (form, 512) for name, form in op.FORMS.items()},
    **{f"{name}_bf16": (BF16[name], 512) for name in ("int8_channel", "awq", "nf4", "q6_k", "fp8_block")},
    **ODD_FORMS,
}


@pytest.fixture
def threads():
    """Sets the number of threads, and the default again afterwards."""
    yield native_library.set_threads
    native_library.set_threads(None)


def random_weight(form: Form, outer: int, inner: int) -> np.ndarray:
    return np.array(compiled(random_records, form, outer, inner)(jax.random.key(5)))


@needs_native
@pytest.mark.parametrize("name", FORMS)
def test_records_come_back_bit_for_bit(name):
    """Plain and gated, with panels that outputs do not fill; rows are what records decode to."""
    form, inner = FORMS[name]
    weight = random_weight(form, 70, inner)
    for outer, is_gated in ((1, False), (70, False), (64, True), (70, True)):
        records = weight[:outer].copy()
        packed = quantized_linear_native.pack(records, form, is_gated)
        assert packed.shape == quantized_linear_native.packed_shape(outer, inner, form, is_gated)
        assert quantized_linear_native.unpack(packed, outer, inner, form, is_gated).tobytes() == records.tobytes()
        if not is_gated:
            indices = np.array([outer - 1, 0, outer // 2], np.int32)
            found = quantized_linear_native.rows(jnp.asarray(packed), jnp.asarray(indices), inner, form)
            np.testing.assert_allclose(found, decode(records[indices], form), rtol=3e-7, atol=1e-9)


@needs_native
@pytest.mark.parametrize("name", op.FORMS)
def test_packed_bytes_are_those_of_the_form(name):
    """No scale is stored twice: at most a twenty-fifth is added."""
    form, (outer, inner) = op.FORMS[name], (64, 1024)
    shape = quantized_linear_native.packed_shape(outer, inner, form)
    factors = [field for field in form.fields if field.endswith("factor")]
    sizes = {field: kind.itemsize for field, kind in form.fields.items()}
    numbers = sum(
        size * inner // (form.shared_factors(inner) if field in factors else form.shared(inner))
        for field, size in sizes.items()
    )
    assert np.prod(shape) <= 1.04 * outer * (inner // form.span * form.code_bytes + numbers)


@needs_native
@pytest.mark.parametrize("name", ODD_FORMS)
def test_matches_the_reference_in_odd_forms(name):
    form, inner = ODD_FORMS[name]
    for num_rows in (1, 3, 20):
        case = op.Case(num_rows, form, inner, 45)
        inputs = compiled(op.make_inputs, case)(jax.random.key(num_rows))
        prepared = compiled(op.prepare, quantized_linear_native, case)(inputs)
        found = compiled(op.run, quantized_linear_native, case)(prepared)
        comparison = op.compare(case, inputs, found, compiled(op.expected, case)(inputs))
        assert comparison.is_right, comparison


@needs_native
@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
def test_a_row_is_multiplied_alike_in_any_company(threads, name):
    """One kernel for few rows, blocks of several sizes, tiles, parts of the features, and any number of threads."""
    form, inner = FORMS[name]
    inner = 8 * inner if name in ("w8a8", "int4_channel", "awq_int8", "int8_channel_bf16") else inner
    x = np.asarray(jax.random.normal(jax.random.key(0), (100, inner)))
    packed = jnp.asarray(quantized_linear_native.pack(random_weight(form, 200, inner), form))

    def multiply(x, **settings):
        rows = jnp.asarray(x)  # of NumPy's array, whose parts need no program
        return np.asarray(quantized_linear_native.matmul(rows, packed, 200, form, fused=linear.Fused(), **settings))

    whole = multiply(x)
    for rows in (1, 2, 3, 4, 5, 12, 13, 16, 17, 33):
        np.testing.assert_array_equal(multiply(x[:rows]), whole[:rows])
    np.testing.assert_array_equal(multiply(x[7:9])[1], whole[8])
    np.testing.assert_array_equal(multiply(x, num_rows=jnp.int32(77))[:77], whole[:77])
    threads(1)
    np.testing.assert_array_equal(multiply(x), whole)
    threads(5)
    np.testing.assert_array_equal(multiply(x), whole)


@needs_native
@pytest.mark.parametrize("name, is_gated", [("w8a8", False), ("q4_k_int8", True), ("awq", True)])
def test_a_row_is_multiplied_alike_among_any_rows_of_any_experts(threads, name, is_gated):
    """As the linear kernel multiplies it, whichever kernel the number of rows chooses."""
    form, outer = op.FORMS[name], 72
    records = random_weight(form, 5 * outer, 512).reshape(5, outer, -1)
    packed = quantized_grouped_matmul_native.pack(records, form, is_gated)
    assert quantized_grouped_matmul_native.unpack(packed, outer, 512, form, is_gated).tobytes() == records.tobytes()
    x = jax.random.normal(jax.random.key(0), (60, 512))
    fused = linear.Fused(activation="silu" if is_gated else None)
    wanted = [
        np.asarray(quantized_linear_native.matmul(x, jnp.asarray(panels), outer, form, fused=fused))
        for panels in packed
    ]
    num_out = outer // 2 if is_gated else outer
    for sizes in ([1, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 60, 0, 0, 0], [7, 1, 0, 20, 13], [0] * 5):
        borders = np.cumsum([0, *sizes])
        expected = [wanted[e][start:end] for e, (start, end) in enumerate(zip(borders, borders[1:], strict=False))]
        zeros = np.zeros((60 - borders[-1], num_out))
        for count in (1, 2):
            threads(count)
            found = quantized_grouped_matmul_native.grouped_matmul(
                x, jnp.asarray(packed), jnp.array(sizes), num_out, form, is_gated=is_gated
            )
            np.testing.assert_array_equal(found, np.concatenate([*expected, zeros]))


@needs_native
def test_a_row_with_nan_gives_nan_and_no_other_does():
    form = op.W8A8
    packed = jnp.asarray(quantized_linear_native.pack(random_weight(form, 64, 128), form))
    for num_rows in (2, 20):
        x = jax.random.normal(jax.random.key(0), (num_rows, 128)).at[1, 37].set(jnp.nan)
        found = np.asarray(quantized_linear_native.matmul(x, packed, 64, form, fused=linear.Fused()))
        assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, axis=0)).all()


CHILD = textwrap.dedent("""
    import hashlib, json, sys
    import jax, numpy as np
    from pallas_kernels import native_library, quantized_linear as op, quantized_linear_native as native
    found = {}
    for name, case in op.CASES.items():
        if name.split("_row")[0] not in op.FORMS or not name.endswith(("_rows_5", "_rows_33", "_row")):
            continue
        inputs = op.make_inputs(case, jax.random.key(1))
        got = np.asarray(op.run(native, case, op.prepare(native, case, inputs)))
        worst = op.compare(case, inputs, got, op.expected(case, inputs)).worst
        found[name] = hashlib.sha256(got.tobytes()).hexdigest(), worst, case.form.activations in ("row", "group")
    print(json.dumps([native_library.instructions(), found]))
""")


def run_cases(limit: str) -> tuple[str, dict[str, tuple[str, float, bool]]]:
    """Instruction set, and of every case the bits, the largest error and whether its rows are rounded."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "JAXSERVE_MAX_CPU_ISA": limit},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@needs_native
@pytest.mark.slow
def test_integer_products_have_the_same_bits_on_all_instruction_sets():
    """And products of floats are right on each."""
    _, newest = run_cases("amx")
    assert sum(is_rounded for _, _, is_rounded in newest.values()) >= 8
    for limit in ("avx2", "avx512", "avx512_vnni"):
        instructions, found = run_cases(limit)
        assert instructions in ("avx2", "avx512", limit)
        assert {name: worst for name, (_, worst, _) in found.items() if not worst <= 1} == {}
        for name, (bits, _, is_rounded) in found.items():
            assert not is_rounded or bits == newest[name][0], (limit, name)


@needs_native
def test_operands_that_do_not_go_together_are_errors():
    form = op.AWQ
    packed = jnp.asarray(quantized_linear_native.pack(random_weight(form, 40, 256), form))
    for x, other, outer, as_form in (
        (jnp.ones((2, 128)), packed, 40, form),
        (jnp.ones((2, 256)), packed, 72, form),
        (jnp.ones((2, 256)), packed, 40, form._replace(zeros=None)),
        (jnp.ones((2, 256)), packed, 40, form._replace(scales="float32")),
    ):
        with pytest.raises(Exception, match="jaxserve_quantized_linear: form, shapes or dtypes do not go together"):
            jax.block_until_ready(quantized_linear_native.matmul(x, other, outer, as_form, fused=linear.Fused()))
    with pytest.raises(Exception, match="jaxserve_quantized_rows: there is no such row"):
        jax.block_until_ready(quantized_linear_native.rows(packed, jnp.array([64]), 256, form))


@pytest.mark.parametrize(
    "form, reason",
    [
        (op.FP8_BLOCK._replace(activations="row"), "activations that are rounded to int8 need integer codes"),
        (
            op.NF4._replace(activations="group"),
            "activations that are rounded to int8 need codes whose values, or these",
        ),
        (op.AWQ._replace(zeros="int32"), "scales, zeros, biases and factors must be .*, not int32"),
        (op.AWQ._replace(zero=20, activations="row"), "the zero of uint4 codes must be 0 to 15, not 20"),
    ],
)
def test_says_which_forms_it_cannot_multiply(form, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(quantized_linear_native.unsupported("cpu", "cpu", form.values, form=form))


@needs_native
def test_too_many_features_for_a_sum_are_refused():
    with pytest.raises(ValueError, match="70016 features have too many in a group for sums in int32; at most 66000"):
        quantized_linear_native.packed_shape(32, 70016, op.W8A8)


@pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    version = native_library.VERSION
    monkeypatch.setattr(native_library, "VERSION", version + 1)
    reason = native_library.unavailable.__wrapped__()
    assert reason == f"the native library has version {version}, this code {version + 1}; reinstall with pip"
