"""The table of sharding layouts: name -> module with a ``LAYOUT``. A layout may also come from a user's own file."""

import importlib
import runpy
from pathlib import Path

from sharding.layout import LayoutError, ShardingLayout

LAYOUTS = {
    "context_parallel": "sharding.layouts.context_parallel",
    "expert_all_reduce": "sharding.layouts.expert_all_reduce",
    "expert_all_to_all": "sharding.layouts.expert_all_to_all",
    "expert_gather": "sharding.layouts.expert_gather",
    "expert_parallel": "sharding.layouts.expert_parallel",
    "replicated": "sharding.layouts.replicated",
    "replicated_attention": "sharding.layouts.replicated_attention",
    "sequence_parallel": "sharding.layouts.sequence_parallel",
    "split_logits": "sharding.layouts.split_logits",
    "tensor_parallel": "sharding.layouts.tensor_parallel",
}


def get_layout(name: str) -> ShardingLayout:
    """Return the layout with this name, or for ``path.py:NAME`` the one that a local Python file defines as ``NAME``.

    The file is run as Python code.

    Raises:
        LayoutError: Unknown name (the message lists the layouts), or the file does not define a layout of that name.
    """
    if name in LAYOUTS:
        return importlib.import_module(LAYOUTS[name]).LAYOUT
    path, _, attribute = name.rpartition(":")
    if path:
        return _from_file(Path(path), attribute)
    raise LayoutError(
        f"unknown layout {name!r}; supported layouts: {', '.join(LAYOUTS)}, or path.py:NAME for one in a local file"
    )


def _from_file(path: Path, attribute: str) -> ShardingLayout:
    """Return the layout that a Python file defines under a name."""
    if path.suffix != ".py" or not path.is_file():
        raise LayoutError(f"layout: expected an existing local Python file in path.py:NAME, got {str(path)!r}")
    try:
        defined = runpy.run_path(str(path))
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(f"layout: {path} cannot be run: {type(error).__name__}: {error}") from error
    layout = defined.get(attribute)
    if not isinstance(layout, ShardingLayout):
        layouts = [name for name, value in defined.items() if isinstance(value, ShardingLayout)]
        raise LayoutError(
            f"layout: expected {attribute!r} in {path} to be a ShardingLayout, got {type(layout).__name__}; "
            f"it defines {', '.join(layouts) or 'none'}"
        )
    return layout
