"""Pallas Mosaic GPU: access to it, and the conditions under which the kernels can run."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_scores import LOG2_E

_JAX = (0, 11)  # 0.12 cannot lower how decode stores the parts of split contexts
_HOPPER = ("H100", "H200", "H800", "GH200")
_DTYPES = ("bfloat16", "float16")
_MOST_SHARED = 64 * 128  # query heads that share a key/value head, times their width: what registers hold
_MOST_GROUP = 64  # of those heads
_HEAD_DIMS = (64, 128, 256)
_PAGE_SIZES = (16, 32, 64, 128)
_REGISTERS = 65536  # of a multiprocessor
_THREADS = 128  # of a warpgroup


class Scoring(NamedTuple):
    """Scale, window and soft cap of attention scores, in units of log 2, so that weights are powers of 2."""

    scale: float
    window: int | None
    soft_cap: float | None

    def __call__(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return scores; the cap's tanh is written with a power of 2, whose fast form is exact enough."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        power = jnp.exp2(products * (2 * LOG2_E * self.scale / self.soft_cap))
        return (self.soft_cap * LOG2_E) * (1 - 2 / (1 + power))


def mosaic_gpu() -> ModuleType:
    """Return Pallas's Mosaic GPU module, imported at first use: older JAX releases lack it or parts of it."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def interpreter(*, detect_races: bool = False) -> Any:
    """Return the parameters that run a kernel on a CPU, step by step. An exception inside leaves JAX in an
    inconsistent state; see the tests."""
    return mosaic_gpu().InterpretGPUParams(detect_races=detect_races)


def registers_of(*warpgroups: int) -> tuple[int, ...]:
    """Return the registers per thread that the warpgroups of a program ask for, once it is clear that they get them.

    A program starts with an equal share of a multiprocessor's registers for each of its warpgroups. One that asks for
    more than the others have given up waits for ever.

    Raises:
        ValueError: They ask for more than there are.
    """
    share = _REGISTERS // (_THREADS * len(warpgroups)) // 8 * 8
    if sum(warpgroups) > share * len(warpgroups):
        raise ValueError(
            f"{len(warpgroups)} warpgroups start with {share} registers per thread, {share * len(warpgroups)} in all; "
            f"they ask for {' + '.join(map(str, warpgroups))} = {sum(warpgroups)}"
        )
    return warpgroups


def missing_jax() -> str | None:
    """Return why the installed JAX cannot build these kernels, or None."""
    version = ".".join(map(str, jax.__version_info__))
    return None if jax.__version_info__[:2] == _JAX else f"needs JAX 0.11, has {version}"


def not_hopper(platform: str, device_kind: str) -> str | None:
    """Return why the kernels cannot run on a device, or None."""
    is_hopper = platform in ("gpu", "cuda") and any(name in device_kind for name in _HOPPER)
    return None if is_hopper else f"needs an NVIDIA Hopper GPU ({', '.join(_HOPPER)})"


def cannot_interpret(platform: str) -> str | None:
    """Return why the interpreted kernels cannot run on a platform, or None."""
    return missing_jax() if platform == "cpu" else "the interpreter of Mosaic GPU kernels runs on CPUs"


def unsupported_pages(dtype: str, sizes: Mapping[str, int]) -> str | None:
    """Return why the kernels cannot read such pages, or None; missing sizes are assumed to be supported."""
    if dtype not in _DTYPES:
        return f"keys and values must be {' or '.join(_DTYPES)}, not {dtype}"
    return _not_one_of("page_size", _PAGE_SIZES, sizes)


def unsupported_operands(dtype: str, sizes: Mapping[str, int]) -> str | None:
    """Return why the kernels of ``paged_attention`` cannot take such operands, or None; see ``unsupported_pages``."""
    reason = unsupported_pages(dtype, sizes) or _not_one_of("head_dim", _HEAD_DIMS, sizes)
    if reason is not None:
        return reason
    group = sizes.get("num_heads", 1) // sizes.get("num_kv_heads", 1)
    most = min(_MOST_GROUP, _MOST_SHARED // sizes.get("head_dim", 64))
    return None if group <= most else f"{group} query heads share a key/value head, at most {most} can"


def _not_one_of(name: str, allowed: tuple[int, ...], sizes: Mapping[str, int]) -> str | None:
    """Return why a size is not supported, or None."""
    if sizes.get(name, allowed[0]) in allowed:
        return None
    return f"{name} must be one of {', '.join(map(str, allowed))}, not {sizes[name]}"
