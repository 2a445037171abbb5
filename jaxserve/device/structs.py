"""Shapes and shardings of arrays in trees."""

from typing import Any

import jax

from sharding.plan import bytes_per_device


def shardings(structs: Any) -> Any:
    """Return the sharding of each array of a tree."""
    return jax.tree.map(lambda struct: struct.sharding, structs)


def structs_bytes(structs: Any) -> int:
    """Return the bytes per device of the arrays of a tree."""
    leaves = jax.tree.leaves(structs)
    return sum(bytes_per_device(leaf.shape, leaf.dtype.itemsize, leaf.sharding) for leaf in leaves)
