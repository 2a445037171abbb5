"""The table of sharding layouts: name -> module with a ``LAYOUT``."""

import importlib

from sharding.layout import LayoutError, ShardingLayout

LAYOUTS = {
    "expert_all_reduce": "sharding.layouts.expert_all_reduce",
    "expert_all_to_all": "sharding.layouts.expert_all_to_all",
    "expert_gather": "sharding.layouts.expert_gather",
    "expert_parallel": "sharding.layouts.expert_parallel",
    "replicated": "sharding.layouts.replicated",
    "tensor_parallel": "sharding.layouts.tensor_parallel",
}


def get_layout(name: str) -> ShardingLayout:
    """Return the layout with this name.

    Raises:
        LayoutError: Unknown name; the message lists the layouts.
    """
    if name not in LAYOUTS:
        raise LayoutError(f"unknown layout {name!r}; supported layouts: {', '.join(LAYOUTS)}")
    return importlib.import_module(LAYOUTS[name]).LAYOUT
