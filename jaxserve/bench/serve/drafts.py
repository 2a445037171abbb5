"""What a load test says of speculative decoding: the server's counters before and after, as vLLM reports them."""

import collections
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.metric_types import Counter
from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.records import BenchServeError

_SAMPLE = re.compile(r"(?m)^(\w+:spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$")
_POSITION = re.compile(r'\bposition="(\d+)"')


async def read_drafts(client: HttpClient) -> DraftTotals | None:
    """Return the counters of drafts of a server; None if it reports none."""
    try:
        response = await client.request("GET", "/metrics")
    except (OSError, BenchServeError):
        return None
    return parse_drafts(response.body.decode(errors="replace")) if response.status == 200 else None


def parse_drafts(text: str) -> DraftTotals | None:
    """Return the counters of drafts in metrics in Prometheus' text form, added over engines; None if there are none."""
    values = collections.defaultdict[tuple[str, str], float](float)
    for name, labels, value in _SAMPLE.findall(text):
        position = _POSITION.search(labels)
        values[name, position[1] if position else ""] += float(value)
    found = [Counter(name, {"position": position}, value) for (name, position), value in values.items()]
    return DraftTotals.of(found) if found else None


def draft_figures(before: DraftTotals, after: DraftTotals | None) -> dict[str, Any]:
    """Return vLLM's figures of the drafts of a run; none without drafts."""
    if after is None:
        return {}
    drafts = after.since(before)
    if not drafts.num_drafts:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * drafts.acceptance_rate,
        "spec_decode_acceptance_length": drafts.mean_length,
        "spec_decode_num_drafts": int(drafts.num_drafts),
        "spec_decode_draft_tokens": int(drafts.num_tokens),
        "spec_decode_accepted_tokens": int(drafts.num_accepted),
        "spec_decode_per_position_acceptance_rates": [count / drafts.num_drafts for count in drafts.accepted],
    }


def draft_rows(found: Mapping[str, Any]) -> dict[str, int | float | None]:
    """Return vLLM's rows of the report about drafts, None for a headline; none without drafts."""
    if "spec_decode_num_drafts" not in found:
        return {}
    rates = found["spec_decode_per_position_acceptance_rates"]
    return {
        "Acceptance rate (%):": found["spec_decode_acceptance_rate"],
        "Acceptance length:": found["spec_decode_acceptance_length"],
        "Drafts:": found["spec_decode_num_drafts"],
        "Draft tokens:": found["spec_decode_draft_tokens"],
        "Accepted tokens:": found["spec_decode_accepted_tokens"],
        "Per-position acceptance (%):": None,
        **{f"  Position {position}:": 100 * rate for position, rate in enumerate(rates)},
    }
