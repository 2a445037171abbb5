"""What the scheduler tells the runner: plain integers, serialisable, the runner's only input from the host.

A request holds a slot on the device while it runs: its pages, its sampling numbers and its latest token live there. A
plan names slots; it carries the facts of a slot once, when they change.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxserve.sampling_options import Effect, OptionValues, has_effect
from jaxserve.scheduling.page_allocator import KVWindow


class Sampling(NamedTuple):
    """The numbers the sampler needs of a request.

    Attributes:
        options: Its ``SAMPLING_OPTIONS``.
        seed: 32-bit seed; with a token's position it decides the token's random numbers.
        num_logprobs: Alternatives reported with each token; -1 reports nothing.
        banned_ids: Tokens not allowed before ``banned_until``.
        banned_until: Position of the first token that may be one of ``banned_ids``.
        bad_ids: Tokens never allowed.
        allowed_ids: The only tokens allowed; None allows all.
        logit_bias: Tokens and what is added to their scores.
        tracked_ids: Tokens whose logprobs are reported at every position.
        arguments: Numbers for the engine's logits processors, in their order.
    """

    options: OptionValues = OptionValues()
    seed: int = 0
    num_logprobs: int = -1
    banned_ids: tuple[int, ...] = ()
    banned_until: int = 0
    bad_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    tracked_ids: tuple[int, ...] = ()
    arguments: tuple[float, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the scores of the next."""
        return has_effect(self.options, Effect.PENALTY)

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is chosen from other scores than the model's own, masks and processors aside."""
        return bool(self.logit_bias) or has_effect(self.options, Effect.LOGITS, Effect.PENALTY)


class SchedulerLimits(NamedTuple):
    """The largest step that the scheduler may plan.

    Attributes:
        max_num_seqs: Most rows.
        max_num_batched_tokens: Most query tokens, at least one for each row.
        long_prefill_token_threshold: Most query tokens of one prompt, so that other prompts run beside it; 0: no limit.
        max_draft_tokens: Most drafts of one row.
        windows: For each page table, what its layers see; None for all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    max_draft_tokens: int = 0
    windows: tuple[KVWindow | None, ...] = (None,)


class SlotSetup(NamedTuple):
    """A request moves into a slot.

    Attributes:
        slot: The slot.
        sampling: The request's numbers.
        final_length: The most tokens it can have at the end.
        token_ids: Where ``sampling.has_penalties``, every token the host knows; else empty.
        num_prompt_tokens: How many of ``token_ids`` are the prompt's.
    """

    slot: int
    sampling: Sampling
    final_length: int
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0


class PageCopy(NamedTuple):
    """The content of page ``source``, as earlier steps left it, goes to page ``target`` before the step runs."""

    source: int
    target: int


class SlotMask(NamedTuple):
    """Tokens that a slot may sample in this step, as bits: little-endian int32 words, token t in word t // 32."""

    slot: int
    words: bytes


class PageGrant(NamedTuple):
    """Pages of one of a slot's page tables from index ``first`` on."""

    slot: int
    first: int
    pages: list[int]
    table: int = 0


class ChunkPooling(NamedTuple):
    """What a chunk adds to the sum of its slot's hidden states.

    Attributes:
        num_tokens: Number of its last tokens that are added.
        is_first: The sum begins with them.
        is_last: It ends with them, and the host gets it.
    """

    num_tokens: int
    is_first: bool
    is_last: bool


ON_DEVICE = -1
"""Left to the device: as a row's first token, the latest token of its slot; as its start, that token's position."""


class Row(NamedTuple):
    """Consecutive tokens of one slot: a chunk of its prompt or, to decode, its latest token and drafts after it.

    A row with drafts samples after its latest token and after each draft. Of these tokens the slot gets the first, and
    each further one as long as all drafts before it are what was sampled; the rest of the row has no effect.

    Attributes:
        slot: The request's slot.
        start: Position of the first token, or ``ON_DEVICE``.
        token_ids: The tokens; the first may be ``ON_DEVICE``.
        num_samples: Number of the row's last tokens after each of which a token is sampled; 0 within a prompt.
        targets: Where logprobs of the prompt are asked for, the token after each token of the row (-1: none).
        pooling: Where hidden states are pooled, what the row adds to their sum.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_samples: int
    targets: list[int] | None = None
    pooling: ChunkPooling | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RowColumns:
    """The rows of a plan, transposed: see ``Row``. ``lengths`` has the number of tokens of each row."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_samples: tuple[int, ...]
    token_ids: tuple[list[int], ...]
    targets: tuple[list[int] | None, ...]
    pooling: tuple[ChunkPooling | None, ...]

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether a row samples several tokens."""
        return max(self.num_samples, default=0) > 1


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        number: Counts the steps from 0.
        setups: Slots that change hands before the step.
        grants: Pages that slots get before the step.
        rows: What each slot computes, at most one row for a slot. Rows of one token are cheapest at the front.
        copies: Pages copied before the step.
        masks: Tokens allowed to slots whose requests constrain them.
    """

    number: int
    setups: list[SlotSetup]
    grants: list[PageGrant]
    rows: list[Row]
    copies: Sequence[PageCopy] = ()
    masks: Sequence[SlotMask] = ()

    @functools.cached_property
    def columns(self) -> RowColumns:
        """The rows, transposed."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(Row._fields)
        slots, starts, token_ids, num_samples, targets, pooling = columns
        return RowColumns(slots, starts, tuple(map(len, token_ids)), num_samples, token_ids, targets, pooling)

    def share_columns(self, other: "StepPlan") -> None:
        """Take over the columns of a plan with the same rows: plans have the same while all sequences decode."""
        self.__dict__["columns"] = other.columns

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.rows)

    @functools.cached_property
    def first_samples(self) -> Sequence[int]:
        """Index of each row's first sample among those of the step; a row without any takes the place of one."""
        if not self.columns.has_drafts:
            return range(self.num_rows)
        counts = (max(count, 1) for count in self.columns.num_samples)
        return [*itertools.accumulate(counts, initial=0)][:-1]

    @functools.cached_property
    def num_tokens(self) -> int:
        """The number of query tokens."""
        return sum(self.columns.lengths)

    @property
    def is_decode_only(self) -> bool:
        """Whether every row has one token, and nothing but a sampled token comes of it."""
        columns = self.columns
        return self.num_tokens == self.num_rows and not any(columns.targets) and not any(columns.pooling)


class RowArrays(NamedTuple):
    """See ``Row``; ``lengths`` has the number of tokens of each row, ``num_drafts`` that of its drafts."""

    slots: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    lengths: Int[np.ndarray, " R"]
    num_samples: Int[np.ndarray, " R"]
    num_drafts: Int[np.ndarray, " R"]


@functools.lru_cache(maxsize=8)
def row_arrays(columns: RowColumns) -> RowArrays:
    """The rows' numbers, int32; made once for all plans that share their columns."""
    numbers = (columns.slots, columns.starts, columns.lengths, columns.num_samples)
    slots, starts, lengths, num_samples = (np.array(each, np.int32) for each in numbers)
    return RowArrays(slots, starts, lengths, num_samples, np.maximum(num_samples - 1, 0))


class RowStarts:
    """Follows the positions of slots from plan to plan, since a row may leave its start to the device.

    Args:
        num_slots: Sequences that can run at once.
    """

    def __init__(self, num_slots: int):
        self._next = np.zeros(num_slots, np.int32)

    def of(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the least position of the first token of each row."""
        rows = row_arrays(plan.columns)
        return np.where(rows.starts == ON_DEVICE, self._next[rows.slots], rows.starts)

    def advance(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the same, and note where the next rows start; called once for each plan, in order."""
        starts = self.of(plan)
        rows = row_arrays(plan.columns)
        self._next[rows.slots] = starts + rows.lengths - rows.num_drafts
        return starts
