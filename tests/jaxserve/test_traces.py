"""Request traces: reading them, other lengths, tokens, and how much of their prompts was there before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxserve.bench.traces import (
    MAX_PIECE_ID,
    Trace,
    TraceError,
    TraceRequest,
    cut_trace,
    random_prompt,
    read_trace,
    scale_trace,
)
from scripts.scheduler_simulation import symbolic_prompt, trace_reuse

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44"
MOONCAKE: dict[str, Any] = {"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}


def changed(**fields: Any) -> str:
    return json.dumps(MOONCAKE | fields)


def request_of(*names: int, length: int, output: int = 1) -> TraceRequest:
    return TraceRequest(0.0, length, output, names)


@pytest.fixture
def azure(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        (tmp_path / "azure.csv").write_text(AZURE + "\r\n".join(lines))
        return tmp_path / "azure.csv"

    return write


@pytest.fixture
def mooncake(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        (tmp_path / "mooncake.jsonl").write_text("\n".join(lines))
        return tmp_path / "mooncake.jsonl"

    return write


# ---------------------------------------------------------------- reading


def test_an_azure_trace(azure: Callable[..., Path]) -> None:
    trace = read_trace(azure(FIRST, "2023-11-16 18:15:50.9951690,396,109", "2023-11-17 00:00:00.0000000,1,2"))
    assert trace.name == "azure"
    first, second, third = trace.requests
    assert first == TraceRequest(0.0, 374, 44)
    assert second[1:] == (396, 109, ())
    assert second.arrival_s == pytest.approx(4.314579, abs=2e-6)
    assert third.arrival_s == pytest.approx(5 * 3600 + 44 * 60 + 13.31941, abs=2e-6)


def test_a_mooncake_trace(mooncake: Callable[..., Path]) -> None:
    path = mooncake(changed(), "", changed(timestamp=1500.5, input_length=512, hash_ids=[3]))
    assert read_trace(path).requests == [
        TraceRequest(0.0, 700, 5, (3, 9)),
        TraceRequest(pytest.approx(1.4735), 512, 5, (3,)),  # type: ignore[arg-type]
    ]
    assert len(read_trace(path, max_requests=1).requests) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,374,44", "TIMESTAMP: expected a date and time, got 'yesterday'"),
        ("2023-11-16 18:15:50,0,44", "ContextTokens: expected a number of tokens, at least 1, got 0"),
        ("2023-11-16 18:15:50,3,-4", "GeneratedTokens: expected a number of tokens, at least 1, got '-4'"),
        ("2023-11-16 18:15:50,3,4.5", "GeneratedTokens: .*got '4.5'"),
        ("2023-11-16 18:15:50,3", "GeneratedTokens: .*got None"),
        ("2023-11-16 18:15:45.6805900,3,4", "ascending times, but this one is 1 s before the previous one"),
    ],
)
def test_a_bad_azure_line_is_named(line: str, message: str, azure: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match=rf"azure\.csv:3: .*{message}"):
        read_trace(azure(FIRST, line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 3', r"expected a JSON object, got '\{\"timestamp\": 3' \("),
        ("[1]", "expected a JSON object, got list"),
        (changed(timestamp=None), "timestamp: expected milliseconds, got None"),
        (changed(timestamp=float("nan")), "timestamp: expected milliseconds, got nan"),
        (changed(timestamp=26), "expected ascending times, but this one is 0.001 s before"),
        (changed(input_length=0), "input_length: expected a number of tokens, at least 1, got 0"),
        (changed(output_length=True), "output_length: .*got True"),
        (json.dumps({"timestamp": 30, "input_length": 3, "output_length": 1}), "hash_ids: expected a list of ints"),
        (changed(hash_ids=[1, -1]), "hash_ids: expected a list of ints from 0 to"),
        (changed(hash_ids=[1, MAX_PIECE_ID + 1]), "hash_ids: expected a list of ints from 0 to"),
        (changed(hash_ids=[1]), "hash_ids: expected 2 for 700 tokens, got 1"),
    ],
)
def test_a_bad_mooncake_line_is_named(line: str, message: str, mooncake: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match=rf"mooncake\.jsonl:2: {message}"):
        read_trace(mooncake(changed(), line))


def test_files_that_are_no_traces(tmp_path: Path, azure: Callable[..., Path], mooncake: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match=r"x\.parquet: expected a trace in a \.csv .* or \.jsonl .* file, got '\.parq"):
        read_trace(tmp_path / "x.parquet")
    with pytest.raises(TraceError, match=r"absent\.csv: cannot be read: .*No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match=r"azure\.csv: expected at least one request, got none"):
        read_trace(azure())
    with pytest.raises(TraceError, match=r"mooncake\.jsonl: expected at least one request, got none"):
        read_trace(mooncake())
    (tmp_path / "other.csv").write_text("time,TIMESTAMP\n1,2\n")
    with pytest.raises(TraceError, match=r"other\.csv:1: expected the columns .*ContextTokens.*, got \['time', 'TIME"):
        read_trace(tmp_path / "other.csv")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match=r"binary\.jsonl: cannot be read: .*utf-8"):
        read_trace(tmp_path / "binary.jsonl")


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt_tokens", "reuse"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", 8819, 18_059_974, 0.0),
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 19366, 22_361_870, 0.0),
        ("mooncake/conversation_trace.jsonl", 12031, 144_793_823, 0.3736),
        ("mooncake/synthetic_trace.jsonl", 3993, 61_194_628, 0.6512),
    ],
)
def test_the_real_traces(name: str, num_requests: int, num_prompt_tokens: int, reuse: float, shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / name)
    assert len(trace.requests) == num_requests
    found = trace_reuse(trace, 16)
    assert found.num_prompt_tokens == num_prompt_tokens
    assert found.rate == pytest.approx(reuse, abs=1e-4)


# ---------------------------------------------------------------- other lengths and tokens


def test_scaling_keeps_pieces_and_rounds_up() -> None:
    trace = Trace("t", [request_of(1, 2, length=513, output=100), request_of(1, length=512, output=1)])
    scaled = scale_trace(trace, 8)
    assert scaled.requests == [request_of(1, 2, length=9, output=2), request_of(1, length=8, output=1)]
    assert symbolic_prompt(scaled, 0) == [1] * 8 + [2]
    assert symbolic_prompt(scaled, 1) == [1] * 8
    assert scale_trace(trace, 512) == trace


def test_cutting_keeps_the_output_and_the_first_tokens() -> None:
    requests = [request_of(1, 2, 3, length=12, output=3), request_of(4, length=2, output=30), request_of(4, length=4)]
    trace, num_cut = cut_trace(Trace("t", requests, piece_tokens=4), 10)
    assert num_cut == 2
    assert trace.requests == [
        request_of(1, 2, length=7, output=3),
        request_of(4, length=1, output=9),
        request_of(4, length=4),
    ]


def test_equal_names_are_equal_tokens_and_others_differ() -> None:
    requests = [request_of(5, 6, length=20), request_of(5, 7, length=32), TraceRequest(0.0, 16, 1)]
    trace = Trace("t", [*requests, requests[-1]], piece_tokens=16)
    for prompts in (
        [symbolic_prompt(trace, i) for i in range(4)],
        [random_prompt(trace, i, vocab_size=288, seed=1) for i in range(4)],
    ):
        assert [len(prompt) for prompt in prompts] == [20, 32, 16, 16]
        assert prompts[0][:16] == prompts[1][:16]
        assert prompts[0][16:] != prompts[1][16:20]
        assert len({tuple(prompt[:16]) for prompt in prompts}) == 3
    drawn = random_prompt(trace, 0, vocab_size=288, seed=1)
    assert drawn == random_prompt(trace, 0, vocab_size=288, seed=1) != random_prompt(trace, 0, vocab_size=288, seed=2)
    assert all(144 <= token < 288 for token in drawn)


# ---------------------------------------------------------------- reuse


def brute_force_reuse(trace: Trace, page_size: int) -> tuple[int, int]:
    """Token by token: every prefix of whole pages of every prompt so far, in a set."""
    known: set[tuple[int, ...]] = set()
    reused = 0
    prompts = [symbolic_prompt(trace, index) for index in range(len(trace.requests))]
    for prompt in prompts:
        found = 0
        while found + page_size < len(prompt) and tuple(prompt[: found + page_size]) in known:
            found += page_size
        reused += found
        known |= {tuple(prompt[:end]) for end in range(page_size, len(prompt) + 1, page_size)}
    return sum(map(len, prompts)), reused


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that share beginnings: each takes some pieces of an earlier one, cut anywhere, and adds its own."""
    piece_tokens = draw(st.integers(1, 6))
    requests: list[TraceRequest] = []
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([(), *(request.piece_ids for request in requests)]))
        names = (*parent[: draw(st.integers(0, len(parent)))], *draw(st.lists(st.integers(0, 3), max_size=3))) or (0,)
        last = draw(st.integers(1, piece_tokens))
        requests.append(request_of(*names, length=(len(names) - 1) * piece_tokens + last))
    return Trace("drawn", requests, piece_tokens)


@hypothesis.given(trace=traces(), page_size=st.integers(1, 9))
def test_reuse_is_that_of_a_brute_force_search(trace: Trace, page_size: int) -> None:
    assert tuple(trace_reuse(trace, page_size)) == brute_force_reuse(trace, page_size)


def test_reuse_computes_at_least_one_token() -> None:
    same = Trace("same", [request_of(1, 2, length=8)] * 3, piece_tokens=4)
    assert trace_reuse(same, 4) == (24, 8)
    assert trace_reuse(same, 1) == (24, 14)
    assert trace_reuse(same, 4).rate == pytest.approx(1 / 3)
    assert trace_reuse(Trace("own", [TraceRequest(0.0, 8, 1)] * 3), 4) == (24, 0)
