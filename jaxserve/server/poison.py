"""Requests that may end the engine: what was running at two ends of its process is not run a third time."""

import collections
import hashlib
import json

from jaxserve.api.errors import RequestFailedError
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import RequestOutputKind

MAX_DEATHS = 2
"""Ends of the engine process at which a request may have been running."""
_MAX_KNOWN = 1024


class PoisonList:
    """Remembers what was running when the engine process ended, by caller, prompt and parameters."""

    def __init__(self) -> None:
        self._deaths: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def note_death(self, caller: str, request: Request) -> None:
        """Note that the engine process ended while a request ran."""
        key = _fingerprint(caller, request)
        self._deaths[key] = self._deaths.pop(key, 0) + 1
        if len(self._deaths) > _MAX_KNOWN:
            self._deaths.popitem(last=False)

    def check(self, caller: str, request: Request) -> None:
        """Reject a request that was running at too many ends.

        Raises:
            RequestFailedError: It was.
        """
        if self._deaths and self._deaths.get(_fingerprint(caller, request), 0) >= MAX_DEATHS:
            raise RequestFailedError(
                f"request {request.request_id} is not run: the same request was running at {MAX_DEATHS} ends of the "
                "engine process"
            )


def _fingerprint(caller: str, request: Request) -> bytes:
    """Return a digest of what a request computes, whether it is streamed or not."""
    chat = None if request.chat is None else json.dumps(request.chat, sort_keys=True, default=repr)
    params = request.params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    content = (caller, request.text, request.token_ids, chat, repr(params), repr(request.pooling))
    return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()
