"""Which candidate is the fastest for a batch size, a context and a link, and for which of them it would be another."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.lab.compare.candidates import Candidate
from jaxserve.lab.hardware import LINKS
from jaxserve.lab.links import Link, collective_seconds
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.records import BATCH_SIZES, StepCost
from jaxserve.lab.report import seconds

_ALIKE = 0.01  # candidates whose tokens per second differ by less are ranked by KV capacity
_NONE = "none fits"
_NO_CHANGE = {"memory"}  # between the virtual devices of a CPU
_CONTEXTS = (256, 1024, 4096, 16384, 65536, 131072)


class Workload(NamedTuple):
    """What candidates are ranked for.

    Attributes:
        batch: Sequences at once, on all devices together.
        context: Tokens of context of each.
        link: Link between devices of a host; None: the device's own.
    """

    batch: int
    context: int
    link: Link | None = None


class Change(NamedTuple):
    """Another workload, and the candidate that is then the fastest.

    Attributes:
        what: ``batch``, ``context`` or ``link``.
        value: The batch size, the context or the name of the link.
        name: The fastest candidate; None if none fits.
    """

    what: str
    value: int | str
    name: str | None


def tokens_per_s(plan: Plan, workload: Workload) -> float:
    """Return the tokens per second of a plan, 0 if it does not fit; a batch whose KV cache does not fit runs in parts.

    Steps are those that are planned, with the KV cache of another context read and with collectives over another link.
    """
    room = plan.kv_tokens // workload.context
    if not plan.fits or room < 1:
        return 0.0
    batch = max(size for size in BATCH_SIZES if size <= max(1, min(workload.batch, room)))
    return batch / step_seconds(plan, plan.decode_of(batch), workload)


def step_seconds(plan: Plan, step: StepCost, workload: Workload) -> float:
    """Return the time of a planned step with another context or link."""
    link = workload.link
    attention_s = step.attention_s * workload.context / step.context
    exchanged_s = sum(
        each.seconds
        if link is None or each.link != plan.device.link.name
        else each.times * collective_seconds(each.kind, each.num_bytes, each.num_devices, link)
        for each in step.communication
    )
    change = attention_s - step.attention_s + exchanged_s - step.communication_s
    factor = (step.latency_s + change) / step.latency_s
    return dataclasses.replace(step, stage_s=tuple(factor * time_s for time_s in step.stage_s)).step_s


def ranked(candidates: Iterable[Candidate], workload: Workload) -> list[Candidate]:
    """Return candidates, the fastest first; of about equally fast ones the first has the most room for KV pages."""
    rates = [(tokens_per_s(candidate.plan, workload), candidate) for candidate in candidates]
    rates.sort(key=lambda found: -found[0])
    best = rates[0][0]
    alike = [candidate for rate, candidate in rates if rate >= (1 - _ALIKE) * best]
    rest = [candidate for rate, candidate in rates if rate < (1 - _ALIKE) * best]
    return [*sorted(alike, key=lambda candidate: -candidate.plan.kv_tokens), *rest]


def fastest(candidates: Sequence[Candidate], workload: Workload) -> Candidate | None:
    """Return the first of ``ranked``; None if none fits."""
    first = ranked(candidates, workload)[0]
    return first if tokens_per_s(first.plan, workload) > 0 else None


def changes(candidates: Sequence[Candidate], workload: Workload) -> list[Change]:
    """Return the fastest candidate for other batch sizes, contexts and links, one of the three at a time."""
    device = candidates[0].plan.device
    links = {} if device.platform == "cpu" else {name: link for name, link in LINKS.items() if name not in _NO_CHANGE}
    links.pop(device.link.name, None)
    longest = candidates[0].plan.max_model_len
    contexts = sorted({workload.context, longest, *(size for size in _CONTEXTS if size < longest)})
    rows: list[tuple[str, int | str, Workload]] = []
    rows += [("batch", size, workload._replace(batch=size)) for size in BATCH_SIZES]
    rows += [("context", size, workload._replace(context=size)) for size in contexts]
    rows += [("link", name, workload._replace(link=link)) for name, link in links.items()]
    found = ((what, value, fastest(candidates, other)) for what, value, other in rows)
    return [Change(what, value, None if best is None else best.name) for what, value, best in found]


def changes_text(found: Sequence[Change], recommended: str) -> list[str]:
    """Return a line for each of batch, context and link: which values keep the recommendation, and what others do."""
    lines = []
    for what in ("batch", "context", "link"):
        own = [change for change in found if change.what == what]
        if not own:
            continue
        groups = [(name, list(group)) for name, group in itertools.groupby(own, lambda change: change.name)]
        if what == "link":
            names = dict.fromkeys(change.name for change in own)
            groups = [(name, [change for change in own if change.name == name]) for name in names]
        if [name for name, _ in groups] == [recommended]:
            lines.append(f"{what}: the same for {_values(own)}")
            continue
        lines.append(f"{what}: {'; '.join(f'{name or _NONE} for {_values(group)}' for name, group in groups)}")
    return lines


def _values(found: Sequence[Change]) -> str:
    values = [change.value if isinstance(change.value, str) else f"{change.value:,}" for change in found]
    if len(values) > 2 and not isinstance(found[0].value, str):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(values)


def reason(best: Candidate, others: Sequence[Candidate], workload: Workload) -> str:
    """Return why a candidate is recommended: its time, what bounds it, and how the next one differs."""
    step = _step(best.plan, workload)
    text = (
        f"{seconds(step_seconds(best.plan, step, workload))} per step at batch {workload.batch} with "
        f"{workload.context:,} tokens of context, bound by {step.bound}; room for {best.plan.kv_tokens:,} tokens"
    )
    if not others:
        return text
    next_, rates = others[0], [tokens_per_s(each.plan, workload) for each in (best, others[0])]
    if not rates[1]:
        return f"{text}. No other fits"
    if rates[0] < (1 + _ALIKE) * rates[1]:
        return f"{text}. {next_.name} is as fast, with room for {next_.plan.kv_tokens:,} tokens"
    share = f"{100 * (1 - rates[1] / rates[0]):.0f} %"
    return f"{text}. {next_.name} is {share} slower: {_difference(step, _step(next_.plan, workload))}"


def _step(plan: Plan, workload: Workload) -> StepCost:
    return plan.decode_of(max(size for size in BATCH_SIZES if size <= workload.batch))


def _difference(step: StepCost, other: StepCost) -> str:
    """Return the part of a step whose time differs most."""
    times: dict[str, Callable[[StepCost], float]] = {
        "memory": lambda each: each.memory_s,
        "arithmetic": lambda each: each.compute_s,
        "communication": lambda each: each.communication_s,
    }
    name = max(times, key=lambda part: abs(times[part](other) - times[part](step)))
    own, others = times[name](step), times[name](other)
    return f"its {name} takes {seconds(others)}, {f'not {seconds(own)}' if own else 'which this one has none of'}"
