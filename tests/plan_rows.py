"""Rows of plans for tests."""

from collections.abc import Iterable

from jaxserve.scheduling.plan import ON_DEVICE, Row


def decode_rows(slots: Iterable[int], starts: Iterable[int], tokens: Iterable[int] | None = None) -> list[Row]:
    """Rows of one token each, left to the device where ``tokens`` are not given."""
    slots = list(slots)
    known = [ON_DEVICE] * len(slots) if tokens is None else tokens
    return [Row(slot, start, [token], 1) for slot, start, token in zip(slots, starts, known, strict=True)]
