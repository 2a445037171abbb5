"""What a part of the check is: items that run one after the other, each giving figures, in processes of their own."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scripts.gpu.figures import Figure

HANG_S = 45.0
"""Seconds without a figure or a word after which a process is taken to hang."""

AUTOTUNE_OFF: dict[str, str | bool] = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
"""Compiler options of programs whose speed does not matter: references, inputs, comparisons.

XLA has no untuned form of some products in Triton, so these are left to cuBLAS.
"""


class Item(NamedTuple):
    """A piece of work: its name, and the seconds it probably takes."""

    name: str
    estimate_s: float = 10.0


class Working(NamedTuple):
    """Tell the watchdog what an item does next, and after how many seconds without a word that is a hang."""

    what: str
    limit_s: float = HANG_S


class SkippedError(Exception):
    """An item cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What items know of the run.

    Attributes:
        is_quick: Measure fewer shapes.
        is_tiny: Take sizes for a CPU, to try the check itself.
        seed: Seed of the inputs that are fresh in every run.
        copy_bytes_s: Copy bandwidth measured in this run; None where it was not.
        flops_s: Matrix rate measured in this run; None where it was not.
        work: Directory for checkpoints and caches.
        spawned: When the process was started (Unix seconds).
        ends: When the run ends (Unix seconds); None for never.
        broken: Implementations, as ``operation/row``, that hung or ended their process, and how: never run again.
        wrong: Implementations that gave a wrong result, and which: checked further, but not timed.
    """

    is_quick: bool = False
    is_tiny: bool = False
    seed: int = 0
    copy_bytes_s: float | None = None
    flops_s: float | None = None
    work: str = "."
    spawned: float = 0.0
    ends: float | None = None
    broken: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wrong: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def least_s(self, num_bytes: float, flops: float = 0.0) -> float | None:
        """Return the time that the measured ceilings allow, or None before they are measured."""
        if self.copy_bytes_s is None or self.flops_s is None:
            return None
        return max(num_bytes / self.copy_bytes_s, flops / self.flops_s)

    def left_s(self) -> float:
        """Return the seconds to the end of the run."""
        return float("inf") if self.ends is None else self.ends - time.time()

    def refuse_broken(self, implementation: str) -> None:
        """Skip an implementation that cost a process before.

        Raises:
            SkippedError: It did.
        """
        if implementation in self.broken:
            raise SkippedError(f"not run again: {self.broken[implementation]}")

    def refuse_untimed(self, implementation: str) -> None:
        """Skip timing an implementation that failed numerics.

        Raises:
            SkippedError: It did.
        """
        self.refuse_broken(implementation)
        if implementation in self.wrong:
            raise SkippedError(f"not timed: {self.wrong[implementation]}")

    @property
    def folder(self) -> Path:
        """Return the directory for checkpoints and caches."""
        return Path(self.work)


class Program(NamedTuple):
    """Something that an item would compile.

    Attributes:
        name: What it is.
        function: Takes arrays.
        structs: Shapes of its arguments.
        donated: Arguments it takes over.
        needs_wheels: It can be lowered only where JAX's CUDA wheels are.
        options: Compiler options.
    """

    name: str
    function: Callable[..., Any]
    structs: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    needs_wheels: bool = False
    options: Mapping[str, Any] | None = None


# Memory is allocated as it is needed, and returned with the process.
AS_NEEDED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.95"}


class Part(Protocol):
    """A module of this folder that has these functions.

    Attributes:
        IS_ALONE: Whether each item needs a process of its own.
        ENVIRONMENT: Variables of that process; an empty one is unset.
    """

    IS_ALONE: bool
    ENVIRONMENT: dict[str, str]

    def items(self, context: Context) -> list[Item]:
        """List the items of the part, the most important first."""
        ...

    def run(self, item: str, context: Context) -> Iterator[Figure | Working]:
        """Do it."""
        ...

    def programs(self, context: Context) -> Iterator[Program]:
        """List what all items would compile."""
        ...


def environment(base: Mapping[str, str], part: Part, context: Context) -> dict[str, str]:
    """Return the environment variables of the processes that items run in."""
    # A platform that is named must be there: JAX would go on without a GPU otherwise, and its figures be a CPU's.
    platforms = {"JAX_PLATFORMS": "cpu" if context.is_tiny else "cuda,cpu"}
    own = dict(part.ENVIRONMENT)
    flags = " ".join(text for text in (base.get("XLA_FLAGS", ""), own.pop("XLA_FLAGS", "")) if text)
    found = {
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_DEFAULT_FP_FUSION": "1",
        # A run that goes on from another finds what that one compiled.
        "JAX_COMPILATION_CACHE_DIR": str(context.folder / "cache-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **{name: value for name, value in base.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"},  # not both
        **platforms,
        **own,
        "XLA_FLAGS": flags,
    }
    return {name: value for name, value in found.items() if value}
