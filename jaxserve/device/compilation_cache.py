"""Keep compiled programs on disk, so that the next start only loads them."""

import os
import re

import jax

from jaxserve.layers.cpu import cpu_key
from sharding.mesh import Device


def use_compilation_cache(directory: str | None, device: Device) -> None:
    """Enable JAX's persistent compilation cache for this process, unless it is already configured.

    On GPUs the cache includes XLA's autotuning results. It can be copied to another machine with the same device and
    versions.

    Args:
        directory: Cache directory; None for the user's cache directory, empty for no cache.
        device: Target device; each kind has its own subdirectory.
    """
    if directory == "" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if directory is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        directory = os.path.join(home, "jaxserve", "xla")
    kind = cpu_key() if device.platform == "cpu" else re.sub(r"\W+", "-", device.device_kind)
    jax.config.update("jax_compilation_cache_dir", os.path.join(directory, kind))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
