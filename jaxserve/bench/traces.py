"""Recorded request traces: reading, scaling, and their prompts.

A trace has the arrival time and the lengths of each request. Mooncake's (FAST '25) also have an id for each piece of
512 prompt tokens: equal ids mean equal tokens after equal prefixes, which is all that a prefix cache compares. The last
piece may be shorter. Azure's have no information about sharing.
"""

import csv
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.api.errors import JaxserveError

PIECE_TOKENS = 512  # of a Mooncake trace
MAX_PIECE_ID = (1 << 28) - 1
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(JaxserveError, ValueError):
    """A trace file is invalid; the message names the file and the line."""


class TraceRequest(NamedTuple):
    """A request of a trace.

    Attributes:
        arrival_s: Seconds since the trace's first request.
        num_prompt_tokens: At least 1.
        num_output_tokens: At least 1.
        piece_ids: Ids of the prompt's pieces; empty if the trace does not say what prompts share.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    piece_ids: tuple[int, ...] = ()


class Trace(NamedTuple):
    """Requests in order of arrival, and the tokens per piece of a prompt."""

    name: str
    requests: list[TraceRequest]
    piece_tokens: int = PIECE_TOKENS


# ---------------------------------------------------------------- reading


def read_trace(path: Path, max_requests: int | None = None) -> Trace:
    """Read an Azure trace (``.csv``) or a Mooncake trace (``.jsonl``), or its first ``max_requests`` requests.

    Raises:
        TraceError: The file is missing, of neither kind, empty, or has a line that cannot be read.
    """
    readers = {".csv": _azure_requests, ".jsonl": _mooncake_requests}
    if path.suffix not in readers:
        raise TraceError(f"{path}: expected a trace in a .csv (Azure) or .jsonl (Mooncake) file, got {path.suffix!r}")
    try:
        requests = list(itertools.islice(readers[path.suffix](path), max_requests))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not requests:
        raise TraceError(f"{path}: expected at least one request, got none")
    start = requests[0].arrival_s
    return Trace(path.stem, [request._replace(arrival_s=request.arrival_s - start) for request in requests])


def _azure_requests(path: Path) -> Iterator[TraceRequest]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}:1: expected the columns {', '.join(_AZURE_COLUMNS)}, got {rows.fieldnames}")
        last = 0.0
        for row in rows:
            where = f"{path}:{rows.line_num}"
            time, prompt, output = (row[name] for name in _AZURE_COLUMNS)
            try:
                arrival = datetime.datetime.fromisoformat(time).replace(tzinfo=datetime.UTC).timestamp()
            except (TypeError, ValueError):
                raise TraceError(f"{where}: TIMESTAMP: expected a date and time, got {time!r}") from None
            last = _checked_time(where, arrival, last)
            lengths = (
                _checked_count(where, "ContextTokens", prompt), _checked_count(where, "GeneratedTokens", output)
            )  # fmt: skip
            yield TraceRequest(arrival, *lengths)


def _mooncake_requests(path: Path) -> Iterator[TraceRequest]:
    with path.open("rb") as file:
        last = 0.0
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where, text = f"{path}:{number}", line.decode("utf-8-sig").strip()
            try:
                fields = json.loads(text)
            except json.JSONDecodeError as error:
                raise TraceError(f"{where}: expected a JSON object, got {text[:80]!r} ({error})") from error
            if not isinstance(fields, dict):
                raise TraceError(f"{where}: expected a JSON object, got {type(fields).__name__}")
            time = fields.get("timestamp")
            if not isinstance(time, int | float) or isinstance(time, bool) or not math.isfinite(time):
                raise TraceError(f"{where}: timestamp: expected milliseconds, got {time!r}")
            last = _checked_time(where, time / 1000, last)
            prompt = _checked_count(where, "input_length", fields.get("input_length"))
            output = _checked_count(where, "output_length", fields.get("output_length"))
            yield TraceRequest(last, prompt, output, _checked_pieces(where, fields, prompt))


def _checked_count(where: str, name: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TraceError(f"{where}: {name}: expected a number of tokens, at least 1, got {value!r}")
    return value


def _checked_time(where: str, arrival_s: float, last_s: float) -> float:
    if not arrival_s >= last_s:
        raise TraceError(
            f"{where}: expected ascending times, but this one is {last_s - arrival_s:g} s before the previous one"
        )
    return arrival_s


def _checked_pieces(where: str, fields: Mapping[str, Any], num_prompt_tokens: int) -> tuple[int, ...]:
    names = fields.get("hash_ids")
    if not isinstance(names, list) or not all(type(name) is int and 0 <= name <= MAX_PIECE_ID for name in names):
        raise TraceError(f"{where}: hash_ids: expected a list of ints from 0 to {MAX_PIECE_ID}, got {str(names)[:80]}")
    expected = -(-num_prompt_tokens // PIECE_TOKENS)
    if len(names) != expected:
        raise TraceError(f"{where}: hash_ids: expected {expected} for {num_prompt_tokens} tokens, got {len(names)}")
    return tuple(names)


# ---------------------------------------------------------------- other lengths


def scale_trace(trace: Trace, piece_tokens: int) -> Trace:
    """Return the trace with ``piece_tokens`` tokens per piece and all lengths scaled accordingly (rounded up)."""

    def scaled(length: int) -> int:
        return -(-length * piece_tokens // trace.piece_tokens)

    requests = [
        request._replace(
            num_prompt_tokens=scaled(request.num_prompt_tokens), num_output_tokens=scaled(request.num_output_tokens)
        )
        for request in trace.requests
    ]
    return Trace(trace.name, requests, piece_tokens)


def cut_trace(trace: Trace, max_length: int) -> tuple[Trace, int]:
    """Truncate requests of more than ``max_length`` tokens, prompt and output together; also return how many.

    The output keeps its length as far as one prompt token fits before it; the prompt keeps its first tokens.
    """
    requests = [_cut_request(request, trace.piece_tokens, max_length) for request in trace.requests]
    num_cut = sum(before is not after for before, after in zip(trace.requests, requests, strict=True))
    return trace._replace(requests=requests), num_cut


def _cut_request(request: TraceRequest, piece_tokens: int, max_length: int) -> TraceRequest:
    if request.num_prompt_tokens + request.num_output_tokens <= max_length:
        return request
    num_output = min(request.num_output_tokens, max_length - 1)
    num_prompt = min(request.num_prompt_tokens, max_length - num_output)
    pieces = request.piece_ids[: -(-num_prompt // piece_tokens)]
    return TraceRequest(request.arrival_s, num_prompt, num_output, pieces)


# ---------------------------------------------------------------- tokens


def pieces(trace: Trace, request: TraceRequest) -> Iterator[tuple[int, int]]:
    """Yield the id and length of each piece of a request's prompt."""
    left = request.num_prompt_tokens
    for name in request.piece_ids:
        yield name, min(left, trace.piece_tokens)
        left -= trace.piece_tokens


def random_prompt(trace: Trace, index: int, vocab_size: int, seed: int) -> list[int]:
    """Return a prompt for a model: random tokens for each piece id, excluding the first few ids."""
    request = trace.requests[index]
    low = min(256, vocab_size // 2)
    if not request.piece_ids:
        return np.random.default_rng((seed, 0, index)).integers(low, vocab_size, request.num_prompt_tokens).tolist()
    prompt: list[int] = []
    for name, length in pieces(trace, request):
        drawn = np.random.default_rng((seed, 1, name)).integers(low, vocab_size, trace.piece_tokens)
        prompt += drawn[:length].tolist()
    return prompt
