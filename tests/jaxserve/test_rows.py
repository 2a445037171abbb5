"""Functions over tiles of rows: the whole tiles that hold rows in use are computed, no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.rows import map_rows


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_map_rows(num_rows: int, size: int) -> None:
    """Whole tiles that hold rows in use are computed, no others."""
    x, y = np.arange(size * 3, dtype=np.float32).reshape(size, 3), np.arange(size)

    def function(a: jax.Array, b: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert a.shape == (4, 3)
        return a.sum(1) + 1, {"index": b[:, None] * 2}

    sums, found = jax.jit(lambda n: map_rows(function, (jnp.asarray(x), jnp.asarray(y)), n, 4))(num_rows)
    used = np.arange(size) < -(-num_rows // 4) * 4
    np.testing.assert_array_equal(sums, np.where(used, x.sum(1) + 1, 0))
    np.testing.assert_array_equal(found["index"], np.where(used, 2 * y, 0)[:, None])


@pytest.mark.parametrize("size", [4, 12])
def test_map_rows_of_which_a_device_has_some(size: int) -> None:
    """Two arrays and results have half the rows of each tile."""
    x, halves = jnp.arange(size), jnp.arange(size // 2)

    def function(x: jax.Array, halves: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert (len(x), len(halves)) == (4, 2)
        return x[:2] + halves, x + x.sum()

    for arrays, of in (((x, halves), None), ((halves, x), size)):
        swapped = function if of is None else lambda a, b: function(b, a)
        own, whole = map_rows(swapped, arrays, size, 4, of)
        np.testing.assert_array_equal(own, x.reshape(-1, 4)[:, :2].ravel() + halves)
        np.testing.assert_array_equal(whole, x + np.repeat(x.reshape(-1, 4).sum(1), 4))


def test_map_rows_without_a_tile_is_a_call() -> None:
    x = jnp.arange(5.0)
    traced = jax.make_jaxpr(lambda a: map_rows(lambda b: b * 2, (a,), 1, None))(x)
    assert [equation.primitive.name for equation in traced.eqns] == ["mul"]
