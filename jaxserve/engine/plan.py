"""What the scheduler tells the runner: plain integers, serialisable, the runner's only input from the host.

A slot is a place on the device that a request holds while it runs: its pages, its sampling numbers and its latest token
live there. A plan names slots; it carries the facts of a slot once, when they change.
"""

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
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    banned_ids: tuple[int, ...] = ()
    banned_until: int = 0


class SlotSetup(NamedTuple):
    """A request moves into a slot; ``final_length`` is the most tokens it can have at the end."""

    slot: int
    sampling: Sampling
    final_length: int


class PageGrant(NamedTuple):
    """Pages appended to a slot's page table from index ``first`` on."""

    slot: int
    first: int
    pages: list[int]


class PrefillRow(NamedTuple):
    """A chunk of known tokens.

    Attributes:
        slot: The request's slot.
        start: Position of the chunk's first token.
        token_ids: The chunk.
        samples: Whether the chunk's end is the context's end, so that a token is sampled behind it.
        targets: Where logprobs of the prompt are asked for, the token behind each token of the chunk (-1: none).
    """

    slot: int
    start: int
    token_ids: list[int]
    samples: bool
    targets: list[int] | None = None


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
    """

    number: int
    setups: list[SlotSetup]
    grants: list[PageGrant]
    decode_slots: list[int]
    decode_positions: list[int]
    decode_tokens: list[int]
    prefill: list[PrefillRow]

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.decode_slots) + len(self.prefill)

    @property
    def num_tokens(self) -> int:
        """Query tokens in the step."""
        return len(self.decode_slots) + sum(len(row.token_ids) for row in self.prefill)
