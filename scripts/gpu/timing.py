"""Time functions on the device: one program that calls a function once on each of several input sets, run repeatedly.

Every set is an argument of its own, so that the compiler can neither merge two calls nor move one out, and the sets
together are larger than the L2 cache, so that each call finds its operands in memory. Nothing is subtracted.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

MEMORY_BYTES = 100 << 30
FLUSH_BYTES = 160 << 20  # of other sets between two uses of one: three times an H200's L2
MIN_SETS = 3
MAX_SETS = 24
_SLOW_S = 0.3  # a program that takes longer is run fewer times
_FEW_REPEATS = 3
WARM_UPS = 3  # the first run of a program may launch its kernels one by one, the second may build its graph
# A whole program is one CUDA graph, whose calls run one after the other.
GRAPH_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
}


class Timing(NamedTuple):
    """Seconds of a call (the median of repeats), how far the repeats lie apart as a share of it, and how many sets."""

    seconds: float
    spread: float
    num_sets: int


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A function to measure.

    Attributes:
        function: Takes a tree of arrays and gives one.
        struct: Shapes of that tree.
        num_sets: Calls in a program.
        carried: Leaves of the input that the function returns changed (by index), and where in its result; the
            program takes over their memory, and the next run of it starts from them.
    """

    function: Callable[[Any], Any]
    struct: Any
    num_sets: int
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def program(self, given: Sequence[Sequence[jax.Array]], kept: Sequence[Sequence[jax.Array]]) -> Any:
        """Call the function on each set, given its carried and other leaves; return the carried ones and the rest."""
        treedef = jax.tree.structure(self.struct)
        carried, rest = [], []
        for mine, other in zip(given, kept, strict=True):
            leaves: list[jax.Array] = list(other)
            for place, array in zip(sorted(self.carried), mine, strict=True):
                leaves.insert(place, array)
            found = jax.tree.leaves(self.function(jax.tree.unflatten(treedef, leaves)))
            carried.append([found[self.carried[place]] for place in sorted(self.carried)])
            rest.append([array for i, array in enumerate(found) if i not in self.carried.values()])
        return carried, rest

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Split a set into its carried leaves and its others."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in sorted(self.carried)], [x for i, x in enumerate(leaves) if i not in self.carried]

    def output(self, carried: Sequence[jax.Array], rest: Sequence[jax.Array]) -> Any:
        """Put the result of one set together again, as the function returns it."""
        leaves: dict[int, jax.Array] = {
            self.carried[place]: array for place, array in zip(sorted(self.carried), carried, strict=True)
        }
        struct = jax.eval_shape(self.function, self.struct)
        others = iter(rest)
        found = [leaves[i] if i in leaves else next(others) for i in range(len(jax.tree.leaves(struct)))]
        return jax.tree.unflatten(jax.tree.structure(struct), found)

    @property
    def arguments(self) -> tuple[list[Any], list[Any]]:
        """Return the shapes that ``program`` takes."""
        mine, other = self.split(self.struct)
        return [mine] * self.num_sets, [other] * self.num_sets

    def compile(self) -> jax.stages.Compiled:
        """Compile the program, in one graph where the platform has such."""
        options = GRAPH_OPTIONS if jax.default_backend() == "gpu" else None
        return jax.jit(self.program, donate_argnums=0).lower(*self.arguments).compile(compiler_options=options)

    def measure(
        self,
        compiled: jax.stages.Compiled,
        make: Callable[[int], Any],
        check: Callable[[Any], None] | None = None,
        repeats: int = 7,
        least_s: float = 0.02,
    ) -> Timing:
        """Time the program on the sets that ``make`` gives for 0, 1, ...

        Args:
            compiled: From ``compile``.
            make: Makes a set on the device.
            check: Takes the result of set 0 after the warm-up and raises if it is wrong: then nothing is timed.
            repeats: Times measured.
            least_s: What each of them takes at least, by running the program several times.
        """
        sets = [self.split(make(i)) for i in range(self.num_sets)]
        given, kept = [mine for mine, _ in sets], [other for _, other in sets]
        rest: Any = None
        del sets

        def run(count: int) -> float:
            nonlocal given, rest
            start = time.perf_counter()
            for _ in range(count):
                given, rest = compiled(given, kept)
            jax.block_until_ready((given, rest))
            return (time.perf_counter() - start) / count

        once = [run(1) for _ in range(WARM_UPS)][-1]
        if check is not None:
            check(self.output(given[0], rest[0]))
        is_slow = once > _SLOW_S
        count = 1 if is_slow else min(200, max(1, math.ceil(least_s / run(3))))
        times = [run(count) / self.num_sets for _ in range(_FEW_REPEATS if is_slow else repeats)]
        median = statistics.median(times)
        return Timing(median, (max(times) - min(times)) / median, self.num_sets)


def choose_sets(touched_bytes: int, held_bytes: int, memory_bytes: int = MEMORY_BYTES) -> int | None:
    """Choose how many sets of inputs to take turns with; None where the fewest do not fit.

    Args:
        touched_bytes: What a call moves.
        held_bytes: What a set takes in memory, its results included.
        memory_bytes: Memory for all of them.
    """
    wanted = math.ceil(FLUSH_BYTES / max(1, touched_bytes)) + 1
    sets = min(max(wanted, MIN_SETS), MAX_SETS, memory_bytes // max(1, held_bytes))
    return None if sets < MIN_SETS else sets


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def matching_leaves(inputs: Any, outputs: Any) -> dict[int, int]:
    """Find input leaves that an operation returns changed: each result belongs to the first free input of its shape."""
    found: dict[int, int] = {}
    leaves = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(inputs)]
    for place, leaf in enumerate(jax.tree.leaves(outputs)):
        free = [i for i, kind in enumerate(leaves) if kind == (leaf.shape, leaf.dtype) and i not in found]
        if free:
            found[free[0]] = place
    return found
