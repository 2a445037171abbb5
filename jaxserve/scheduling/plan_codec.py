"""Encode the plans of a step as bytes, for a runner in another process.

A plan is an array of MessagePack with its fields in order; columns and named tuples are arrays of their numbers. Bytes
name no class, so that decoding makes nothing but plans. Both ends are processes of one version.
"""

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from jaxserve.api.sampling_options import OptionValues
from jaxserve.scheduling.plan import (
    ChunkPooling,
    ChunkTargets,
    PageCopy,
    PageGrant,
    Sampling,
    SlotMask,
    SlotSetup,
    StateSnapshot,
    StepPlan,
)

_msgpack: Any = msgpack  # has no types


def encode_plans(plans: Sequence[StepPlan]) -> bytes:
    """Return the plans of a step, one per lane, as bytes."""
    fields = [[getattr(plan, field.name) for field in dataclasses.fields(StepPlan)] for plan in plans]
    return _msgpack.Packer(default=_numbers).pack(fields)


def decode_plans(data: bytes) -> list[StepPlan]:
    """Return plans that equal the encoded ones.

    Raises:
        ValueError: The bytes are not those of ``encode_plans``.
    """
    try:
        return [_plan(values) for values in _msgpack.unpackb(data)]
    except (ValueError, TypeError, OverflowError, _msgpack.UnpackException) as error:
        raise ValueError(f"expected encoded step plans, got {len(data)} other bytes: {error}") from error


def _numbers(value: object) -> list[int]:
    """Return the numbers of a column, which MessagePack does not know."""
    if isinstance(value, array):
        return cast("array[int]", value).tolist()
    raise TypeError(f"a plan cannot have a {type(value).__name__}")


def _plan(values: Sequence[Any]) -> StepPlan:
    names = [field.name for field in dataclasses.fields(StepPlan)]
    return StepPlan(**{name: _field(name, value) for name, value in zip(names, values, strict=True)})


def _field(name: str, value: Any) -> Any:
    """Return a field: named tuples, a column, or a plain number."""
    if name in _TUPLES:
        return [_TUPLES[name](*fields) for fields in value]
    return value if value is None or isinstance(value, int) else array("i", value)


def _setup(slot: int, sampling: Sequence[Any], final_length: int, token_ids: Sequence[int], *others: int) -> SlotSetup:
    options, *fields = sampling
    made = Sampling(OptionValues(*options), *map(_as_tuple, fields))
    return SlotSetup(slot, made, final_length, tuple(token_ids), *others)


def _as_tuple(value: Any) -> Any:
    """Return lists, also nested ones, as tuples."""
    return tuple(map(_as_tuple, cast("list[Any]", value))) if isinstance(value, list) else value


_TUPLES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "setups": _setup,
        "grants": PageGrant,
        "copies": PageCopy,
        "state_copies": PageCopy,
        "snapshots": StateSnapshot,
        "masks": SlotMask,
        "targets": ChunkTargets,
        "pooling": ChunkPooling,
    }
)
"""How the items of each field that is no column are made."""
