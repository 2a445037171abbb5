"""Run scripts/gpu_check.py with kernels that break on purpose, for ``test_gpu_check.py``.

Interpreted paged attention hangs wherever there is a sliding window, the interpreted writer ends its process wherever
there are norms, and interpreted truncation keeps too few tokens. All arguments are those of gpu_check.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax  # noqa: E402

from pallas_kernels.paged_attention_triton import INTERPRET  # noqa: E402
from pallas_kernels.qkv_write_triton import TritonQkvWriter  # noqa: E402
from pallas_kernels.registry import OPERATIONS  # noqa: E402
from pallas_kernels.truncation_triton import TritonTruncation  # noqa: E402
from scripts import gpu_check  # noqa: E402


def sleep_on_the_device(array: jax.Array) -> jax.Array:
    """Never return, as a kernel that waits for a barrier which nobody arrives at."""

    def sleep(given: Any) -> Any:
        time.sleep(3600)
        return given

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(array.shape, array.dtype), array)


def exit_on_the_device(array: jax.Array) -> jax.Array:
    """End the process, as a driver does that has lost its device."""

    def leave(given: Any) -> Any:
        os._exit(139)

    return jax.pure_callback(leave, jax.ShapeDtypeStruct(array.shape, array.dtype), array)


def hanging_decode(query: jax.Array, *arrays: Any, window: int | None, **settings: Any) -> jax.Array:
    """Decode, unless there is a window."""
    found = INTERPRET.decode(query, *arrays, window=window, **settings)
    return found if window is None else sleep_on_the_device(found)


class CrashingWriter(TritonQkvWriter):
    """Write, unless there are norms."""

    def write(self, qkv: Any, *arrays: Any, norms: Any, **settings: Any) -> Any:
        """See above."""
        return super().write(qkv if norms is None else exit_on_the_device(qkv), *arrays, norms=norms, **settings)


class ShortTruncation(TritonTruncation):
    """Keep the best token alone."""

    def floor(self, scores: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        """See above."""
        return scores.max(1)


HANGING = dataclasses.replace(INTERPRET, decode=hanging_decode)
CRASHING = CrashingWriter(is_interpreted=True)
SHORT = ShortTruncation(is_interpreted=True)

OPERATIONS["paged_attention"]["pallas-interpret"] = "tests.faulty_gpu_check:HANGING"
OPERATIONS["qkv_write"]["pallas-interpret"] = "tests.faulty_gpu_check:CRASHING"
OPERATIONS["truncation"]["pallas-interpret"] = "tests.faulty_gpu_check:SHORT"

if __name__ == "__main__":
    sys.exit(gpu_check.main())
