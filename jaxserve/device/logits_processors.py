"""Find the logits processors that an engine's settings name."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names


def load_processors(given: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
    """Resolve logits processors given as objects, as classes without arguments, or as ``module:name``.

    Raises:
        ConfigError: A name cannot be imported, or an object is not a ``LogitsProcessor``.
    """
    processors = []
    for item in given:
        processor = _import(item) if isinstance(item, str) else item
        if isinstance(processor, type):
            processor = processor()
        if not isinstance(processor, LogitsProcessor) or not isinstance(processor.arguments, Mapping):
            raise ConfigError(
                f"logits_processors: expected a LogitsProcessor (callable, with a mapping `arguments`), got {item!r}"
            )
        processors.append(processor)
    argument_names(processors)
    return tuple(processors)


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors: cannot import {name!r} (expected 'module:name'): {error}") from error
