"""Counts how much of prompts the prefix cache of a model with recurrent layers reuses, for a number of states.

    python scripts/simulate_state_cache.py families agent
    python scripts/simulate_state_cache.py families --requests 20 --states 20
    python scripts/simulate_state_cache.py mooncake --states 1304 --page-size 512 \
        --trace ../shared/data/traces/mooncake/conversation_trace.jsonl

Scheduler, page allocator and state allocator are the engine's own; there is no model. Requests run one after the other,
and pages are never short: what is counted is the choice of states that are kept and dropped. Reused is the share of the
prompt tokens that an earlier context had too. 64 GiB are 1304 states of Qwen3.5-9B (50.3 MiB each).
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve.api.request import Request  # noqa: E402  (after the path)
from jaxserve.bench.traces import Trace, pieces, read_trace  # noqa: E402
from jaxserve.scheduling.page_allocator import PageAllocator  # noqa: E402
from jaxserve.scheduling.plan import SchedulerLimits  # noqa: E402
from jaxserve.scheduling.scheduler import Scheduler  # noqa: E402
from jaxserve.scheduling.sequence import Sequence  # noqa: E402

_VOCABULARY = 50_000
_UNIQUE = 1 << 29  # tokens from here on are of one request


class Turn(NamedTuple):
    """A request: its prompt, the answer that it gets, and how many of the prompt's tokens begin the answer."""

    prompt: list[int]
    answer: list[int]
    num_generation_tokens: int = -1


class Counts(NamedTuple):
    """Tokens of prompts: all, those that an earlier context had too, those of them that were cached, and computed
    ones."""

    prompt: int = 0
    shared: int = 0
    reused: int = 0
    computed: int = 0

    def line(self) -> str:
        """Return the shares as text."""
        new = self.prompt - self.shared
        reused, ratio = self.reused / max(1, self.shared), self.computed / max(1, new)
        return f"reused {reused:.2%} of {self.shared} shared tokens, computed : new {ratio:.3f}"


class Cache:
    """A scheduler of an engine without a model, which runs one request after the other.

    Args:
        num_states: States that the prefix cache may keep.
        page_size: Tokens of a page.
        num_pages: Pages, enough for all requests.
        num_batched_tokens: Most tokens of a step.
    """

    def __init__(self, num_states: int, page_size: int, num_pages: int, num_batched_tokens: int = 8192):
        limits = SchedulerLimits(1, num_batched_tokens, num_states=num_states + 1)
        self.scheduler = Scheduler(limits, PageAllocator(num_pages, page_size))
        self.num_steps = self.num_snapshots = self.num_requests = 0

    def run(self, turn: Turn) -> Sequence:
        """Run a request to its end."""
        length = len(turn.prompt)
        name = str(self.num_requests)
        sequence = Sequence(
            Request(request_id=name),
            list(turn.prompt),
            length,
            length + len(turn.answer),
            num_generation_tokens=turn.num_generation_tokens,
        )
        self.num_requests += 1
        self.scheduler.add(sequence)
        while sequence.finish_reason is None:
            plan = self.scheduler.schedule()
            assert plan is not None, "the request waits forever"
            following = turn.answer[sequence.num_output_tokens : sequence.num_output_tokens + 1]
            self.scheduler.complete(plan, [following if count else [] for count in plan.num_samples])
            self.num_steps += 1
            self.num_snapshots += len(plan.snapshots)
        return sequence

    def replay(self, turns: list[Turn]) -> Counts:
        """Run requests, and compare their prompts with all earlier contexts."""
        contexts = list[np.ndarray]()
        counts = Counts()
        for turn in turns:
            prompt = np.array(turn.prompt)
            shared = min(max((_num_common(prompt, each) for each in contexts), default=0), len(prompt) - 1)
            counts = add(counts, self.run(turn), shared)
            contexts.append(np.array([*turn.prompt, *turn.answer]))
        return counts


def add(counts: Counts, sequence: Sequence, num_shared: int) -> Counts:
    """Return the counts with a request that has run."""
    length, cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
    more = (length, num_shared, min(cached, num_shared), length - cached)
    return Counts(*(before + new for before, new in zip(counts, more, strict=True)))


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if differ.size else size


def families(num_requests: int, rng: random.Random) -> list[Turn]:
    """Return requests of two interleaved families, of 1,600 + 600 and 1,500 + 700 tokens, with answers of 100."""
    heads = [_draw(rng, 1600), _draw(rng, 1500)]
    own = [600, 700]
    return [Turn(heads[index % 2] + _draw(rng, own[index % 2]), _draw(rng, 100)) for index in range(num_requests)]


def agent(num_turns: int, rng: random.Random, num_thoughts: int, num_generation_tokens: int) -> list[Turn]:
    """Return the turns of a conversation, whose template drops the first tokens of answers and the generation prompt.

    Each turn adds about 220 tokens of the user or of tools and an answer of about 270 to 1,200 of the system.
    """
    history, turns = _draw(rng, 1200), list[Turn]()
    for _ in range(num_turns):
        history = history + _draw(rng, rng.randrange(90, 360))
        answer = _draw(rng, rng.randrange(110, 440) + num_thoughts)
        turns.append(Turn(history + [7] * num_generation_tokens, answer, num_generation_tokens))
        history = history + answer[num_thoughts:]
    return turns


def trace_turns(trace: Trace) -> Iterator[Turn]:
    """Yield the requests of a trace. The rest of a prompt after its full pieces, which no other request repeats, counts
    as what begins the answer; an answer is one token."""
    for index, request in enumerate(trace.requests):
        prompt, num_full = list[int](), request.num_prompt_tokens // trace.piece_tokens
        for piece, (name, length) in enumerate(pieces(trace, request)):
            prompt += [name if piece < num_full else _UNIQUE + index] * length
        rest = request.num_prompt_tokens % trace.piece_tokens
        yield Turn(prompt, [_UNIQUE + index], rest or 1)


def trace_counts(trace: Trace, cache: Cache) -> Counts:
    """Replay a trace, in which prompts share whole pieces."""
    counts, seen = Counts(), dict[tuple[int, int], int]()
    for request, turn in zip(trace.requests, trace_turns(trace), strict=True):
        node = num_shared = 0
        is_shared = True
        for name in request.piece_ids[: request.num_prompt_tokens // trace.piece_tokens]:
            is_shared = is_shared and (node, name) in seen
            num_shared += trace.piece_tokens if is_shared else 0
            node = seen.setdefault((node, name), len(seen) + 1)
        counts = add(counts, cache.run(turn), min(num_shared, request.num_prompt_tokens - 1))
    return counts


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, _VOCABULARY) for _ in range(count)]


def make_parser() -> argparse.ArgumentParser:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=("families", "agent", "mooncake"))
    parser.add_argument("--states", type=int, default=10_000, help="states that the prefix cache may keep")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--requests", type=int, help="requests of the families (20), turns (10), or of the trace (all)")
    parser.add_argument("--thoughts", type=int, default=150, help="tokens of an answer that the template drops")
    parser.add_argument("--generation-prompt", type=int, default=5, help="tokens before an answer that it drops too")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (.jsonl)")
    return parser


def counts_of(workload: str, options: argparse.Namespace) -> tuple[Counts, Cache]:
    """Run a workload; return its counts and the cache."""
    if workload == "mooncake":
        trace = read_trace(options.trace, options.requests)
        num_pages = sum(-(-each.num_prompt_tokens // options.page_size) + 2 for each in trace.requests)
        cache = Cache(options.states, options.page_size, num_pages)
        return trace_counts(trace, cache), cache
    if workload == "families":
        turns = families(options.requests or 20, random.Random(1))
    else:
        turns = agent(options.requests or 10, random.Random(2), options.thoughts, options.generation_prompt)
    num_tokens = sum(len(turn.prompt) + len(turn.answer) for turn in turns)
    cache = Cache(options.states, options.page_size, num_tokens // options.page_size + 2 * len(turns))
    return cache.replay(turns), cache


def main() -> None:
    """Run the command."""
    parser = make_parser()
    options = parser.parse_args()
    if "mooncake" in options.workloads and options.trace is None:
        parser.error("mooncake needs --trace FILE.jsonl")
    for name, least in (("states", 0), ("page_size", 1), ("thoughts", 0), ("generation_prompt", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    for workload in options.workloads:
        counts, cache = counts_of(workload, options)
        states = cache.scheduler.pages.states
        kept = 0 if states is None else states.allocator.num_checkpoints
        print(f"{workload}: {cache.num_requests} requests, room for {options.states} states: {counts.line()}")
        print(f"  {cache.num_steps} steps, {cache.num_snapshots} states kept from within prompts, {kept} at the end")


if __name__ == "__main__":
    main()
