"""How long to wait before an engine process that has ended is started again."""

import asyncio
from typing import final

_STEADY_S = 600.0  # an engine that ran this long is restarted without a pause
_PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)


@final
class Pauses:
    """Pauses that get longer while an engine process ends soon each time."""

    longest_s = _PAUSES_S[-1]

    def __init__(self) -> None:
        self._num_restarts = 0
        self._began_s = 0.0

    def began(self) -> None:
        """Note that the engine is ready."""
        self._began_s = asyncio.get_running_loop().time()

    def next_s(self) -> float:
        """Return the seconds to wait now that it has ended."""
        if asyncio.get_running_loop().time() - self._began_s > _STEADY_S:
            self._num_restarts = 0
        self._num_restarts += 1
        return _PAUSES_S[min(self._num_restarts, len(_PAUSES_S)) - 1]
