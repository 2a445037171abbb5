"""One sequence: a prompt, its output so far, and its state in the scheduler.

Admission makes it complete; from then on the scheduler alone changes it, with the help of ``ContextPages``,
``ContextCache`` and the drafts. ``tests/test_style.py`` looks for other modules that do.
"""

import dataclasses
from typing import Protocol, runtime_checkable

from jaxserve.outputs import FinishReason
from jaxserve.pooling_params import Pooling
from jaxserve.scheduling.plan import Sampling
from jaxserve.structured_params import RepetitionDetectionParams


@runtime_checkable
class Constraint(Protocol):
    """One text's rule, and how far the text has got in it.

    A sequence with a constraint samples only when all its tokens are known to the host: it sits out every other step
    while steps overlap.
    """

    def mask(self) -> bytes | None:
        """Tokens allowed next, as bits (see ``SlotMask``); None allows all."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the next token; returns whether the text is complete with it and ends."""
        ...


@dataclasses.dataclass(slots=True)
class HeldPages:
    """Pages of a context, in one of the model's page tables.

    Attributes:
        pages: In the order of the context; freed ones are replaced by the first that is not freed.
        num_released: Number of first pages freed by a sliding window.
        num_granted: The first pages, which plans have told the device of.
    """

    pages: list[int]
    num_released: int = 0
    num_granted: int = 0

    @property
    def held(self) -> list[int]:
        """The pages that are not freed."""
        return self.pages[self.num_released :]


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """State of a request, or of one of its ``n`` samples.

    Attributes:
        sequence_id: Unique name.
        token_ids: The prompt and every output token the host knows.
        num_prompt_tokens: Tokens of the prompt.
        max_length: Tokens, prompt included, at which it ends.
        sampling: What the sampler needs.
        stop_ids: Tokens that end it.
        min_length: Tokens, prompt included, below which nothing but ``max_length`` ends it.
        wants_prompt_logprobs: Whether logprobs of the prompt are asked for.
        priority: Lower runs sooner, where the scheduler goes by it.
        arrival: Counts sequences as they are added to the scheduler; set by it.
        cache_root: What a cached page's key begins with; pages are shared between sequences of the same root.
        reads_cache: Whether it may start from pages that others computed.
        constraint: What its next token must keep to, given the tokens before.
        repetition: When a repeating text ends.
        pooling: What of its prompt's hidden states is summed up, in place of a text; None for a text.
        followers: Further samples of the same prompt; the scheduler adds them once this one's prompt is computed.
        num_cached_tokens: Tokens of its context found in the prefix cache when it was first admitted; -1 before.
        slot: Place on the device; -1 while it waits.
        tables: Pages of its context, one entry for each page table of the model; none while it waits.
        num_pages: Pages of its context that it has in all tables.
        num_computed: Tokens whose keys and values are in pages, those of launched steps included, as if no draft were
            wrong.
        num_pending: Tokens sampled by launched steps that the host does not know yet, counted in the same way; a vector
            counts as one.
        decodes_until: Position that its pages and its length let it decode up to; 0 while its prompt is computed.
        next_check: Length from which on a new token may be of consequence even where it is no stop token.
        page_keys: Keys of its context's first full pages in the prefix cache, as far as needed, after the root's.
        num_registered_pages: Full pages that the prefix cache was told of.
        finish_reason: ``stop``, ``length`` or ``abort`` once it has ended.
        stop_reason: Stop string or stop token id that ended it, if one did and it is not an end-of-sequence token.
        num_preemptions: How often it lost its pages.
        error: Why its constraint failed, if it did; the sequence then ends.
    """

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    sampling: Sampling = Sampling()
    stop_ids: dict[int, int | None] = dataclasses.field(default_factory=dict[int, int | None])
    min_length: int = 0
    wants_prompt_logprobs: bool = False
    priority: int = 0
    arrival: int = 0
    cache_root: bytes = b""
    reads_cache: bool = True
    constraint: Constraint | None = None
    repetition: RepetitionDetectionParams | None = None
    pooling: Pooling | None = None
    followers: list["Sequence"] = dataclasses.field(default_factory=list["Sequence"])
    num_cached_tokens: int = -1
    slot: int = -1
    tables: list[HeldPages] = dataclasses.field(default_factory=list[HeldPages])
    num_pages: int = 0
    num_computed: int = 0
    num_pending: int = 0
    decodes_until: int = 0
    next_check: int = 0
    page_keys: list[bytes] = dataclasses.field(default_factory=list[bytes])
    num_registered_pages: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    def release_followers(self) -> list["Sequence"]:
        """Followers that need not wait for this sequence any more, once it has a token or has ended.

        Where it ended without a token, its prompt may not be computed: then the first of them leads the others.
        """
        followers = [follower for follower in self.followers if follower.finish_reason is None]
        self.followers = []
        if followers and self.num_output_tokens == 0:
            followers[0].followers = followers[1:]
            del followers[1:]
        return followers
