"""The requests of a load test: random, from ShareGPT, from a file, or from a recorded trace."""

import argparse
import asyncio
import csv
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.serve.effects import has_trace_times
from jaxserve.bench.serve.records import BenchRequest, BenchServeError
from jaxserve.bench.serve.tokens import PromptTokens, TokenSource
from jaxserve.bench.traces import Trace, TraceError, TraceRequest, cut_trace, random_prompt, read_trace, scale_trace

MAX_SHAREGPT_PROMPT, MAX_SHAREGPT_TOTAL, MIN_SHAREGPT = 1024, 2048, 4  # vLLM's filter
_LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


async def make_requests(
    options: argparse.Namespace, prompt_tokens: PromptTokens, needs_text: bool
) -> list[BenchRequest]:
    """Build the requests that the flags describe, in the order in which they are sent.

    Args:
        options: The flags of the load test.
        prompt_tokens: Source of random prompts' tokens; not searched for unless needed.
        needs_text: Whether prompts must be text, not token ids.

    Raises:
        BenchServeError: The data is missing or invalid.
        TraceError: A trace is missing or invalid.
    """
    if options.dataset_name == "custom":
        return await _custom(options, prompt_tokens, needs_text)
    tokens = await prompt_tokens.get()
    if options.dataset_name == "random":
        requests = random_requests(options, tokens)
    elif options.dataset_name == "trace":
        requests = trace_requests(options, tokens)
    elif Path(options.dataset_path).suffix == ".csv":
        requests = _as_many(length_requests(options, tokens), options)
    else:
        requests = _as_many([one async for one in sharegpt_requests(options, tokens)], options)
    return await _with_text(requests, tokens) if needs_text or tokens.are_words else requests


async def _custom(options: argparse.Namespace, prompt_tokens: PromptTokens, needs_text: bool) -> list[BenchRequest]:
    """Read the prompts of a file; the tokenizer is needed only to convert token ids to text."""
    requests = _as_many(_shuffled(list(custom_requests(options)), options), options)
    if needs_text and not all(isinstance(request.prompt, str) for request in requests):
        tokens = await prompt_tokens.get()
        return await _with_text(requests, TokenSource(()) if tokens.are_words else tokens)
    if options.tokenizer is not None:
        raise BenchServeError("--tokenizer has no effect: prompts are sent as they are in the file")
    return requests


async def _with_text(requests: list[BenchRequest], tokens: TokenSource) -> list[BenchRequest]:
    """Convert the token ids of requests to text."""
    decode = tokens.decode
    if decode is None:
        raise BenchServeError(
            "these prompts are token ids, and no tokenizer can convert them to text; pass --tokenizer"
        )
    limit = asyncio.Semaphore(64)

    async def as_text(request: BenchRequest) -> BenchRequest:
        if isinstance(request.prompt, str):
            return request
        async with limit:
            return BenchRequest(
                await decode(request.prompt), request.max_tokens, request.num_prompt_tokens, request.arrival_s
            )

    return list(await asyncio.gather(*map(as_text, requests)))


def random_requests(options: argparse.Namespace, tokens: TokenSource) -> list[BenchRequest]:
    """Draw random tokens: lengths uniform from ``length * (1 - ratio)`` to ``length * (1 + ratio)``, after one
    prefix."""
    generator = np.random.default_rng(options.seed)
    ids = np.asarray(tokens.token_ids)
    prefix = generator.choice(ids, options.random_prefix_len).tolist()
    count = options.num_prompts
    prompts = _lengths(generator, options.random_input_len, options.random_range_ratio, count, 0 if prefix else 1)
    outputs = _lengths(generator, options.random_output_len, options.random_range_ratio, count, 1)
    return [
        BenchRequest(prefix + generator.choice(ids, prompt).tolist(), output, len(prefix) + prompt)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _lengths(generator: np.random.Generator, length: int, ratio: float, count: int, least: int) -> list[int]:
    low, high = max(least, math.floor(length * (1 - ratio))), max(least, math.ceil(length * (1 + ratio)))
    return generator.integers(low, high, count, endpoint=True).tolist()


def trace_requests(options: argparse.Namespace, tokens: TokenSource) -> list[BenchRequest]:
    """Return the first requests of a trace, at the trace's own times unless a rate was given.

    Pieces that the trace marks as shared have the same tokens.
    """
    trace = read_any_trace(Path(options.dataset_path), options.num_prompts)
    if len(trace.requests) < options.num_prompts:
        print(f"The trace has only {len(trace.requests)} requests: each is sent once")
    if options.trace_piece_tokens is not None:
        trace = scale_trace(trace, options.trace_piece_tokens)
    if options.trace_max_len is not None:
        trace, num_cut = cut_trace(trace, options.trace_max_len)
        if num_cut:
            print(f"Requests truncated to {options.trace_max_len} tokens: {num_cut} of {len(trace.requests)}")
    found = []
    for index, request in enumerate(trace.requests):
        drawn = random_prompt(trace, index, len(tokens.token_ids), options.seed)
        arrival_s = request.arrival_s / options.trace_speed if has_trace_times(options) else None
        prompt = [tokens.token_ids[i] for i in drawn]
        found.append(BenchRequest(prompt, request.num_output_tokens, len(prompt), arrival_s))
    return found


def read_any_trace(path: Path, max_requests: int) -> Trace:
    """Read a trace of Mooncake, Azure or BurstGPT (omitting its failed requests).

    Raises:
        TraceError: The file is none of them, or has a line that cannot be read.
    """
    if path.suffix == ".csv":
        rows = _csv_rows(path)
        if all(name in rows[0] for name in _BURSTGPT_COLUMNS):
            found = [_burstgpt_request(path, i, row) for i, row in enumerate(rows, 2)]
            found = [one for one in found if one.num_output_tokens][:max_requests]
            if not found:
                raise TraceError(f"{path}: expected at least one successful request, got none")
            start_s = found[0].arrival_s
            return Trace(path.stem, [one._replace(arrival_s=one.arrival_s - start_s) for one in found])
    return read_trace(path, max_requests)


def _burstgpt_request(path: Path, line: int, row: dict[str, str]) -> TraceRequest:
    try:
        time, prompt, output = float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
    except (TypeError, ValueError):
        raise TraceError(f"{path}:{line}: expected numbers in {', '.join(_BURSTGPT_COLUMNS)}, got {row}") from None
    return TraceRequest(time, max(prompt, 1), output)


def length_requests(options: argparse.Namespace, tokens: TokenSource) -> list[BenchRequest]:
    """Draw random tokens of recorded lengths: a CSV file with the columns num_prefill_tokens and num_decode_tokens."""
    path = Path(options.dataset_path)
    rows = _shuffled(_csv_rows(path), options)[: options.num_prompts]
    generator = np.random.default_rng(options.seed)
    try:
        lengths = [tuple(max(1, int(row[name])) for name in _LENGTH_COLUMNS) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise BenchServeError(f"{path}: expected columns {', '.join(_LENGTH_COLUMNS)} of numbers") from None
    ids = np.asarray(tokens.token_ids)
    fixed = options.sharegpt_output_len
    return [BenchRequest(generator.choice(ids, p).tolist(), fixed or o, p) for p, o in lengths]


async def sharegpt_requests(options: argparse.Namespace, tokens: TokenSource) -> AsyncIterator[BenchRequest]:
    """Yield first questions of ShareGPT's conversations, with as many output tokens as the recorded response has.

    As in vLLM, very short and long ones are omitted.
    """
    count = tokens.count
    if count is None and options.sharegpt_output_len is None:
        raise BenchServeError("no tokenizer to count tokens; pass --tokenizer or --sharegpt-output-len")
    num_found = 0
    for turns in _shuffled(_conversations(Path(options.dataset_path)), options):
        if num_found == options.num_prompts:
            return
        num_prompt, num_output = 0, options.sharegpt_output_len or 0
        if count is not None:
            num_prompt, num_output = await count(turns[0]), num_output or await count(turns[1])
            is_short = num_prompt < MIN_SHAREGPT or (options.sharegpt_output_len is None and num_output < MIN_SHAREGPT)
            if is_short or num_prompt > MAX_SHAREGPT_PROMPT or num_prompt + num_output > MAX_SHAREGPT_TOTAL:
                continue
        num_found += 1
        yield BenchRequest(turns[0], num_output, num_prompt)


def _conversations(path: Path) -> list[tuple[str, str]]:
    """Return the first question and response of each conversation that has both."""
    try:
        found = json.loads(path.read_bytes())
        turns = [[turn["value"] for turn in item["conversations"][:2]] for item in found if item.get("conversations")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchServeError(f"{path}: expected ShareGPT's JSON list of conversations ({error!r})") from error
    return [(one[0], one[1]) for one in turns if len(one) == 2 and one[0]]


def custom_requests(options: argparse.Namespace) -> Iterator[BenchRequest]:
    """Yield prompts of a JSONL file: ``prompt`` is text or token ids, ``output_tokens`` is for --custom-output-len
    -1."""
    path = Path(options.dataset_path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BenchServeError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            prompt = fields["prompt"]
            output = fields["output_tokens"] if options.custom_output_len == -1 else options.custom_output_len
        except (ValueError, KeyError, TypeError) as error:
            raise BenchServeError(f"{path}:{number}: expected a JSON object with prompt ({error!r})") from error
        is_ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
        if not (isinstance(prompt, str) or is_ids) or not prompt or type(output) is not int or output < 1:
            raise BenchServeError(f"{path}:{number}: expected text or token ids, and output tokens, got {fields!r:.80}")
        yield BenchRequest(prompt, output, len(prompt) if is_ids else 0)


def _csv_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchServeError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise BenchServeError(f"{path}: expected at least one line, got none")
    return rows


def _shuffled(items: list[Any], options: argparse.Namespace) -> list[Any]:
    if options.disable_shuffle:
        return items
    return [items[i] for i in np.random.default_rng(options.seed).permutation(len(items))]


def _as_many(requests: list[BenchRequest], options: argparse.Namespace) -> list[BenchRequest]:
    """Return the requested number of requests, repeating those of small data sets."""
    if not requests:
        raise BenchServeError(f"{options.dataset_path}: has no usable request")
    if len(requests) < options.num_prompts:
        print(f"The data has only {len(requests)} requests: they are repeated, {options.num_prompts} in total")
    return [requests[i % len(requests)] for i in range(options.num_prompts)]
