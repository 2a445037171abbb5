"""What the scheduler tells the runner: plain integers, serialisable, the runner's only input from the host.

A slot is a place on the device that a request holds while it runs: its pages, its sampling numbers and its latest token
live there. A plan names slots; it carries the facts of a slot once, when they change.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Sampling(NamedTuple):
    """The numbers the sampler needs of a request.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: Candidates kept; 0 keeps all.
        top_p: Probability mass kept, in (0, 1].
        min_p: Probability kept at least, relative to the likeliest token's.
        seed: 32-bit seed; with a token's position it decides the token's random numbers.
        num_logprobs: Alternatives reported with each token; -1 reports nothing.
        banned_ids: Tokens not allowed before ``banned_until``.
        banned_until: Position of the first token that may be one of ``banned_ids``.
        bad_ids: Tokens never allowed.
        allowed_ids: The only tokens allowed; None allows all.
        presence_penalty: Taken from the scores of tokens that the output has.
        frequency_penalty: The same, once for each time the output has them.
        repetition_penalty: Divides the positive scores of tokens that prompt or output have, multiplies the negative.
        logit_bias: Tokens and what is added to their scores.
        tracked_ids: Tokens whose logprobs are reported at every position.
        arguments: Numbers for the engine's logits processors, in their order.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    banned_ids: tuple[int, ...] = ()
    banned_until: int = 0
    bad_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    tracked_ids: tuple[int, ...] = ()
    arguments: tuple[float, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the scores of the next."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class SchedulerLimits(NamedTuple):
    """The largest step that the scheduler may plan.

    Attributes:
        max_num_seqs: Most rows.
        max_num_batched_tokens: Most query tokens, at least one for each row.
        long_prefill_token_threshold: Most query tokens of one prompt, so that other prompts run beside it; 0: no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0


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
    """Pages appended to a slot's page table from index ``first`` on."""

    slot: int
    first: int
    pages: list[int]


class ChunkPooling(NamedTuple):
    """What a chunk adds to the sum of its slot's hidden states.

    Attributes:
        num_tokens: So many of its last tokens are added.
        is_first: The sum begins with them.
        is_last: It ends with them, and the host gets it.
    """

    num_tokens: int
    is_first: bool
    is_last: bool


class PrefillRow(NamedTuple):
    """A chunk of known tokens.

    Attributes:
        slot: The request's slot.
        start: Position of the chunk's first token.
        token_ids: The chunk.
        samples: Whether the chunk's end is the context's end, so that a token is sampled behind it.
        targets: Where logprobs of the prompt are asked for, the token behind each token of the chunk (-1: none).
        pooling: Where its hidden states are summed up, what the chunk adds.
    """

    slot: int
    start: int
    token_ids: list[int]
    samples: bool
    targets: list[int] | None = None
    pooling: ChunkPooling | None = None

    @property
    def is_pooled(self) -> bool:
        """Whether the sum of its slot's hidden states ends with it."""
        return self.pooling is not None and self.pooling.is_last


class StepPlan(NamedTuple):
    """One step. Rows are the decode rows, in order, and then the prefill rows.

    Attributes:
        number: Counts the steps from 0.
        setups: Slots that change hands before the step.
        grants: Pages slots get before the step.
        decode_slots: Slots that run one token each.
        decode_positions: Position of each such token.
        decode_tokens: Each such token's id, or -1: the slot's latest token, which only the device knows yet.
        prefill: Chunks of known tokens.
        copies: Pages copied before the step.
        masks: Tokens allowed to slots whose requests constrain them.
    """

    number: int
    setups: list[SlotSetup]
    grants: list[PageGrant]
    decode_slots: list[int]
    decode_positions: list[int]
    decode_tokens: list[int]
    prefill: list[PrefillRow]
    copies: Sequence[PageCopy] = ()
    masks: Sequence[SlotMask] = ()

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.decode_slots) + len(self.prefill)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the step."""
        return len(self.decode_slots) + sum(len(row.token_ids) for row in self.prefill)
