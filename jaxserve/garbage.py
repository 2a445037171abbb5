"""Python's garbage collection in processes that serve: it need not look again and again at what lasts to the end."""

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 10_000
"""Objects that come to be, beyond those that go, until the new ones are looked at; Python's default is 700."""


def spare_lasting_objects() -> None:
    """Leave all objects there are now out of collections, and look at new ones less often.

    A full collection looks at every object while no Python thread runs: with JAX and a tokenizer these are half a
    million, and each collection stops the process for 0.1 s or more, under load every second. Call this once everything
    that lasts is there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


@contextlib.contextmanager
def lasting_objects_replaced() -> Iterator[None]:
    """Let what lasted be collected after it is replaced, in a block that does so."""
    gc.unfreeze()
    try:
        yield
    finally:
        spare_lasting_objects()
