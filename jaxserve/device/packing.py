"""How a model's parameters become the arguments of its programs.

Dispatching a step costs time for each argument (about half a microsecond). On GPUs the layers' parameters of one kind
are therefore one argument, stacked, and a program takes each out with a fixed index: XLA reads a layer's part in place
there. On CPUs it would copy each part, so every parameter is an argument of its own.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sharding import stacked

AnyArray = TypeVar("AnyArray", jax.Array, np.ndarray)
Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which parameters, by their place in the module's flat order, share an argument; one alone is itself."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Mapping[str, Struct], platform: str) -> "Packing":
        """The packing that suits a platform.

        Args:
            params: Path in the module (``layers.3.mlp.down.weight``), shape, type and sharding of each parameter.
            platform: JAX's platform name.
        """
        groups: dict[object, list[int]] = {}
        for i, (path, struct) in enumerate(params.items()):
            kind = re.sub(r"^layers\.\d+\.", "layers.*.", path) if platform != "cpu" else path
            groups.setdefault((kind, struct.shape, struct.dtype, struct.sharding), []).append(i)
        return cls(tuple(tuple(group) for group in groups.values()))

    def structs(self, params: Sequence[Struct]) -> tuple[Struct, ...]:
        """Shapes and shardings of the arguments."""
        return tuple(_stacked([params[i] for i in group]) for group in self.groups)

    def pack(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arguments, on the devices the parameters are on; parameters that were stacked are given up.

        Beside the parameters it takes the memory of the largest group for a moment.
        """
        packed = []
        for group in self.groups:
            members = [arrays[i] for i in group]
            if len(members) > 1:
                struct = _stacked([Struct(a.shape, a.dtype, sharding=a.sharding) for a in members])
                stack = jax.jit(lambda *given: jnp.stack(given), out_shardings=struct.sharding)(*members)
                stack.block_until_ready()
                for member in members:
                    member.delete()
            else:
                (stack,) = members
            packed.append(stack)
        return tuple(packed)

    def replace(self, packed: Sequence[jax.Array], arrays: Mapping[int, np.ndarray]) -> tuple[jax.Array, ...]:
        """The arguments with some parameters replaced, given by their places in the module's order."""
        found = []
        for group, old in zip(self.groups, packed, strict=True):
            given = {at: arrays[i] for at, i in enumerate(group) if i in arrays}
            if not given:
                found.append(old)
                continue
            stack = np.array(old) if len(group) > 1 else given[0]
            for at, array in given.items() if len(group) > 1 else ():
                stack[at] = array
            found.append(jax.device_put(stack, old.sharding))
        return tuple(found)

    def unpack(self, packed: Sequence[AnyArray]) -> tuple[AnyArray, ...]:
        """The parameters in the module's order, inside a program or on the host."""
        found: dict[int, Any] = {}
        for group, stack in zip(self.groups, packed, strict=True):
            for at, i in enumerate(group):
                found[i] = stack if len(group) == 1 else stack[at]
        return tuple(found[i] for i in sorted(found))


def _stacked(members: Sequence[Struct]) -> Struct:
    """The shape of a group's argument: layers first, none of them split."""
    first = members[0]
    if len(members) == 1:
        return first
    return Struct((len(members), *first.shape), first.dtype, sharding=stacked(first.sharding))
