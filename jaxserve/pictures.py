"""Figures of matplotlib, which is installed with ``jaxserve[research]`` only."""

import importlib
from pathlib import Path
from typing import Any

from jaxserve.api.errors import ConfigError


def new_figure(option: str, **settings: Any) -> Any:
    """Return an empty figure.

    Args:
        option: What draws it, for the message.
        settings: Settings of matplotlib's ``Figure``.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"{option} needs matplotlib; run pip install 'jaxserve[research]'") from error
    return figure.Figure(layout="constrained", **settings)


def check_format(option: str, path: str) -> None:
    """Check that matplotlib is installed and supports the format of the file that an option names, before a long run.

    Raises:
        ConfigError: It is missing, or does not support the format.
    """
    formats = sorted(new_figure(option).canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise ConfigError(f"{option}: expected a file whose name ends in one of .{', .'.join(formats)}, got {path}")
