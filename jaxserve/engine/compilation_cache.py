"""Compiled programs kept on disk, so that the next start only loads them."""

import os

import jax

from jaxserve.layers.cpu import cpu_key


def use_compilation_cache(directory: str | None) -> None:
    """Turns JAX's persistent cache on for this process, unless its user has set it up already.

    Args:
        directory: Where to keep programs; None for the user's cache folder, empty for nowhere.
    """
    if directory == "" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if directory is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        directory = os.path.join(home, "jaxserve", "xla")
    jax.config.update("jax_compilation_cache_dir", os.path.join(directory, cpu_key()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
