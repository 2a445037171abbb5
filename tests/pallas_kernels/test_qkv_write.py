"""The fused write of keys and values: rounding points, pages' bytes, what NaN does, and that no pool is copied."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import native_library, qkv_write, qkv_write_native, qkv_write_xla
from pallas_kernels.operation import prepared_shapes
from pallas_kernels.qkv_write import Case, Inputs, QkNorms
from pallas_kernels.registry import OPERATIONS, UnsupportedKernelError, load, select
from tests.compiled import compiled

CPU_ROWS = ["xla", "pallas-interpret"]
EPS = 1e-6


def written(row: str, case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and pools of an implementation, in their own type."""
    query, keys, values = compiled(qkv_write.run, load("qkv_write", row), case)(inputs)
    return np.asarray(query), np.asarray(keys), np.asarray(values)


def rounded_heads(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values in numpy, float32 between the two roundings to the operands' type."""
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    qkv = np.asarray(inputs.qkv).reshape(case.num_tokens, -1, case.head_dim)
    query, key, value = np.split(qkv, [case.num_heads, case.num_heads + case.num_kv_heads], axis=1)
    turned = []
    for x, which in ((query, 0), (key, 1)):
        if inputs.weights is not None:
            wide = x.astype(np.float32)
            scale = np.float32(1) / np.sqrt(np.mean(wide * wide, -1, keepdims=True, dtype=np.float32) + np.float32(EPS))
            x = (wide * scale * np.asarray(inputs.weights[which], np.float32)).astype(dtype)
        if inputs.rotation is not None:
            cos, sin = (np.asarray(table)[:, None] for table in inputs.rotation)
            half = cos.shape[-1]
            first, second, rest = (part.astype(np.float32) for part in np.split(x, [half, 2 * half], axis=-1))
            x = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1).astype(dtype)
        turned.append(x)
    return turned[0], turned[1], value


def steps_apart(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many numbers of their type two arrays are apart."""
    orders = []
    for array in (found, wanted):
        bits = np.asarray(array).view(np.int16 if array.dtype.itemsize == 2 else np.int32).astype(np.int64)
        lowest = np.iinfo(np.int16 if array.dtype.itemsize == 2 else np.int32).min
        orders.append(np.where(bits < 0, lowest - bits, bits))
    return np.abs(orders[0] - orders[1])


@pytest.mark.parametrize("row", CPU_ROWS)
@pytest.mark.parametrize("name", ["three_tokens", "float32", "partial_rotation", "head_of_80", "group_of_seven"])
def test_rounds_where_the_layers_round(row: str, name: str) -> None:
    """A sum's order and a fused multiplication may move a number to the next of its type, in few places."""
    case = qkv_write.CASES[name]
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(1))
    query, keys, values = written(row, case, inputs)
    pages, offsets = np.asarray(inputs.batch.token_pages), np.asarray(inputs.batch.token_offsets)
    wanted_query, wanted_key, wanted_value = rounded_heads(case, inputs)
    for found, wanted in ((query, wanted_query), (keys[pages, :, offsets], wanted_key)):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), atol=2e-2, rtol=1e-2)
        if case.dtype == "bfloat16":
            assert (steps_apart(found, wanted) > 0).mean() < 0.02
        else:
            np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=2e-6)
    np.testing.assert_array_equal(values[pages, :, offsets], wanted_value)


@pytest.mark.parametrize("row", CPU_ROWS)
def test_pages_of_others_keep_their_bytes(row: str) -> None:
    """Only the places of this step's tokens change, and without norm and rotation they are what was projected."""
    case = qkv_write.CASES["plain"]
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(2))
    _, keys, values = written(row, case, inputs)
    key, value = rounded_heads(case, inputs)[1:]
    pages, offsets = np.asarray(inputs.batch.token_pages), np.asarray(inputs.batch.token_offsets)
    for found, before, new in ((keys, inputs.pools[0], key), (values, inputs.pools[1], value)):
        wanted = np.array(before)
        wanted[pages, :, offsets] = new
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("row", CPU_ROWS)
def test_values_that_are_not_finite_move_to_their_keys(row: str) -> None:
    case = Case(4, head_dim=16, rotary_dim=0, dtype="float32")
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(3))
    first_key, first_value = 4 * 16, 6 * 16
    bad = [np.nan, np.inf, -np.inf]
    qkv = inputs.qkv.at[np.arange(3), first_value + 5].set(jnp.asarray(bad)).at[3, first_key + 20].set(jnp.nan)
    _, keys, values = written(row, case, inputs._replace(qkv=qkv))
    pages, offsets = np.asarray(inputs.batch.token_pages), np.asarray(inputs.batch.token_offsets)
    assert np.isfinite(values).all()
    is_nan = np.isnan(keys[pages, :, offsets])
    wanted = np.zeros((4, 2, 16), bool)
    wanted[:3, 0, 5] = wanted[3, 1, 4] = True
    np.testing.assert_array_equal(is_nan, wanted)
    np.testing.assert_array_equal(values[pages, :, offsets][:3, 0, 5], 0)


@pytest.mark.parametrize("row", CPU_ROWS)
def test_keys_take_the_type_of_their_pages(row: str) -> None:
    """A value that only the pages' type cannot hold is not finite there."""
    case = Case(2, head_dim=16, rotary_dim=0, dtype="float32")
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(4))
    pools = jax.tree.map(lambda pool: pool.astype(jnp.float16), inputs.pools)
    qkv = inputs.qkv.at[0, 6 * 16].set(1e6)
    _, keys, values = written(row, case, inputs._replace(pools=pools, qkv=qkv))
    page, offset = int(inputs.batch.token_pages[0]), int(inputs.batch.token_offsets[0])
    assert keys.dtype == values.dtype == np.float16
    assert np.isnan(keys[page, 0, offset, 0]) and values[page, 0, offset, 0] == 0


def test_a_token_knows_nothing_of_the_others() -> None:
    case = qkv_write.CASES["group_of_seven"]
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(5))
    query, keys, _ = written("pallas-interpret", case, inputs)
    for token in range(case.num_tokens):
        one = slice(token, token + 1)
        batch = inputs.batch._replace(
            token_pages=inputs.batch.token_pages[one], token_offsets=inputs.batch.token_offsets[one]
        )
        assert inputs.rotation is not None
        rotation = inputs.rotation[0][one], inputs.rotation[1][one]
        alone = inputs._replace(qkv=inputs.qkv[one], batch=batch, rotation=rotation)
        query_alone, keys_alone, _ = written("pallas-interpret", case._replace(num_tokens=1), alone)
        place = int(batch.token_pages[0]), slice(None), int(batch.token_offsets[0])
        assert query_alone[0].tobytes() == query[token].tobytes()
        assert keys_alone[place].tobytes() == keys[place].tobytes()


@pytest.mark.parametrize("row", OPERATIONS["qkv_write"])
def test_pools_that_are_given_up_are_not_copied(row: str) -> None:
    """Both pools' memory is that of the results: what XLA says of the program, where it can compile it."""
    case = qkv_write.BENCHES["llama_8b_64"]
    implementation = load("qkv_write", row)
    reason = implementation.unsupported(jax.default_backend(), jax.devices()[0].device_kind, case.dtype)
    if reason is not None:
        pytest.skip(reason)
    inputs = prepared_shapes(qkv_write, implementation, case)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(pools, rest):
        return qkv_write.write(implementation, case, rest._replace(pools=pools))

    memory = call.lower(inputs.pools, inputs._replace(pools=())).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(pool.size * pool.dtype.itemsize for pool in inputs.pools)


def test_a_pool_of_another_layout_is_an_error() -> None:
    case = qkv_write.CASES["one_token"]
    inputs = compiled(qkv_write.make_inputs, case)(jax.random.key(0))
    for row in (*CPU_ROWS, "native"):
        implementation = load("qkv_write", row)
        with pytest.raises(AssertionError, match="2, (16, 128|128, 16)"):
            qkv_write.write(implementation, case._replace(page_size=8), qkv_write.prepare(implementation, case, inputs))


def test_selection() -> None:
    """The CPU's kernel on CPUs that have it, else XLA; the GPU's on cards; interpreted only by name."""
    chosen = functools.partial(select, "qkv_write", dtype="bfloat16")
    on_cpu = qkv_write_xla if native_library.unavailable() else qkv_write_native
    assert chosen(platform="cpu", device_kind="cpu") is on_cpu
    assert chosen(platform="cpu", device_kind="cpu", page_size=12) is qkv_write_xla
    assert chosen(platform="gpu", device_kind="NVIDIA H200") is load("qkv_write", "triton")
    assert chosen(platform="cpu", device_kind="cpu", name="pallas-interpret").is_interpreted
    with pytest.raises(UnsupportedKernelError, match="triton: needs an NVIDIA GPU"):
        chosen(platform="cpu", device_kind="cpu", name="triton")
    with pytest.raises(UnsupportedKernelError, match="keys and values must be float32, bfloat16, float16, not int8"):
        select("qkv_write", platform="gpu", device_kind="NVIDIA H200", dtype="int8", name="triton")


def test_norms_use_their_own_epsilon() -> None:
    """A head of zeros stays zero, and a tiny one is not blown up beyond what epsilon allows."""
    x = jnp.full((1, 1, 16), 1e-4)
    found = qkv_write.normed(x, jnp.ones(16), 1e-2)
    np.testing.assert_allclose(np.asarray(found), 1e-4 / np.sqrt(1e-8 + 1e-2), rtol=1e-6)
    norms = QkNorms(jnp.ones(16), jnp.ones(16), 1e-6)
    heads = qkv_write.split_heads(jnp.zeros((1, 48)), None, norms, 1, 1)
    assert not np.asarray(heads.query).any() and not np.asarray(heads.key).any()
