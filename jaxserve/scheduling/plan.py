"""Step plans: the runner's only input from the scheduler, made of plain serializable values.

A running sequence holds a slot on the device, which stores its page tables, sampling parameters and latest token. A
plan refers to slots, and carries only what changed about them since the previous plan.
"""

import dataclasses
import functools
import itertools
from array import array
from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from jaxserve.api.sampling_options import Effect, OptionValues, has_effect
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

    @property
    def is_simple(self) -> bool:
        """Whether the seed and the options without penalties are all that the sampler needs."""
        has_tokens = self.banned_ids or self.bad_ids or self.allowed_ids is not None or self.tracked_ids
        return not has_tokens and self.num_logprobs < 0 and not self.arguments and not self.changes_logits


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
        shares_parts: Whether a context may begin with a copy of a cached page that is not full.
        num_lookahead: Tokens after a row that a drafter on the device takes in, for which sequences have pages too.
        max_step_samples: Most samples per step of which some follow drafts; None for no limit. A row without samples
            counts as one.
        adapts_drafts: Whether fewer drafts are verified where that is faster.
        has_small_states: Whether a state has at most as many bytes as a page of keys and values.
        num_states: State pages of a model with recurrent layers, at least one for each sequence, or two with drafts; 0
            for other models.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    max_draft_tokens: int = 0
    windows: tuple[KVWindow | None, ...] = (None,)
    num_stages: int = 1
    admits_whole: bool = False
    max_step_samples: int | None = None
    adapts_drafts: bool = False
    num_lookahead: int = 0
    shares_parts: bool = True
    num_states: int = 0
    has_small_states: bool = False

    @property
    def can_wait(self) -> bool:
        """Whether a plan can wait for the tokens before it, to have better drafts of the host."""
        return self.num_stages == 1 and not self.num_lookahead


class SlotSetup(NamedTuple):
    """Assigns a slot to a sequence.

    Attributes:
        slot: The slot.
        sampling: The sequence's sampling parameters.
        final_length: Most tokens that the sequence can reach, prompt included.
        token_ids: All known tokens if ``sampling.has_penalties``, else empty.
        num_prompt_tokens: Length of the prompt.
        state_page: Page of the sequence's running state; -1 for a model without recurrent layers.
    """

    slot: int
    sampling: Sampling
    final_length: int
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0
    state_page: int = -1


class PageCopy(NamedTuple):
    """Copies page ``source``, as earlier steps left it, to page ``target`` before the step runs."""

    source: int
    target: int


class StateSnapshot(NamedTuple):
    """Writes the state after the first ``num_tokens`` tokens of row ``row`` to state page ``page`` too."""

    row: int
    num_tokens: int
    page: int


class SlotMask(NamedTuple):
    """Bit mask of the tokens that a slot may sample in this step.

    Attributes:
        slot: The slot.
        words: Little-endian int32 words, token t in word t // 32.
        sample: Index among the samples of the slot's row: the number of drafts before it.
    """

    slot: int
    words: bytes
    sample: int = 0


class PageGrant(NamedTuple):
    """Sets the entries of a slot's page table ``table`` from index ``first`` on."""

    slot: int
    first: int
    pages: list[int]
    table: int = 0


class ChunkTargets(NamedTuple):
    """For prompt logprobs: the token after each token of row ``row`` (-1: none)."""

    row: int
    token_ids: list[int]


class ChunkPooling(NamedTuple):
    """For embeddings: the part of a row to add to its slot's sum of hidden states.

    Attributes:
        row: Index of the row.
        num_tokens: Number of the row's last tokens to add.
        is_first: Whether they start a new sum.
        is_last: Whether they complete the sum, which the host then receives.
    """

    row: int
    num_tokens: int
    is_first: bool
    is_last: bool


ON_DEVICE = -1
"""Filled in on the device: as a row's first token, the slot's latest token; as a draft, the one that the device has for
the slot; as a row's start, the latest token's position."""


def _column() -> MutableSequence[int]:
    """Return an empty column: an array of 32-bit integers, which NumPy reads without a copy."""
    return array("i")


@dataclasses.dataclass
class StepPlan:
    """One step.

    A row is consecutive tokens of one slot: a prompt chunk or, in decode, the latest token followed by any drafts. A
    row with drafts samples after the latest token and after each draft. A sampled token is accepted if all drafts
    before it equal the tokens sampled in their positions; the rest of the row has no effect.

    Attributes:
        number: Number of the tick at which the plan enters the pipeline. Numbers increase, with gaps for ticks without
            a plan. With S stages, a row ``ON_DEVICE`` reads a token of plan ``number - S`` or an earlier one.
        setups: Slot assignments before the step.
        grants: Page table updates before the step.
        copies: Page copies before the step.
        state_copies: Copies of state pages before the step.
        snapshots: States to keep from within rows, in order; a row may have several.
        masks: Token masks of constrained slots; at most one per sample.
        slots: Slot of each row; at most one row per slot. Rows of one token are cheapest at the front.
        starts: Position of each row's first token, or ``ON_DEVICE``.
        lengths: Number of tokens of each row.
        num_samples: For each row, sample after each of this many of its last tokens; 0 within a prompt.
        token_ids: The tokens of all rows, row by row; the first of a row and its drafts may be ``ON_DEVICE``.
        targets: Targets of rows with prompt logprobs.
        pooling: Pooling of rows with embeddings.
        same_rows_as: Number of the earliest plan that has the same rows, if all plans of the same microbatch since then
            have them too, as consecutive decode steps do; None if the rows are new.
        num_drafts: Number of drafts that a drafter on the device makes after the step, for the next row of each slot
            that samples.
    """

    number: int
    setups: list[SlotSetup] = dataclasses.field(default_factory=list[SlotSetup])
    grants: list[PageGrant] = dataclasses.field(default_factory=list[PageGrant])
    copies: list[PageCopy] = dataclasses.field(default_factory=list[PageCopy])
    state_copies: list[PageCopy] = dataclasses.field(default_factory=list[PageCopy])
    snapshots: list[StateSnapshot] = dataclasses.field(default_factory=list[StateSnapshot])
    masks: list[SlotMask] = dataclasses.field(default_factory=list[SlotMask])
    slots: MutableSequence[int] = dataclasses.field(default_factory=_column)
    starts: MutableSequence[int] = dataclasses.field(default_factory=_column)
    lengths: MutableSequence[int] = dataclasses.field(default_factory=_column)
    num_samples: MutableSequence[int] = dataclasses.field(default_factory=_column)
    token_ids: MutableSequence[int] = dataclasses.field(default_factory=_column)
    targets: list[ChunkTargets] = dataclasses.field(default_factory=list[ChunkTargets])
    pooling: list[ChunkPooling] = dataclasses.field(default_factory=list[ChunkPooling])
    same_rows_as: int | None = None
    num_drafts: int = 0

    def add_row(self, slot: int, start: int, token_ids: Sequence[int], num_samples: int) -> None:
        """Add a row."""
        self._add_rows((slot,), (start,), (len(token_ids),), (num_samples,), token_ids)

    def add_decode_rows(self, slots: Sequence[int]) -> None:
        """Add a row of one token for each slot, to be filled in on the device."""
        ones, on_device = array("i", [1]) * len(slots), array("i", [ON_DEVICE]) * len(slots)
        self._add_rows(array("i", slots), on_device, ones, ones, on_device)

    def _add_rows(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        num_samples: Sequence[int],
        token_ids: Sequence[int],
    ) -> None:
        """Add rows, given by column."""
        self.slots.extend(slots)
        self.starts.extend(starts)
        self.lengths.extend(lengths)
        self.num_samples.extend(num_samples)
        self.token_ids.extend(token_ids)

    def compare_rows(self, previous: "StepPlan") -> None:
        """Set ``same_rows_as`` if the rows, and the number of drafts after them, equal those of an earlier plan."""
        if self.num_drafts == previous.num_drafts and self._rows() == previous._rows():
            self.same_rows_as = previous.rows_number

    def _rows(self) -> tuple[Sequence[object], ...]:
        return (self.slots, self.starts, self.lengths, self.num_samples, self.token_ids, self.targets, self.pooling)

    @property
    def rows_number(self) -> int:
        """Number of the first plan with these rows."""
        return self.number if self.same_rows_as is None else self.same_rows_as

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens."""
        return len(self.token_ids)

    @property
    def has_rows_only(self) -> bool:
        """Whether it changes no slot, page table or page besides what its rows write, and masks no token."""
        changes = (self.setups, self.grants, self.copies, self.state_copies, self.snapshots, self.masks)
        return not any(changes)

    @functools.cached_property
    def has_drafts(self) -> bool:
        """Whether any row has drafts."""
        return self.num_tokens > self.num_rows and max(self.num_samples) > 1

    @functools.cached_property
    def first_samples(self) -> Sequence[int]:
        """Index of each row's first sample in the step; a row without samples counts as one."""
        if not self.has_drafts:
            return range(self.num_rows)
        counts = (max(count, 1) for count in self.num_samples)
        return [*itertools.accumulate(counts, initial=0)][:-1]

    @property
    def is_decode_only(self) -> bool:
        """Whether every row has one token, or samples after each of its tokens, and nothing else is computed."""
        is_single = self.num_tokens == self.num_rows
        return (is_single or self.lengths == self.num_samples) and not self.targets and not self.pooling
