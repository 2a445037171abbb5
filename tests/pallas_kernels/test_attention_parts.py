"""Partial attention of devices that share the tokens of pages, put together: the attention over whole contexts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention, paged_attention
from pallas_kernels.attention_parts import Part, PartAttention, combine_parts, unsupported_parts
from pallas_kernels.paged_attention import AttentionBatch, Case, case_sinks, context_places
from pallas_kernels.registry import OPERATIONS, load
from tests.compiled import compiled

OPS = {"paged_attention": paged_attention, "latent_attention": latent_attention}
ABLE = [(op, name) for op in OPS for name in OPERATIONS[op] if isinstance(load(op, name), PartAttention)]
LONG = Case(rows=((9000, 1), (2, 1), (4500, 3)), num_kv_heads=1)
LATENTS = {"head_dim": 24, "value_dim": 16}
PAGED = ("edges", "many_rows", "mixed", "window", "window_one", "soft_cap_and_window", "bfloat16_mixed", "sinks")
CASES: dict[str, dict[str, Case]] = {
    "paged_attention": {name: paged_attention.CASES[name] for name in (*PAGED, "one_by_one_window")},
    "latent_attention": {name: latent_attention.CASES[name] for name in ("edges", "mixed", "bfloat16", "one_by_one")},
}
CASES["paged_attention"] |= {"long": LONG, "long_window": LONG._replace(window=6000)}
CASES["latent_attention"] |= {"long": LONG._replace(**LATENTS)}


def own_places(case: Case, batch: AttentionBatch, part: Part, position: jax.Array) -> AttentionBatch:
    """The batch whose tokens, at these positions, are written where a device stores them."""
    padding = paged_attention.num_pages(case) + 1
    pages = jnp.where(part.holds(position), batch.token_pages, padding)
    return batch._replace(token_pages=pages, token_offsets=position % case.page_size // part.num_devices)


def own_pools(module: Any, case: Case, inputs: Any, part: Part) -> tuple[jax.Array, ...]:
    """The pools of one device, filled by the implementation: NaN in unowned pages, stale numbers elsewhere."""
    latents = isinstance(inputs, latent_attention.Inputs)
    dense = (inputs.latents,) if latents else (inputs.keys, inputs.values)
    own_size, num_rows, length = case.page_size // part.num_devices, len(case.rows), dense[0].shape[1]
    specs = module.pool_specs(paged_attention.num_pages(case), own_size, case.num_kv_heads, case.head_dim)
    pools = tuple(paged_attention.unowned_pool(case, inputs.batch, spec.shape).astype(case.dtype) for spec in specs)
    places, num_tokens = context_places(case, inputs.batch, length)
    places = own_places(case, places, part, jnp.tile(jnp.arange(length), num_rows))
    new = tuple(each.reshape(num_tokens, case.num_kv_heads, case.head_dim) for each in dense)
    if latents:
        value, rotated = jnp.split(new[0], [case.value_width], axis=2)
        new = rotated, value
    return module.write_kv(pools, *new, places, own_size)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def attend_part(operation: str, name: str, case: Case, num_devices: int, inputs: Any, device: jax.Array) -> jax.Array:
    """Partial attention of one device."""
    module, part = load(operation, name), Part(device, num_devices)
    settings: dict[str, Any] = {"page_size": case.page_size // num_devices, "scale": case.head_dim**-0.5}
    settings |= {"decode_only": case.is_decode_only, "row_tile": case.row_tile}
    if operation == "latent_attention":
        settings |= {"value_dim": case.value_width}
    else:
        settings |= {"num_kv_heads": case.num_kv_heads, "window": case.window, "soft_cap": case.soft_cap}
    return module.attend_part(inputs.query, own_pools(module, case, inputs, part), inputs.batch, part, **settings)


def check(operation: str, name: str, case: Case, num_devices: int, inputs: Any) -> None:
    """Compare the attention of several devices with the reference."""
    op, implementation = OPS[operation], load(operation, name)
    sizes = {**op.sizes(case), "page_size": case.page_size // num_devices, "token_parts": num_devices}
    if (reason := implementation.unsupported("cpu", "cpu", case.dtype, **sizes)) is not None:
        pytest.skip(reason)
    parts = [attend_part(operation, name, case, num_devices, inputs, jnp.int32(i)) for i in range(num_devices)]
    found = combine_parts(parts, case_sinks(case)).astype(case.dtype)
    comparison = op.compare(case, inputs, found, compiled(op.expected, case)(inputs))
    assert comparison.is_right, comparison


@pytest.mark.parametrize(("operation", "name", "case"), [(*able, case) for able in ABLE for case in CASES[able[0]]])
def test_parts_combined_are_the_attention(operation: str, name: str, case: str) -> None:
    """Contexts of one token and more, so that some devices have none that a query sees."""
    shape = CASES[operation][case]
    num_devices = 3 if case == "mixed" else 4
    shape = shape._replace(page_size=16 * num_devices)
    check(operation, name, shape, num_devices, compiled(OPS[operation].make_inputs, shape)(jax.random.key(8)))


@pytest.mark.parametrize(("operation", "name"), ABLE)
def test_a_prefix_that_rows_share_is_read_once_for_all(operation: str, name: str) -> None:
    """As much as fills whole tiles of each device's part of the pages."""
    case = Case(rows=tuple((800 + 5 * i, 1) for i in range(12)), page_size=32, spare_rows=4, num_kv_heads=1)
    if operation == "latent_attention":
        case = case._replace(**LATENTS)
    inputs: Any = compiled(OPS[operation].make_inputs, case)(jax.random.key(3))
    shared = 20 * case.page_size
    fields = ("latents",) if operation == "latent_attention" else ("keys", "values")
    dense = {name: getattr(inputs, name) for name in fields}
    dense = {name: array.at[:, :shared].set(array[:1, :shared]) for name, array in dense.items()}
    table = inputs.batch.page_table
    batch = inputs.batch._replace(page_table=table.at[:12, :20].set(table[0, :20]), num_shared_pages=jnp.int32(20))
    check(operation, name, case, 2, inputs._replace(batch=batch, **dense))


@pytest.mark.parametrize("operation", OPS)
@pytest.mark.parametrize("part", [Part(2, 2), Part(-1, 2)])
def test_native_kernels_refuse_a_part_of_no_device(operation: str, part: Part) -> None:
    case = CASES[operation]["edges"]
    if load(operation, "native").unsupported("cpu", "cpu", "float32") is not None:
        pytest.skip("needs native kernels")
    inputs = compiled(OPS[operation].make_inputs, case)(jax.random.key(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="jaxserve_attend.*: shapes or dtypes do not go together"):
        jax.block_until_ready(attend_part(operation, "native", case, part.num_devices, inputs, part.device))


def test_parts_count_their_tokens() -> None:
    """Device r of 3 has positions r, r + 3, ...."""
    positions = np.arange(-2, 12)
    for index in range(3):
        own, part = np.arange(index, 40, 3), Part(index, 3)
        expected = [(own < position).sum() for position in positions]
        np.testing.assert_array_equal(part.tokens_before(jnp.asarray(positions)), expected)
        np.testing.assert_array_equal(np.flatnonzero(part.holds(jnp.arange(40))), own)


def test_a_query_that_sees_nothing_is_zero_and_scores_far_apart_do_not_overflow() -> None:
    empty = jnp.array([0.0, 0.0, 0.0, -1e30])
    small, large = jnp.array([2.0, 4.0, 2.0, -300.0]), jnp.array([3.0, 3.0, 1.0, 300.0])
    parts = [jnp.stack(queries)[:, None] for queries in ([empty, empty, small], [empty, small, large])]
    np.testing.assert_array_equal(combine_parts(parts)[:, 0], [[0, 0], [1, 2], [3, 3]])
    sunk = combine_parts(parts, jnp.array([-300.0]))[:, 0]
    np.testing.assert_allclose(sunk, [[0, 0], [2 / 3, 4 / 3], [3, 3]], rtol=1e-6)


def test_nan_reaches_the_result() -> None:
    assert np.isnan(combine_parts([jnp.full((1, 1, 3), jnp.nan), jnp.array([[[1.0, 1.0, 0.0]]])])).all()


@pytest.mark.parametrize("operation", OPS)
def test_implementations_without_partial_attention_say_so(operation: str) -> None:
    assert unsupported_parts({"token_parts": 1}) is None
    for name in OPERATIONS[operation]:
        module = load(operation, name)
        if isinstance(module, PartAttention):
            continue
        platform, kind = ("cpu", "cpu") if "interpret" in name else ("gpu", "NVIDIA H200")
        sizes = {"page_size": 64, "head_dim": 576, "value_dim": 512} if operation == "latent_attention" else {}
        if module.unsupported(platform, kind, "bfloat16", **sizes) is None:
            reason = module.unsupported(platform, kind, "bfloat16", **sizes, token_parts=4)
            assert reason == "it has no partial attention, which 4 devices that share the tokens of pages need"
