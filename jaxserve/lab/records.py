"""What a plan says of a layout: memory, communication and time, each number with its source.

The sources: ``counted`` from the shapes and the program itself, ``compiled`` from an executable for the device,
``measured`` on a machine, ``modelled`` from those with a formula and the table of hardware.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Source = Literal["counted", "compiled", "measured", "modelled"]
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFT_BATCH_SIZES = (1, 8, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of each device of a pipeline stage, in bytes; everything but ``temporaries`` is counted from shapes.

    Attributes:
        stage: Index of the stage.
        layers: Indices of its layers, as ``range(first, stop)``.
        weights: Parameters.
        kv_bytes_per_token: Keys and values of one token in the stage's layers.
        page_bytes: One page, in all pools.
        activations: Hidden states between layers in the largest step.
        temporaries: Temporary arrays of the largest step, with its activations.
        temporaries_source: ``compiled`` or ``modelled``.
        step_reserve: What the engine reserves for the largest step: an upper bound of ``temporaries``.
        slots: State of the running sequences besides pages.
        state_bytes: State of one sequence in the stage's recurrent layers.
        num_states: Such states: of all running sequences, and of the prefix cache.
        reserve: Left to XLA and the driver.
        usable: Memory of the device times ``gpu_memory_utilization``.
        num_pages: Pages that fit into the rest; 0 if the rest is negative.
        compiled_collectives: Number of each kind of collective in the largest step as XLA compiled it; None if it was
            not compiled.
    """

    stage: int
    layers: range
    weights: int
    kv_bytes_per_token: int
    page_bytes: int
    activations: int
    temporaries: int
    temporaries_source: Source
    step_reserve: int
    slots: int
    reserve: int
    usable: int
    num_pages: int
    state_bytes: int = 0
    num_states: int = 0
    compiled_collectives: Mapping[str, int] | None = None

    @property
    def left(self) -> int:
        """Bytes left for pages; negative if the rest does not fit."""
        states = self.num_states * self.state_bytes
        return self.usable - self.reserve - self.weights - self.step_reserve - self.slots - states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """Equal collectives of one step; number and bytes are counted in the program, the time is modelled.

    Attributes:
        part: Part of the model: ``embedding``, ``layers``, ``head and sampling``, or ``hand-over`` between stages.
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``collective-permute``, or
            ``hand-over`` (point to point).
        axes: Mesh axes that it runs over.
        num_devices: Devices that take part in each.
        times: How many run one after the other in a step, over all stages.
        num_bytes: Bytes of the result of each on every device.
        link: Name of the slowest link between its devices.
        seconds: Time of all of them.
    """

    part: str
    kind: str
    axes: tuple[str, ...]
    num_devices: int
    times: int
    num_bytes: int
    link: str
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all results on every device."""
        return self.times * self.num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Work and time of one step through all stages.

    Bytes and arithmetic are counted from shapes, of which experts that no token is routed to are an expectation; times
    are modelled.

    Attributes:
        kind: ``decode`` or ``prefill``.
        batch: Sequences of all replicas, lanes and microbatches together.
        rows: Query tokens of a step on each device.
        context: Tokens of context of each sequence.
        microbatches: Steps in flight at once: one per stage, or fewer with fewer sequences.
        weight_bytes: Weights that each device reads, added over the stages.
        kv_bytes: Keys and values that each device reads, added over the stages.
        flops: Multiplications and additions of each device, added over the stages.
        communication: Collectives and hand-overs.
        memory_s: Time to read weights, keys and values, added over the stages.
        compute_s: Time of the arithmetic, added over the stages.
        attention_s: Time of attention, the larger of those for memory and for arithmetic, added over the stages.
        communication_s: Time of the communication, added over the stages.
        stage_s: Time of the step in each stage: the larger of the times for memory and for arithmetic, of its matmuls
            and of its attention, and the time of its communication.
        host_s: Time in which the host plans and launches the steps of all microbatches of all replicas.
        turns: Number of these steps if they take turns, since devices share their host, its own work included; 0 if
            each device works for itself.
        tokens: Tokens generated, or of the prompts computed, by the microbatches of all replicas and lanes together.
    """

    kind: Literal["decode", "prefill"]
    batch: int
    rows: int
    context: int
    microbatches: int
    weight_bytes: int
    kv_bytes: int
    flops: float
    communication: tuple[Communication, ...]
    memory_s: float
    compute_s: float
    attention_s: float
    communication_s: float
    stage_s: tuple[float, ...]
    host_s: float
    turns: int
    tokens: int

    @property
    def latency_s(self) -> float:
        """Time of the step through all stages, if no other step is in their way."""
        return sum(self.stage_s)

    @property
    def step_s(self) -> float:
        """Time after which each microbatch has made a step: between two tokens of a sequence."""
        if self.turns:
            return self.turns * self.latency_s + self.host_s
        return max(self.latency_s, self.microbatches * max(self.stage_s), self.host_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.step_s

    @property
    def bound(self) -> str:
        """What takes most of the time: ``memory``, ``compute`` or ``communication``."""
        times = {"memory": self.memory_s, "compute": self.compute_s, "communication": self.communication_s}
        return max(times, key=lambda name: times[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterMemory:
    """What a model that drafts adds to each device of the last stage, in bytes counted from shapes.

    Attributes:
        name: Its architecture, or the method of a draft head.
        dtype: Element type of its weights.
        weights: Parameters.
        kv_bytes_per_token: Keys and values of one token, in the pages of the model.
        page_state_bytes: State that a draft head keeps beside each page.
        slot_bytes: State that it keeps for the running sequences, with their drafts.
    """

    name: str
    dtype: str
    weights: int
    kv_bytes_per_token: int
    page_state_bytes: int
    slot_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCost:
    """Time of a decode step that verifies drafts, beside that of one without; modelled.

    Attributes:
        batch: Sequences of all replicas, lanes and microbatches together.
        num_drafts: Drafts of each sequence that a step verifies.
        plain_s: Time of a step without drafts, between two tokens of a sequence.
        step_s: Time of a step with drafts, drafting included.
        drafting_s: Time of the drafter's passes.
    """

    batch: int
    num_drafts: int
    plain_s: float
    step_s: float
    drafting_s: float

    @property
    def ratio(self) -> float:
        """Times of a step without drafts that one with drafts takes: the tokens per step from which they pay."""
        return self.step_s / self.plain_s

    @property
    def acceptance(self) -> float | None:
        """Smallest probability of accepting each draft, the ones before it being accepted, at which drafts pay; None
        if they do not even if all are accepted."""
        if self.ratio > 1 + self.num_drafts:
            return None
        below, above = 0.0, 1.0
        for _ in range(40):
            middle = (below + above) / 2
            pays = sum(middle**position for position in range(1 + self.num_drafts)) >= self.ratio
            below, above = (below, middle) if pays else (middle, above)
        return above


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingPlan:
    """What speculative decoding needs and when it pays.

    Attributes:
        method: Method of ``speculative_config``.
        num_speculative_tokens: Most drafts per sequence.
        drafter: The model that drafts; None for methods without one.
        costs: Decode steps of some batch sizes.
    """

    method: str
    num_speculative_tokens: int
    drafter: DrafterMemory | None
    costs: tuple[DraftCost, ...]
