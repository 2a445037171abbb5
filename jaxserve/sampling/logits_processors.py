"""User-defined functions that change logits: given when the engine is created, traced into every step."""

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from jaxserve.api.errors import ConfigError


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits between the logit bias and the penalties; JAX traces it once for each compiled program.

    Attributes:
        arguments: Names of the numbers it reads from a request's ``SamplingParams.extra_args``, each with its value for
            requests that do not set it, which should have no effect. A processor without arguments applies to every row
            of every step, and rules out the simpler samplers.
    """

    @property
    def arguments(self) -> Mapping[str, float]:
        """Names and defaults of the arguments; see the class."""
        ...

    def __call__(
        self, logits: Float[Array, "R V"], arguments: dict[str, Float[Array, " R"]], positions: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Return logits of the same shape, float32; a row must not depend on other rows.

        Args:
            logits: Logits; -inf for tokens that are not allowed.
            arguments: Each argument's value for every row.
            positions: Position of the next token in its context, prompt included.
        """
        ...


def argument_names(processors: Iterable[LogitsProcessor]) -> dict[str, float]:
    """Return every argument with its default, in the order of ``Sampling.arguments``.

    Raises:
        ConfigError: Two processors have an argument of the same name.
    """
    found: dict[str, float] = {}
    for processor in processors:
        for name, default in processor.arguments.items():
            if name in found:
                raise ConfigError(f"logits_processors: two processors have an argument named {name!r}; rename one")
            found[name] = float(default)
    return found


def apply_processors(
    logits: Float[Array, "R V"],
    processors: Iterable[LogitsProcessor],
    arguments: Float[Array, "R arguments"],
    positions: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """Apply the processors one after the other."""
    start = 0
    for processor in processors:
        names = [*processor.arguments]
        columns = {name: arguments[:, start + i] for i, name in enumerate(names)}
        logits = processor(logits, columns, positions)
        start += len(names)
    return logits
