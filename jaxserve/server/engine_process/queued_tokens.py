"""The limit on prompt tokens that wait for the engine.

Only the engine process can count them, because only it tokenizes; the front end counts sequences (``request_limits``).
"""

import dataclasses
import threading

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import OverloadedError


@dataclasses.dataclass(eq=False)
class Place:
    """A request among those that run, wait or are being prepared.

    Attributes:
        num_seqs: Its sequences.
        waits: Whether the steps had no room for it when it arrived.
        num_tokens: Tokens of its prompt; 0 until they are known.
        request: The request, once it is prepared.
        has_left: Whether it has ended.
    """

    num_seqs: int
    waits: bool
    num_tokens: int = 0
    request: RequestState | None = None
    has_left: bool = False


class QueuedTokens:
    """Counts the prompt tokens of waiting requests, and rejects requests above the limit. Any thread may use it.

    Args:
        max_num_seqs: Sequences that the steps have room for; the requests of others wait.
        max_num_queued_tokens: Most prompt tokens of waiting requests; the samples of a request share its prompt.
    """

    def __init__(self, max_num_seqs: int, max_num_queued_tokens: int):
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._num_seqs = 0
        self._num_tokens = 0
        self._waiting: dict[Place, None] = {}
        self._lock = threading.Lock()

    def enter(self, num_seqs: int) -> Place:
        """Count a new request's sequences."""
        with self._lock:
            self._num_seqs += num_seqs
            return Place(num_seqs, waits=self._num_seqs > self._max_num_seqs)

    def note_prompt(self, place: Place, request: RequestState) -> None:
        """Count a prepared request's prompt, if the request has to wait.

        Raises:
            OverloadedError: Too many prompt tokens wait.
        """
        if not place.waits:
            return
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            if place.has_left:  # cancelled meanwhile
                return
            if self._num_tokens + num_tokens > self._max_num_queued_tokens:
                self._forget_started()
            if self._num_tokens + num_tokens > self._max_num_queued_tokens:
                raise OverloadedError(
                    f"queue full: {self._num_tokens} prompt tokens waiting, limit {self._max_num_queued_tokens} "
                    f"(max_num_queued_tokens), and this prompt has {num_tokens}; retry later"
                )
            place.num_tokens, place.request = num_tokens, request
            self._num_tokens += num_tokens
            self._waiting[place] = None

    def leave(self, place: Place) -> None:
        """Stop counting a request. Call it once for each."""
        with self._lock:
            place.has_left = True
            self._num_seqs -= place.num_seqs
            self._forget(place)

    def _forget_started(self) -> None:
        for place in list(self._waiting):
            if place.request is not None and place.request.scheduled_s is not None:
                self._forget(place)

    def _forget(self, place: Place) -> None:
        if place in self._waiting:
            del self._waiting[place]
            self._num_tokens -= place.num_tokens
            place.request = None
