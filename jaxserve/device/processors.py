"""The engine's own changes to logits, from what its user names them by."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.sampling.logits_processors import LogitsProcessor, argument_names


def load_processors(given: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
    """Logits processors, given as themselves, as classes without arguments, or by ``module:name``.

    Raises:
        ConfigError: Nothing by that name, or something that is no processor; the message says which.
    """
    found = []
    for item in given:
        processor = _imported(item) if isinstance(item, str) else item
        if isinstance(processor, type):
            processor = processor()
        if not isinstance(processor, LogitsProcessor) or not isinstance(processor.arguments, Mapping):
            raise ConfigError(
                f"logits_processors: expected functions of logits with a mapping `arguments` (LogitsProcessor), "
                f"got {item!r}"
            )
        found.append(processor)
    argument_names(found)
    return tuple(found)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"logits_processors: {name!r} is no 'module:name' that can be imported: {error}") from error
