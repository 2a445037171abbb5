"""What a part of the check is: items that run one after the other, each giving figures, in processes of their own."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from scripts.gpu.figures import Figure


class Item(NamedTuple):
    """A piece of work: its name, the seconds it probably takes, and those after which it is taken to hang."""

    name: str
    estimate_s: float = 10.0
    timeout_s: float = 120.0


class SkippedError(Exception):
    """An item cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What items know of the run.

    Attributes:
        is_quick: Fewer shapes.
        is_tiny: Sizes for a CPU, to try the check itself.
        seed: Of the inputs that are fresh in every run.
        copy_bytes_s: Copy bandwidth measured in this run; None where it was not.
        flops_s: Matrix rate measured in this run; None where it was not.
        work: Directory for checkpoints and caches.
        spawned: When the process was started (Unix seconds).
        ends: When the run ends (Unix seconds); None for never.
    """

    is_quick: bool = False
    is_tiny: bool = False
    seed: int = 0
    copy_bytes_s: float | None = None
    flops_s: float | None = None
    work: str = "."
    spawned: float = 0.0
    ends: float | None = None

    def least_s(self, num_bytes: float, flops: float = 0.0) -> float | None:
        """The time that the measured ceilings allow; None where there are none."""
        if self.copy_bytes_s is None or self.flops_s is None:
            return None
        return max(num_bytes / self.copy_bytes_s, flops / self.flops_s)

    def left_s(self) -> float:
        """Seconds to the end of the run."""
        return float("inf") if self.ends is None else self.ends - time.time()

    @property
    def folder(self) -> Path:
        """The directory for checkpoints and caches."""
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


# Memory is taken as it is needed, and given up with the process.
AS_NEEDED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.95"}


class Part(Protocol):
    """A module of this folder that has these functions.

    Attributes:
        IS_ALONE: Whether each item needs a process of its own.
        ENVIRONMENT: Variables of that process.
    """

    IS_ALONE: bool
    ENVIRONMENT: dict[str, str]

    def items(self, context: Context) -> list[Item]:
        """What there is to do, the most important first."""
        ...

    def run(self, item: str, context: Context) -> Iterator[Figure]:
        """Does it."""
        ...

    def programs(self, context: Context) -> Iterator[Program]:
        """What all items would compile."""
        ...


def environment(base: Mapping[str, str], part: Part, context: Context) -> dict[str, str]:
    """Environment variables of the processes that items run in."""
    # A platform that is named must be there: JAX would go on without a GPU otherwise, and its figures be a CPU's.
    platforms = {"JAX_PLATFORMS": "cpu" if context.is_tiny else "cuda,cpu"}
    return {
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_DEFAULT_FP_FUSION": "1",
        **{name: value for name, value in base.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"},  # not both
        **platforms,
        **part.ENVIRONMENT,
    }
