"""Counting collectives where they were written: in loops, branches, nested jits and tuples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding import MeshShape, get_layout, make_mesh
from sharding.collectives import all_gather, all_reduce, axis_index, axis_size
from sharding.plan import Collective, bytes_per_device, collectives, count_collectives


def traced(body: Callable[[jax.Array], jax.Array], *, data: int = 1, tensor: int = 2) -> jax.stages.Traced:
    """The trace of a body whose [4, 8] float32 argument is split over ``tensor``."""
    mesh = make_mesh(MeshShape(data=data, tensor=tensor))
    spec = P(None, "tensor")
    wrapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(wrapped).trace(jax.ShapeDtypeStruct((4, 8), jnp.float32))


def psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "tensor")


def in_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (psum(psum(carry)), None), x, length=5)[0]


def in_nested_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (in_scan(carry), None), x, length=3)[0]


def in_static_loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 7, lambda _, carry: psum(carry), x)


def in_while(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda carry: psum(carry).sum() < 9, psum, x)


def in_branches(x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, psum, lambda x: psum(x) + lax.pmax(x, "tensor"), x)


def in_jit(x: jax.Array) -> jax.Array:
    return jax.jit(lambda x: jax.checkpoint(psum)(x))(x)


@pytest.mark.parametrize(
    ("body", "count"),
    [(jnp.sin, 0), (psum, 1), (in_scan, 10), (in_nested_scan, 30), (in_static_loop, 7), (in_while, 2), (in_branches, 3)]
    + [(in_jit, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_loops_and_branches(body: Callable[[jax.Array], jax.Array], count: int) -> None:
    """A scan counts for each of its rounds, a while body and every branch once."""
    assert count_collectives(traced(body)).get("all-reduce", 0) == count


def every_kind(x: jax.Array) -> jax.Array:
    gathered = lax.all_gather(x, "tensor", axis=1, tiled=True)
    scattered = lax.psum_scatter(gathered, "tensor", scatter_dimension=1, tiled=True)
    moved = lax.ppermute(scattered, "tensor", [(0, 1), (1, 0)])
    swapped = lax.all_to_all(moved, "tensor", 0, 1, tiled=True)
    return x + lax.pmax(swapped.sum(), "tensor") + lax.pmin(x, "tensor")


def test_every_kind_is_known() -> None:
    expected = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "collective-permute": 1, "all-to-all": 1}
    assert count_collectives(traced(every_kind)) == expected


def test_axes_and_bytes() -> None:
    """Each part of a tuple is one collective; a gather's bytes are those of the whole."""

    def body(x: jax.Array) -> jax.Array:
        first, second = lax.psum((x, x.astype(jnp.bfloat16)), ("data", "tensor"))
        return first + second + lax.all_gather(x, "tensor", axis=0).sum(0)

    assert list(collectives(traced(body, data=2, tensor=4).jaxpr.jaxpr)) == [
        Collective("all-reduce", ("data", "tensor"), 4 * 2 * 4, 1),
        Collective("all-reduce", ("data", "tensor"), 4 * 2 * 2, 1),
        Collective("all-gather", ("tensor",), 4 * 8 * 4, 1),
    ]


def test_collectives_without_an_axis_do_nothing() -> None:
    def body(x: jax.Array) -> jax.Array:
        return all_reduce(x, None) + all_gather(x, None, 0) + axis_index(None) + axis_size(None)

    assert count_collectives(traced(body)) == {}
    x = jnp.arange(6.0).reshape(2, 3)
    assert all_reduce(x, None) is x and all_gather(x, None, 1) is x
    assert (axis_index(None), axis_size(None)) == (0, 1)


def test_collectives_over_an_axis() -> None:
    """Device d of n holds columns d; gathered in device order."""

    def body(x: jax.Array) -> jax.Array:
        whole = all_gather(x, "tensor", 1)
        mine = lax.dynamic_slice_in_dim(whole, axis_index("tensor") * x.shape[1], x.shape[1], 1)
        return mine - x + all_reduce(jnp.ones_like(x), "tensor") - axis_size("tensor")

    mesh = make_mesh(MeshShape(tensor=4))
    spec = P(None, "tensor")
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    assert (call(jnp.arange(32.0).reshape(4, 8)) == 0).all()


def test_bytes_per_device() -> None:
    mesh = make_mesh(MeshShape(data=2, tensor=4))
    layout = get_layout("tensor_parallel")
    assert bytes_per_device((16, 6), 2, layout.sharding(mesh, "vocab", "embed")) == 4 * 6 * 2
    assert bytes_per_device((16, 6), 4, layout.sharding(mesh)) == 16 * 6 * 4
    assert bytes_per_device((), 4, layout.sharding(mesh)) == 4
