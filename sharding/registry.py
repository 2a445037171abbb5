"""The table of layouts: name -> module with a ``LAYOUT``."""

import importlib

from sharding.layout import LayoutError, ShardingLayout

LAYOUTS = {
    "replicated": "sharding.layouts.replicated",
    "tensor_parallel": "sharding.layouts.tensor_parallel",
}


def get_layout(name: str) -> ShardingLayout:
    """Return the layout of that name.

    Raises:
        LayoutError: No layout has it; the message lists those that exist.
    """
    if name not in LAYOUTS:
        raise LayoutError(f"unknown layout {name!r}; layouts: {', '.join(LAYOUTS)}")
    return importlib.import_module(LAYOUTS[name]).LAYOUT
