"""Rows go to the devices of their experts and come back: exact for every routing, however skewed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve.layers.expert_dispatch import LocalExperts, exchange_capacity, exchange_rows, gather_rows
from sharding import MeshShape, make_mesh
from sharding.collectives import axis_index

NUM_EXPERTS, WIDTH, ROWS = 8, 6, 40
WEIGHTS = np.random.default_rng(0).normal(size=(NUM_EXPERTS, WIDTH, WIDTH)).astype(np.float32)
Routes = tuple[np.ndarray, np.ndarray]
"""Weights and indices of each row's experts."""


def local_experts(num_local: int, notes: list[int]) -> LocalExperts:
    """Each expert is a matrix; notes the numbers of rows that it is traced for."""

    def local(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        notes.append(len(x))
        own = experts - axis_index("expert") * num_local
        is_own = (own >= 0) & (own < num_local)
        matrices = jnp.asarray(WEIGHTS)[jnp.clip(experts, 0, NUM_EXPERTS - 1)]
        products = jnp.einsum("td,tkdf->tkf", x, matrices, precision="highest")
        return jnp.where(is_own[..., None], weights[..., None] * products, 0).sum(1)

    return local


@functools.cache
def program(form: str, num_devices: int) -> tuple[Any, list[int]]:
    """The dispatch on devices along ``expert``, and the numbers of rows that their experts are traced for."""
    num_local, notes = NUM_EXPERTS // num_devices, list[int]()

    def body(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        local = local_experts(num_local, notes)
        if form == "gather":
            return gather_rows(local, x, weights, experts, "expert")
        return exchange_rows(local, x, weights, experts, "expert", num_local=num_local, same_axes=("expert",))

    mesh = make_mesh(MeshShape(expert=num_devices))
    call = jax.shard_map(body, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"), check_vma=False)
    return jax.jit(call), notes


def dispatched(form: str, num_devices: int, x: np.ndarray, routes: Routes) -> np.ndarray:
    """All devices' rows after the experts."""
    return np.asarray(program(form, num_devices)[0](x, *routes))


def expected(x: np.ndarray, routes: Routes) -> np.ndarray:
    """In float64; experts out of range add nothing."""
    y = np.zeros((len(x), WIDTH))
    for row, (weights, experts) in enumerate(zip(*routes, strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            if expert < NUM_EXPERTS:
                y[row] += weight.astype(float) * (x[row].astype(float) @ WEIGHTS[expert])
    return y


def random_routes(num_rows: int, per_token: int, experts: list[int], seed: int = 1) -> Routes:
    """Different experts for each row, of those given."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.choice(experts, per_token, replace=False) for _ in range(num_rows)])
    return rng.uniform(0.1, 1.0, chosen.shape).astype(np.float32), chosen.astype(np.int32)


def evenly(num_devices: int) -> Routes:
    """Row t of each device goes to expert t modulo their number."""
    return random_routes(num_devices * ROWS, 1, [0])[0], (
        np.arange(num_devices * ROWS, dtype=np.int32)[:, None] % NUM_EXPERTS
    )


ROUTES: dict[str, Callable[[int], Routes]] = {
    "even": evenly,
    "one_each": lambda n: random_routes(n * ROWS, 1, [*range(NUM_EXPERTS)]),
    "two_each": lambda n: random_routes(n * ROWS, 2, [*range(NUM_EXPERTS)]),
    "most": lambda n: random_routes(n * ROWS, 7, [*range(NUM_EXPERTS)]),
    "all_to_the_first_device": lambda n: random_routes(n * ROWS, 1, [0]),
    "all_to_the_last_device": lambda n: random_routes(n * ROWS, 1, [NUM_EXPERTS - 1]),
    "two_devices": lambda n: random_routes(n * ROWS, 2, [1, 6]),
}


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("form", ["gather", "all_to_all"])
def test_every_routing_is_exact(form: str, num_devices: int) -> None:
    x = np.random.default_rng(2).normal(size=(num_devices * ROWS, WIDTH)).astype(np.float32)
    for name, routes in ROUTES.items():
        found = dispatched(form, num_devices, x, routes(num_devices))
        np.testing.assert_allclose(found, expected(x, routes(num_devices)), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("form", ["gather", "all_to_all"])
def test_rows_that_are_not_in_use_change_no_other(form: str) -> None:
    """Devices have different numbers of rows in use, one of them none; other rows are NaN and have no experts."""
    x = np.random.default_rng(3).normal(size=(4 * ROWS, WIDTH)).astype(np.float32)
    weights, experts = random_routes(4 * ROWS, 2, [*range(NUM_EXPERTS)])
    used = np.concatenate([np.arange(ROWS) < count for count in (ROWS, 3, 0, 17)])
    experts[~used], x[~used] = NUM_EXPERTS, np.nan
    found = dispatched(form, 4, x, (weights, experts))
    np.testing.assert_allclose(found[used], expected(x, (weights, experts))[used], rtol=1e-5, atol=1e-5)


def test_an_exchange_of_few_rows_is_enough_for_an_even_routing() -> None:
    """With as many rows as the capacity to one device the small form runs, with one more the large one; both are exact.

    What each device's experts compute tells which form ran: the number of rows that they were given is added to it.
    """
    num_devices, capacity = 4, exchange_capacity(ROWS, 1, 4)
    assert capacity == 16 < ROWS

    def count_rows(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        return jnp.full(x.shape, float(len(x)))

    def body(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        return exchange_rows(count_rows, x, weights, experts, "expert", num_local=2, same_axes=("expert",))

    mesh = make_mesh(MeshShape(expert=num_devices))
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"), check_vma=False))
    x = np.ones((num_devices * ROWS, WIDTH), np.float32)
    weights, experts = evenly(num_devices)
    for num_busy, num_rows in (
        (10, 4 * capacity),
        (capacity, 4 * capacity),
        (capacity + 1, 4 * ROWS),
        (ROWS, 4 * ROWS),
    ):
        experts[ROWS : ROWS + num_busy] = 5  # of the third device; only the second device's rows change
        experts[ROWS + num_busy : 2 * ROWS] = (np.arange(ROWS - num_busy) % 3 * 3)[:, None]
        assert (np.asarray(call(x, weights, experts)) == num_rows).all(), num_busy


@pytest.mark.parametrize(
    ("num_rows", "per_token", "num_devices", "capacity"),
    [(1, 2, 8, 1), (8, 1, 8, 8), (16, 1, 8, 8), (64, 2, 2, 64), (64, 2, 4, 48), (1024, 8, 32, 384), (16, 3, 8, 16)],
)
def test_capacities(num_rows: int, per_token: int, num_devices: int, capacity: int) -> None:
    assert exchange_capacity(num_rows, per_token, num_devices) == capacity


def test_only_the_small_and_the_large_form_are_compiled() -> None:
    for num_devices, sizes in ((4, {4 * 16, 4 * ROWS}), (2, {2 * ROWS})):
        program.cache_clear()
        call, notes = program("all_to_all", num_devices)
        call.trace(
            np.ones((num_devices * ROWS, WIDTH), np.float32),
            *random_routes(num_devices * ROWS, 1 if num_devices == 4 else 2, [0, 7]),
        )
        assert {*notes} == sizes


def test_parts_are_added_in_the_order_of_devices() -> None:
    """A row's bits do not depend on the device that it is on."""
    one, routes = np.random.default_rng(4).normal(size=(1, WIDTH)).astype(np.float32), random_routes(1, 7, [*range(8)])
    x = np.tile(one, (4 * ROWS, 1))
    weights, experts = (np.tile(values, (4 * ROWS, 1)) for values in routes)
    found = dispatched("all_to_all", 4, x, (weights, experts))
    assert (found.view(np.int32) == found[:1].view(np.int32)).all()
