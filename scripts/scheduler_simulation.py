"""Replays a trace through the engine's own scheduler and page allocator, with a model of step times.

Times of requests are simulated by that model. Host times (of `schedule` and `complete`) are measured.
"""

import collections
import dataclasses
import math
import time
from typing import NamedTuple

from jaxserve.api.request import Request
from jaxserve.bench.traces import MAX_PIECE_ID, Trace, pieces
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.row_starts import RowStarts
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step


class Reuse(NamedTuple):
    """Prompt tokens of a trace, and how many of them an unlimited cache would have."""

    num_prompt_tokens: int
    num_reused_tokens: int

    @property
    def rate(self) -> float:
        """Reused fraction, in 0..1."""
        return self.num_reused_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The time of a step in seconds, as a sum.

    Attributes:
        step_s: Per step: reading the weights, launching, sampling.
        prefill_token_s: Per token of a row with several tokens: its share of the matmuls.
        decode_row_s: Per row of one token.
        context_token_s: Per token of context that a row reads.
        pair_s: Per pair of a prompt token and a token that it attends to.
        host_s: The host's part of a step, from earlier results to the launch; at depth 2 it overlaps with the step
            running meanwhile.
    """

    step_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float
    pair_s: float
    host_s: float

    def seconds(self, plan: StepPlan, starts: list[int]) -> float:
        """Return the time of a step on the device; ``starts`` has the position of each row's first token."""
        context = sum(starts) + plan.num_tokens
        lengths = plan.lengths
        num_decode = lengths.count(1)
        num_prefill = plan.num_tokens - num_decode
        num_pairs = 0
        for start, length in zip(starts, lengths, strict=True):
            if length > 1:
                num_pairs += length * start + length * (length + 1) // 2
        time_s = self.step_s + self.decode_row_s * num_decode + self.context_token_s * context
        return time_s + self.prefill_token_s * num_prefill + self.pair_s * num_pairs


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the scheduler, and the costs. ``priorities``: one per request, or none for equal priorities."""

    cost: CostModel
    num_pages: int
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    long_prefill_token_threshold: int = 0
    is_caching: bool = True
    depth: int = 2
    priorities: tuple[int, ...] = ()


class _Flight(NamedTuple):
    """A launched step and its index among them, the tokens of each row that it will return, and its end time."""

    step: int
    plan: StepPlan
    tokens: list[list[int]]
    end_s: float


class Moment(NamedTuple):
    """The state at the end of a step."""

    time_s: float
    num_running: int
    num_waiting: int
    kv_use: float


class Simulation:
    """One replay of a trace at ``rate`` times its speed; `run` it once, then read the attributes.

    Attributes:
        arrival_s: Arrival of each request; ``scheduled_s``, ``first_s`` and ``last_s``: its first step, first token and
            last token.
        moments: State after each step.
        host_s: Measured seconds of `schedule` and `complete` per step.
        num_rows: Rows per step.
    """

    def __init__(self, trace: Trace, rate: float, settings: Settings):
        self.trace = trace
        self.settings = settings
        self.scheduler = make_scheduler(settings)
        self.arrival_s = [request.arrival_s / rate for request in trace.requests]
        self.scheduled_s, self.first_s, self.last_s = ([math.nan] * len(trace.requests) for _ in range(3))
        self.moments: list[Moment] = []
        self.host_s: list[float] = []
        self.num_rows: list[int] = []
        self._now_s = self._device_free_s = 0.0
        self._num_added = 0
        self._starts = RowStarts(settings.max_num_seqs)
        self._flights: collections.deque[_Flight] = collections.deque()
        self._indices: dict[Sequence, int] = {}
        self._slot_indices = [0] * settings.max_num_seqs

    def run(self) -> None:
        """Replay the trace to its end."""
        while True:
            self._add_arrivals()
            can_launch = len(self._flights) < self.settings.depth
            if can_launch and self._launch():
                continue
            arrival = self.arrival_s[self._num_added] if self._num_added < len(self.arrival_s) else math.inf
            if self._flights and not (can_launch and arrival < self._flights[0].end_s):
                self._collect()
            elif arrival < math.inf:
                self._now_s = arrival
            else:
                break
        assert not self.scheduler.num_unfinished, "the scheduler left sequences waiting forever"

    def _add_arrivals(self) -> None:
        while self._num_added < len(self.arrival_s) and self.arrival_s[self._num_added] <= self._now_s:
            index = self._num_added
            sequence = self._sequence(index)
            self._indices[sequence] = index
            self.scheduler.add(sequence)
            self._num_added += 1

    def _sequence(self, index: int) -> Sequence:
        prompt = symbolic_prompt(self.trace, index)
        settings = self.settings
        priority = settings.priorities[index] if settings.priorities else 0
        return Sequence(
            Request(request_id=str(index), priority=priority),
            prompt,
            len(prompt),
            len(prompt) + self.trace.requests[index].num_output_tokens,
            cache_root=b"" if settings.is_caching else index.to_bytes(8, "little"),
        )

    def _launch(self) -> bool:
        """Plan a step and start it when the device is free; return whether there was one."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        host_s = time.perf_counter() - start
        if plan is None:
            return False
        self.host_s.append(host_s)
        self.num_rows.append(plan.num_rows)
        slots = self._slot_indices
        running = {sequence.slot: sequence for sequence in self.scheduler.running} if plan.setups else {}
        for setup in plan.setups:
            index = slots[setup.slot] = self._indices[running[setup.slot]]
            if math.isnan(self.scheduled_s[index]):
                self.scheduled_s[index] = self._now_s
        first_token = 2 * MAX_PIECE_ID  # unique per request, so that outputs are never shared
        rows = zip(plan.slots, plan.num_samples, strict=True)
        tokens = [[first_token + slots[slot]] if num_samples else [] for slot, num_samples in rows]
        cost = self.settings.cost
        starts = self._starts.advance(plan).tolist()
        self._device_free_s = max(self._now_s + cost.host_s, self._device_free_s) + cost.seconds(plan, starts)
        self._flights.append(_Flight(len(self.host_s) - 1, plan, tokens, self._device_free_s))
        return True

    def _collect(self) -> None:
        flight = self._flights.popleft()
        self._now_s = flight.end_s
        start = time.perf_counter()
        step = self.scheduler.complete(flight.plan, flight.tokens)
        self.host_s[flight.step] += time.perf_counter() - start
        self._note_tokens(step)
        scheduler = self.scheduler
        self.moments.append(
            Moment(self._now_s, len(scheduler.running), len(scheduler.waiting), scheduler.allocator.usage)
        )

    def _note_tokens(self, step: Step) -> None:
        for sequence in step.sampled:
            if sequence.num_output_tokens == 1:
                self.first_s[self._indices[sequence]] = self._now_s
            if sequence.finish_reason is not None:
                self.last_s[self._indices.pop(sequence)] = self._now_s


def make_scheduler(settings: Settings) -> Scheduler:
    """Return the engine's own scheduler on a new page allocator."""
    limits = SchedulerLimits(
        settings.max_num_seqs, settings.max_num_batched_tokens, settings.long_prefill_token_threshold
    )
    return Scheduler(limits, PageAllocator(settings.num_pages, settings.page_size, settings.is_caching))


def symbolic_prompt(trace: Trace, index: int) -> list[int]:
    """Return a prompt for code that only compares tokens: each token is the id of its piece, or unique to the
    request."""
    request = trace.requests[index]
    if not request.piece_ids:
        return [MAX_PIECE_ID + 1 + index] * request.num_prompt_tokens
    prompt: list[int] = []
    for name, length in pieces(trace, request):
        prompt += [name] * length
    return prompt


def trace_reuse(trace: Trace, page_size: int) -> Reuse:
    """Return the hits of an unlimited prefix cache of whole pages, with prompts processed one after the other.

    A page is a hit when it and all before it were in an earlier prompt; at least one token of each prompt is not a hit.
    """
    longest: dict[tuple[int, int], tuple[int, int]] = {}  # (node, piece id) -> (next node, tokens seen)
    total = reused = 0
    for request in trace.requests:
        node = matched = 0
        is_shared = True
        for name, length in pieces(trace, request):
            child, seen = longest.get((node, name), (len(longest) + 1, 0))
            if is_shared:
                matched += min(length, seen)
                is_shared = seen >= length
            longest[node, name] = (child, max(seen, length))
            node = child
        total += request.num_prompt_tokens
        reused += min(matched, request.num_prompt_tokens - 1) // page_size * page_size
    return Reuse(total, reused)
