"""A sequence: a prompt, its output so far, and its scheduling state.

After admission only the scheduler and its helpers in this package modify a sequence; ``tests/test_style.py`` checks it.
"""

import dataclasses
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from jaxserve.api.outputs import FinishReason
from jaxserve.api.request import Request
from jaxserve.scheduling.plan import Sampling
from jaxserve.scheduling.repetition import RepetitionSearch


@runtime_checkable
class Constraint(Protocol):
    """State of structured output for one sequence.

    A constrained sequence samples only when the host knows all its tokens: it skips every other step under async
    scheduling. The masks after its drafts are made by accepting them, and taking that back with ``restore``.
    """

    def mask(self) -> bytes | None:
        """Return the bit mask of the tokens allowed next (see ``SlotMask``); None allows all."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether the mask has a token, which is the first of ``forced`` if that returns any."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by the next token; return whether it completes the output."""
        ...

    def forced(self) -> list[int]:
        """Return the next tokens if the constraint leaves little choice, as drafts; empty if it leaves more."""
        ...

    def save(self) -> Any:
        """Return the current state for ``restore``; cheap."""
        ...

    def restore(self, state: Any) -> None:
        """Return to a state that was saved since the last call, also after ``accept`` or ``mask`` has failed."""
        ...


@runtime_checkable
class BatchedConstraint(Constraint, Protocol):
    """A `Constraint` that makes the masks of many rows at once."""

    @classmethod
    def masks_after(cls, rows: Items[tuple[Self, list[int]]]) -> list[list[bytes] | None]:
        """Return the masks after each of a row's tokens, which are allowed and do not complete the output.

        Constraints return to their state. A row has None if its constraint has failed, or makes its masks one by one.

        Args:
            rows: Constraints, and at least one token each.
        """
        ...


@runtime_checkable
class StopStrings(Protocol):
    """Text of a sequence that has stop strings."""

    def push_tokens(self, token_ids: list[int], /) -> tuple[str, int] | None:
        """Detokenize the next tokens.

        Returns:
            The stop string that they complete, and the number of output tokens up to the one that completed it; None
            if they complete none.
        """
        ...


def in_mask(mask: bytes | None, token: int) -> bool:
    """Return whether a bit mask has a token; None has all."""
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)


@dataclasses.dataclass(slots=True)
class HeldPages:
    """Pages of a sequence in one of the model's page tables.

    Attributes:
        pages: Pages in order of position; freed ones are replaced by the first that is still held.
        num_released: Number of leading pages freed by a sliding window.
        num_granted: Number of leading pages that the device knows from earlier plans.
    """

    pages: list[int]
    num_released: int = 0
    num_granted: int = 0

    @property
    def held(self) -> list[int]:
        """Pages that are not freed."""
        return self.pages[self.num_released :]


class WantedState(NamedTuple):
    """A state to keep of a sequence.

    Attributes:
        length: Tokens after which it is.
        is_spare: Whether there is no better reason than its distance from others.
        num_new_tokens: Tokens since the state before it; of one that is not spare, since the last that is not.
    """

    length: int
    is_spare: bool
    num_new_tokens: int


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """State of a request, or of one of its ``n`` samples.

    Attributes:
        request: The request.
        token_ids: The prompt and the output tokens known to the host.
        num_prompt_tokens: Length of the prompt.
        max_length: Length, prompt included, at which the sequence finishes.
        shares_prompt: Whether ``token_ids`` are the request's own list, until the sequence first runs: the samples that
            wait have one prompt between them.
        index: Index among the samples of the request.
        sampling: Sampling parameters.
        stop_ids: Stop tokens, each with the stop reason to report.
        arrival: Order of arrival; set by the scheduler.
        cache_root: Start of the prefix cache keys; sequences with the same root share pages.
        reads_cache: Whether cached pages of other sequences may be used.
        constraint: Structured output, if requested.
        stop_strings: Text so far, if the request has stop strings; other text is made when it is read.
        num_generation_tokens: Last tokens of the prompt that begin the answer, which the next turn of a conversation
            may not repeat; -1 if they are not known.
        followers: Further samples of the same prompt; the scheduler enqueues them once this one's prompt is computed.
        num_cached_tokens: Prompt tokens found in the prefix cache when first admitted; -1 before.
        num_shared_tokens: Prompt tokens whose keys and values the prefix cache had then.
        miss_reason: Why not all of them but the last were found then, one of ``MISS_REASONS``; None if they were.
        slot: Slot on the device; -1 while waiting.
        tables: Pages in each page table of the model; empty while waiting.
        num_pages: Number of pages available in all tables.
        state_page: Page of its running state; -1 while waiting, and for a model without recurrent layers.
        draft_page: Page that keeps its state without drafts; -1 while waiting, and for engines without either.
        draft_length: Length of the context of the state there; 0 if there is none.
        restart: Length from which its next row starts, with the state of ``draft_page``, since drafts were rejected; -1
            if its running state has all computed tokens.
        state_source: State page of the checkpoint that it goes on from; -1 for none.
        wanted_states: States that are still to be kept of it, in order.
        last_state: Length of the latest checkpoint of its context that is not spare.
        num_computed: Tokens whose keys and values are in pages, including steps in flight, if all drafts are accepted.
        num_pending: Tokens sampled by steps in flight, if all drafts are accepted; a pooled vector counts as one.
        drafted: Number of draft tokens of each step that verified some.
        accepted: Number of accepted ones of these steps.
        num_draft_tokens: Sum of ``drafted``.
        num_accepted_tokens: Sum of ``accepted``.
        num_next_drafts: Number of drafts that the device makes for its next row.
        last_plan: Number of the latest plan with a row of the sequence; used with several pipeline stages.
        decode_limit: Position up to which the pages and ``max_length`` allow decoding; 0 while the prompt is computed.
        next_check: Length from which a token must be checked for an ending even if it is not a stop token.
        page_keys: Prefix cache keys: the root, then the first full pages as far as computed.
        num_registered_pages: Number of full pages registered in the prefix cache.
        finish_reason: Why the sequence finished; None before.
        stop_reason: The stop string or stop token that finished the sequence; None for an end-of-sequence token.
        num_preemptions: Number of times the sequence was preempted.
        error: The exception that fails the sequence: of its constraint, its stop strings, or of building its row.
        scheduled_s: Time of the plan that first admitted it, in seconds of ``time.monotonic()``; 0 before.
        first_token_s: Time of its first token, in seconds of ``time.monotonic()``; 0 before.
        last_token_s: Time of its latest token, in seconds of ``time.monotonic()``; 0 before the first.
        repetition: Searches its output for repetitions, if the request asks for that.
    """

    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    shares_prompt: bool = False
    index: int = 0
    sampling: Sampling = Sampling()
    stop_ids: dict[int, int | None] = dataclasses.field(default_factory=dict[int, int | None])
    arrival: int = 0
    cache_root: bytes = b""
    reads_cache: bool = True
    constraint: Constraint | None = None
    stop_strings: StopStrings | None = None
    num_generation_tokens: int = -1
    followers: list["Sequence"] = dataclasses.field(default_factory=list["Sequence"])
    num_cached_tokens: int = -1
    num_shared_tokens: int = 0
    miss_reason: str | None = None
    slot: int = -1
    tables: list[HeldPages] = dataclasses.field(default_factory=list[HeldPages])
    num_pages: int = 0
    state_page: int = -1
    draft_page: int = -1
    draft_length: int = 0
    restart: int = -1
    state_source: int = -1
    wanted_states: list[WantedState] = dataclasses.field(default_factory=list[WantedState])
    last_state: int = 0
    num_computed: int = 0
    num_pending: int = 0
    drafted: bytearray = dataclasses.field(default_factory=bytearray)
    accepted: bytearray = dataclasses.field(default_factory=bytearray)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_next_drafts: int = 0
    last_plan: int = -1
    decode_limit: int = 0
    next_check: int = 0
    page_keys: list[bytes] = dataclasses.field(default_factory=list[bytes])
    num_registered_pages: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    error: Exception | None = None
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    repetition: RepetitionSearch | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens known to the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def min_length(self) -> int:
        """Length, prompt included, below which only ``max_length`` finishes the sequence."""
        return self.num_prompt_tokens + self.request.params.min_tokens

    @property
    def waits_for_host(self) -> bool:
        """Whether it cannot decode before the host knows the tokens in flight: its masks depend on them.

        Those of a constraint depend on the tokens; that of ``min_tokens`` on their number, which drafts in flight leave
        open. After the minimum, it no longer matters.
        """
        if self.constraint is not None:
            return self.num_pending > 0
        is_open = self.num_pending > 1 and len(self.token_ids) + 1 < self.sampling.banned_until
        return is_open and bool(self.sampling.banned_ids)

    def own_tokens(self) -> None:
        """Copy the prompt unless that has been done, before tokens are appended to it."""
        if self.shares_prompt:
            self.token_ids, self.shares_prompt = self.token_ids.copy(), False

    def release_followers(self) -> list["Sequence"]:
        """Remove and return the followers that can start, once this sequence has a token or has finished.

        If it finished without a token, its prompt may not be computed: then only the first follower starts, and the
        others follow that one.
        """
        followers = [follower for follower in self.followers if follower.finish_reason is None]
        self.followers = []
        if followers and self.num_output_tokens == 0:
            followers[0].followers = followers[1:]
            del followers[1:]
        return followers
