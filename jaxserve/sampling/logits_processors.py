"""Functions of the user's own that change logits: given when the engine is made, traced into every step."""

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits between the logit bias and the penalties; JAX traces it, once for each compiled program.

    Attributes:
        arguments: Names of the numbers it reads from a request's ``SamplingParams.extra_args``, and for each the value
            of requests that do not give it, which should change nothing. Without any it applies to every row of every
            step, and no step takes the simpler samplers.
    """

    @property
    def arguments(self) -> Mapping[str, float]:
        """See above."""
        ...

    def __call__(
        self, logits: Float[Array, "R V"], arguments: dict[str, Float[Array, " R"]], positions: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Logits of the same shape, float32; a row may depend on nothing of other rows.

        Args:
            logits: Scores; -inf for tokens that are not allowed.
            arguments: Each argument's value in every row.
            positions: Position of the token to come in its context, the prompt included.
        """
        ...


def argument_names(processors: Iterable[LogitsProcessor]) -> dict[str, float]:
    """Return every argument and the value of requests that do not give it, in the order of ``Sampling.arguments``.

    Raises:
        ConfigError: Two processors read an argument of the same name.
    """
    found: dict[str, float] = {}
    for processor in processors:
        for name, neutral in processor.arguments.items():
            if name in found:
                raise ConfigError(f"logits_processors: two processors read the argument {name!r}; expected one of them")
            found[name] = float(neutral)
    return found


def apply_processors(
    logits: Float[Array, "R V"],
    processors: Iterable[LogitsProcessor],
    arguments: Float[Array, "R arguments"],
    positions: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """Logits as the processors, one after the other, leave them."""
    start = 0
    for processor in processors:
        names = [*processor.arguments]
        columns = {name: arguments[:, start + i] for i, name in enumerate(names)}
        logits = processor(logits, columns, positions)
        start += len(names)
    return logits
