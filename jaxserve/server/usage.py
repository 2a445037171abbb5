"""What each caller has used: tokens and requests for metrics, and the tokens of the last minute for its limit."""

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxserve.api.errors import OverloadedError
from jaxserve.server.auth import Caller

_WINDOW_S = 60


@dataclasses.dataclass
class Usage:
    """What a caller has used since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class KeyUsage:
    """Counts the tokens of callers.

    Args:
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_name = collections.defaultdict[str, Usage](Usage)
        self._forgotten = Usage()
        self._recent = collections.defaultdict[str, collections.Counter[int]](collections.Counter)

    @property
    def by_name(self) -> Mapping[str, Usage]:
        """The usage of each caller with a request."""
        return self._by_name

    @property
    def total(self) -> Usage:
        """The usage of all callers, those with revoked keys among them."""
        return _sum([self._forgotten, *self._by_name.values()])

    def check_rate(self, caller: Caller) -> None:
        """Reject a request whose caller has used its tokens of the last minute.

        Prompts count once they run, and generated tokens when they are sent: running requests go on.

        Raises:
            OverloadedError: It has.
        """
        limit, recent = caller.tokens_per_minute, self._recent.get(caller.name)
        if limit is None or recent is None:
            return
        now = int(self._clock())
        for second in [second for second in recent if second <= now - _WINDOW_S]:
            del recent[second]
        surplus = recent.total() - limit
        if surplus < 0:
            return
        for second in sorted(recent):
            surplus -= recent[second]
            if surplus < 0:
                message = f"this API key may use {limit} tokens per minute"
                raise OverloadedError(message, retry_after_s=float(second + _WINDOW_S - now))

    def add_request(self, name: str) -> None:
        """Count a request."""
        self._by_name[name].requests += 1

    def add_tokens(self, name: str, num_prompt: int, num_generated: int) -> None:
        """Count tokens."""
        usage = self._by_name[name]
        usage.prompt_tokens += num_prompt
        usage.generation_tokens += num_generated
        recent, now = self._recent[name], int(self._clock())
        recent[now] += num_prompt + num_generated
        if len(recent) > 2 * _WINDOW_S:
            for second in [second for second in recent if second <= now - _WINDOW_S]:
                del recent[second]

    def forget(self, names: Collection[str]) -> None:
        """Drop what callers have used whose keys were revoked, so that changes of keys add no metrics for ever."""
        for name in names:
            self._forgotten = _sum([self._forgotten, self._by_name.pop(name, Usage())])
            self._recent.pop(name, None)


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.requests for usage in usages),
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.generation_tokens for usage in usages),
    )
