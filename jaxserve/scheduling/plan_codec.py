"""Encode the plans of a step as bytes, for a runner in another process.

A plan is an array of MessagePack with its fields in order; columns and named tuples are arrays of their numbers. Bytes
name no class, so that decoding makes nothing but plans. Both ends are processes of one version.
"""

import collections
import dataclasses
import operator
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
_ROWS = ("slots", "starts", "lengths", "num_samples", "token_ids", "targets", "pooling")
_FIELDS = tuple(field.name for field in dataclasses.fields(StepPlan))
_FIRST_ROW, _PAST_ROWS = _FIELDS.index(_ROWS[0]), _FIELDS.index(_ROWS[-1]) + 1
_values = operator.attrgetter(*_FIELDS)
_before_rows = operator.attrgetter(*_FIELDS[:_FIRST_ROW])
_after_rows = operator.attrgetter(*_FIELDS[_PAST_ROWS:])
_NO_ROWS: Sequence[Sequence[int]] = ((),) * len(_ROWS)
_MOST_KEPT = 16  # more than the microbatches of any pipeline, whose rows alternate


def encode_plans(plans: Sequence[StepPlan], sent: "SentRows | None" = None) -> bytes:
    """Return the plans of a step, one per lane, as bytes.

    Args:
        plans: The plans.
        sent: The rows that the receiver has, which are left out; these plans' rows are added to them.
    """
    if sent is None:
        return _msgpack.packb([_values(plan) for plan in plans], default=_numbers)
    known = sent.add(plans)
    return _msgpack.packb(
        [_values_but_rows(plan) if is_known else _values(plan) for plan, is_known in zip(plans, known, strict=True)],
        default=_numbers,
    )


def decode_plans(data: bytes) -> list[StepPlan]:
    """Return plans that equal the encoded ones, but for rows that were left out.

    Raises:
        ValueError: The bytes are not those of ``encode_plans``.
    """
    try:
        return [_plan(values) for values in _msgpack.unpackb(data)]
    except (ValueError, TypeError, OverflowError, _msgpack.UnpackException) as error:
        raise ValueError(f"expected encoded step plans, got {len(data)} other bytes: {error}") from error


class SentRows:
    """The rows of the latest plans, so that a plan with the same rows as one of them travels without its own.

    Sender and receiver have one each. The sender passes it to ``encode_plans``, and the receiver gives what it has
    decoded to ``restore``, in the same order.
    """

    def __init__(self):
        self._lanes: list[collections.OrderedDict[int, StepPlan]] = []

    def add(self, plans: Sequence[StepPlan]) -> list[bool]:
        """Keep the rows of a step's plans, one per lane; return which are there already."""
        known = [plan.same_rows_as in sent for plan, sent in zip(plans, self._of(plans), strict=True)]
        self._keep(plans)
        return known

    def restore(self, plans: Sequence[StepPlan]) -> list[StepPlan]:
        """Return decoded plans with the rows that were left out, and keep their rows."""
        restored = list[StepPlan]()
        for plan, sent in zip(plans, self._of(plans), strict=True):
            known = None if plan.same_rows_as is None or plan.slots else sent.get(plan.same_rows_as)
            rows = {} if known is None else {name: getattr(known, name) for name in _ROWS}
            restored.append(dataclasses.replace(plan, **rows) if rows else plan)
        self._keep(restored)
        return restored

    def _of(self, plans: Sequence[StepPlan]) -> "list[collections.OrderedDict[int, StepPlan]]":
        if not self._lanes:
            self._lanes = [collections.OrderedDict() for _ in plans]
        return self._lanes

    def _keep(self, plans: Sequence[StepPlan]) -> None:
        for plan, sent in zip(plans, self._lanes, strict=True):
            sent[plan.rows_number] = plan
            sent.move_to_end(plan.rows_number)
            if len(sent) > _MOST_KEPT:
                sent.popitem(last=False)


def _values_but_rows(plan: StepPlan) -> Sequence[Any]:
    """Return the fields of a plan, with those of its rows empty."""
    return (*_before_rows(plan), *_NO_ROWS, *_after_rows(plan))


def _numbers(value: object) -> list[int]:
    """Return the numbers of a column, which MessagePack does not know."""
    if isinstance(value, array):
        return cast("array[int]", value).tolist()
    raise TypeError(f"a plan cannot have a {type(value).__name__}")


def _plan(values: Sequence[Any]) -> StepPlan:
    return StepPlan(**{name: _field(name, value) for name, value in zip(_FIELDS, values, strict=True)})


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
