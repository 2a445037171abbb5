"""What the files of EAGLE and EAGLE-3 heads have in common: checks that they are such heads."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.api.errors import ConfigError


def check_architecture(raw: Mapping[str, Any], path: Path, accepted: Sequence[str]) -> None:
    """Raise ConfigError unless a config.json names an architecture that is accepted."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not any(name in accepted for name in names):
        raise ConfigError(f"{path}: architectures: expected one of {', '.join(accepted)}, got {names!r}")


def check_projection(tensors: Container[str], directory: Path, kind: str) -> None:
    """Raise ConfigError unless a checkpoint has the projection that heads have and whole models lack."""
    if "fc.weight" not in tensors:
        raise ConfigError(
            f"speculative_config.model: {directory} is not an {kind} head, as it has no tensor fc.weight; "
            "for a whole model use the method draft_model"
        )
