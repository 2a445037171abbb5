"""Shapes and shardings of the arrays that devices keep between steps, and programs over them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.device.structs import shardings
from jaxserve.layers.kv_layout import StateSpec
from jaxserve.layers.parallel import Parallel


def state_structs(
    specs: Iterable[StateSpec], num_pages: int, parallel: Parallel, sharding: Callable[..., NamedSharding]
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """Return shapes and shardings of the state pages of each recurrent layer; others have no entry.

    Args:
        specs: State of each layer.
        num_pages: State pages of all lanes.
        parallel: How the model is split.
        sharding: Returns a sharding from the logical axes of an array.
    """
    found = list[tuple[jax.ShapeDtypeStruct, ...]]()
    for spec in filter(None, specs):
        structs = list[jax.ShapeDtypeStruct]()
        for array in spec:
            shape, axes = [num_pages, *array.shape], ["batch", *[None] * len(array.shape)]
            if array.split is not None:
                axes[array.split + 1] = "q_heads"
                shape[array.split + 1] *= parallel.num_head_parts
            structs.append(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(array.dtype), sharding=sharding(*axes)))
        found.append(tuple(structs))
    return tuple(found)


def compile_zeros(structs: Any) -> jax.stages.Compiled:
    """Compile a program that allocates zeros for a tree of shapes and shardings."""

    def zeros() -> Any:
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)

    return jax.jit(zeros, out_shardings=shardings(structs)).lower().compile()


def trace_sharded(
    mesh: Mesh, function: Callable[..., Any], arguments: Sequence[Any], out_shardings: Any, donated: Sequence[int]
) -> jax.stages.Traced:
    """Trace a function under ``shard_map``, so that it runs on each device's shards.

    Args:
        mesh: The devices.
        function: Per-device function.
        arguments: Shapes and shardings of its arguments.
        out_shardings: Shardings of its results, as a tree prefix.
        donated: Indices of donated arguments.
    """
    in_specs, out_specs = (
        jax.tree.map(lambda sharding: sharding.spec, tree) for tree in (shardings(tuple(arguments)), out_shardings)
    )
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(sharded, donate_argnums=donated).trace(*arguments)
