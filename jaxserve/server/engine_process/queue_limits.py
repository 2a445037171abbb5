"""How much may wait for the engine: the one place that refuses what is too much."""

import dataclasses
import threading

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import OverloadedError, RequestError


@dataclasses.dataclass(eq=False)
class Place:
    """A request's place among those that run, wait or are being prepared.

    Attributes:
        num_seqs: Its sequences.
        waits: Whether there was no room for it in the steps when it came.
        num_tokens: Tokens of its prompt; 0 until they are known.
        request: The request, once it is prepared.
        has_left: Whether it was given back.
    """

    num_seqs: int
    waits: bool
    num_tokens: int = 0
    request: RequestState | None = None
    has_left: bool = False


class QueueLimits:
    """Counts sequences and prompt tokens that wait, those being prepared included. Any thread may use it.

    Args:
        num_places: Sequences that the steps have room for; others wait.
        max_num_queued_reqs: Most sequences that wait.
        max_num_queued_tokens: Most prompt tokens of requests that wait; the samples of a request share its prompt.
    """

    def __init__(self, num_places: int, max_num_queued_reqs: int, max_num_queued_tokens: int):
        self._num_places = num_places
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._num_seqs = 0
        self._num_tokens = 0
        self._waiting: dict[Place, None] = {}
        self._lock = threading.Lock()

    def enter(self, num_seqs: int) -> Place:
        """Takes a request's place.

        Raises:
            RequestError: More sequences than ever run and wait together.
            OverloadedError: Too many wait.
        """
        limit = self._num_places + self._max_num_queued_reqs
        if num_seqs > limit:
            raise RequestError(f"n must be at most {limit} here, got {num_seqs}", parameter="n", value=num_seqs)
        with self._lock:
            if self._num_seqs + num_seqs > limit:
                num_waiting = max(self._num_seqs - self._num_places, 0)
                raise OverloadedError(
                    f"{num_waiting} sequences wait and at most {self._max_num_queued_reqs} may (max_num_queued_reqs); "
                    f"{num_seqs} more were asked for"
                )
            self._num_seqs += num_seqs
            return Place(num_seqs, waits=self._num_seqs > self._num_places)

    def note_prompt(self, place: Place, request: RequestState) -> None:
        """Counts a prepared request's prompt, if it has to wait.

        Raises:
            OverloadedError: Too many tokens wait.
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
                    f"{self._num_tokens} prompt tokens wait and at most {self._max_num_queued_tokens} may "
                    f"(max_num_queued_tokens); {num_tokens} more were asked for"
                )
            place.num_tokens, place.request = num_tokens, request
            self._num_tokens += num_tokens
            self._waiting[place] = None

    def leave(self, place: Place) -> None:
        """Gives back a place; once for each."""
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
