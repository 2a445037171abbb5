"""Step plans: the runner's only input from the scheduler, made of plain serializable values.

A running sequence holds a slot on the device, which stores its page tables, sampling parameters and latest token. A
plan refers to slots, and carries only what changed about them since the previous plan.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.sampling_options import Effect, OptionValues, has_effect
from jaxserve.scheduling.page_allocator import KVWindow


class Sampling(NamedTuple):
    """Sampling parameters of a request, in the form the sampler needs.

    Attributes:
        options: Values of ``SAMPLING_OPTIONS``.
        seed: 32-bit seed; together with a token's position it determines the random numbers.
        num_logprobs: Number of alternatives to report per token; -1 for no logprobs.
        banned_ids: Tokens not allowed before position ``banned_until``.
        banned_until: First position at which ``banned_ids`` are allowed.
        bad_ids: Tokens never allowed.
        allowed_ids: The only tokens allowed; None allows all.
        logit_bias: Pairs of a token and the bias added to its logit.
        tracked_ids: Tokens whose logprobs are reported at every position.
        arguments: Arguments of the engine's logits processors, in order.
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
        """Whether the logits depend on the tokens so far."""
        return has_effect(self.options, Effect.PENALTY)

    @property
    def changes_logits(self) -> bool:
        """Whether an option changes the model's logits, masks and logits processors aside."""
        return bool(self.logit_bias) or has_effect(self.options, Effect.LOGITS, Effect.PENALTY)


class SchedulerLimits(NamedTuple):
    """Limits of a step.

    Attributes:
        max_num_seqs: Most running sequences; with one stage, most rows per step.
        max_num_batched_tokens: Most query tokens per step, at least ``max_num_seqs``.
        long_prefill_token_threshold: Most tokens of one prompt per step, so that other prompts progress too; 0 for no
            limit.
        max_draft_tokens: Most drafts per row.
        windows: Sliding window of each page table; None for full attention.
        num_stages: Number of pipeline stages; a plan has at most ``max_num_seqs / num_stages`` rows, rounded up.
        admits_whole: Whether a waiting sequence is admitted only by a step that can compute all of its tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    max_draft_tokens: int = 0
    windows: tuple[KVWindow | None, ...] = (None,)
    num_stages: int = 1
    admits_whole: bool = False


class SlotSetup(NamedTuple):
    """Assigns a slot to a sequence.

    Attributes:
        slot: The slot.
        sampling: The sequence's sampling parameters.
        final_length: Most tokens that the sequence can reach, prompt included.
        token_ids: All known tokens if ``sampling.has_penalties``, else empty.
        num_prompt_tokens: Length of the prompt.
    """

    slot: int
    sampling: Sampling
    final_length: int
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0


class PageCopy(NamedTuple):
    """Copies page ``source``, as earlier steps left it, to page ``target`` before the step runs."""

    source: int
    target: int


class SlotMask(NamedTuple):
    """Bit mask of the tokens a slot may sample in this step: little-endian int32 words, token t in word t // 32."""

    slot: int
    words: bytes


class PageGrant(NamedTuple):
    """Sets the entries of a slot's page table ``table`` from index ``first`` on."""

    slot: int
    first: int
    pages: list[int]
    table: int = 0


class ChunkPooling(NamedTuple):
    """The part of a chunk to add to its slot's sum of hidden states.

    Attributes:
        num_tokens: Number of the chunk's last tokens to add.
        is_first: Whether they start a new sum.
        is_last: Whether they complete the sum, which the host then receives.
    """

    num_tokens: int
    is_first: bool
    is_last: bool


ON_DEVICE = -1
"""Filled in on the device: as a row's first token, the slot's latest token; as its start, that token's position."""


class Row(NamedTuple):
    """Consecutive tokens of one slot: a prompt chunk or, in decode, the latest token followed by any drafts.

    A row with drafts samples after the latest token and after each draft. A sampled token is accepted if all drafts
    before it equal the tokens sampled in their positions; the rest of the row has no effect.

    Attributes:
        slot: The slot.
        start: Position of the first token, or ``ON_DEVICE``.
        token_ids: The tokens; the first may be ``ON_DEVICE``.
        num_samples: Sample after each of this many last tokens of the row; 0 within a prompt.
        targets: For prompt logprobs, the token after each token of the row (-1: none); else None.
        pooling: For embeddings, what the row adds to the sum of hidden states; else None.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_samples: int
    targets: list[int] | None = None
    pooling: ChunkPooling | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RowColumns:
    """The fields of all rows of a plan (see ``Row``); ``lengths`` are the numbers of tokens."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_samples: tuple[int, ...]
    token_ids: tuple[list[int], ...]
    targets: tuple[list[int] | None, ...]
    pooling: tuple[ChunkPooling | None, ...]

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether any row has drafts."""
        return max(self.num_samples, default=0) > 1


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        number: Number of the tick at which the plan enters the pipeline. Numbers increase, with gaps for ticks without
            a plan. With S stages, a row ``ON_DEVICE`` reads a token of plan ``number - S`` or an earlier one.
        setups: Slot assignments before the step.
        grants: Page table updates before the step.
        rows: Tokens to compute, at most one row per slot. Rows of one token are cheapest at the front.
        copies: Page copies before the step.
        masks: Token masks of constrained slots.
    """

    number: int
    setups: list[SlotSetup]
    grants: list[PageGrant]
    rows: list[Row]
    copies: Sequence[PageCopy] = ()
    masks: Sequence[SlotMask] = ()

    @functools.cached_property
    def columns(self) -> RowColumns:
        """The fields of all rows."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(Row._fields)
        slots, starts, token_ids, num_samples, targets, pooling = columns
        return RowColumns(slots, starts, tuple(map(len, token_ids)), num_samples, token_ids, targets, pooling)

    def share_columns(self, other: "StepPlan") -> None:
        """Reuse the columns of a plan with equal rows, as consecutive decode steps have."""
        self.__dict__["columns"] = other.columns

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @functools.cached_property
    def first_samples(self) -> Sequence[int]:
        """Index of each row's first sample in the step; a row without samples counts as one."""
        if not self.columns.has_drafts:
            return range(self.num_rows)
        counts = (max(count, 1) for count in self.columns.num_samples)
        return [*itertools.accumulate(counts, initial=0)][:-1]

    @functools.cached_property
    def num_tokens(self) -> int:
        """Number of query tokens."""
        return sum(self.columns.lengths)

    @property
    def is_decode_only(self) -> bool:
        """Whether every row has one token and only samples."""
        columns = self.columns
        return self.num_tokens == self.num_rows and not any(columns.targets) and not any(columns.pooling)
