"""Numbers about a running engine, under vLLM's names with the prefix ``jaxserve:``."""

from typing import Literal, NamedTuple

import jax


class Metric(NamedTuple):
    """One number: a counter only grows while the engine lives, a gauge is the state of this moment."""

    kind: Literal["counter", "gauge"]
    name: str
    value: float
    labels: dict[str, str]


class CompileCounter:
    """Counts programs that XLA compiles while an engine steps; there should be none."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        self._is_watching = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> "CompileCounter":
        self._is_watching = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_watching = False

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        self.count += self._is_watching and event == self._EVENT
