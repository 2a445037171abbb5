"""``jaxserve bench serve``: what recorded times come to, and how it is printed."""

from typing import Any

import pytest

from jaxserve.bench.serve.metrics import (
    Selection,
    banner_lines,
    figures,
    output_length,
    read_goodput,
    read_metrics,
    read_percentiles,
    tpot_s,
)
from jaxserve.bench.serve.records import BenchResponse, BenchServeError


def response(start_s: float, chunk_s: list[float], num_output: int | None = None, **changes: Any) -> BenchResponse:
    """A response with chunks at these times."""
    texts = [f"<{i}>" for i in range(len(chunk_s))]
    return BenchResponse(start_s, 7, chunk_s=chunk_s, texts=texts, num_output_tokens=num_output, **changes)


# Two responses of 4 and 3 chunks, and one that failed; binary fractions, so that differences are exact.
ANSWERS = [
    response(10.0, [10.5, 10.75, 11.0, 11.5], num_output=4),
    response(10.25, [10.5, 11.5, 12.5], num_output=9, queue_s=0.25),
    BenchResponse(10.5, 7, error="HTTP 400: no"),
]


def test_times_of_an_response() -> None:
    first = ANSWERS[0]
    assert (first.ttft_s, first.latency_s, first.itls_s) == (0.5, 1.5, [0.25, 0.25, 0.5])
    assert tpot_s(first) == 1.0 / 3
    assert tpot_s(ANSWERS[1]) == 2.0 / 8  # by tokens, not by chunks
    assert tpot_s(response(0.0, [1.0], num_output=1)) is None
    failed = ANSWERS[2]
    assert (failed.ttft_s, failed.latency_s, failed.itls_s, output_length(failed)) == (0.0, 0.0, [], 0)


def test_tokens_are_the_chunks_where_the_server_does_not_count() -> None:
    assert output_length(response(0.0, [1.0, 2.0])) == 2
    assert output_length(response(0.0, [1.0, 2.0], num_output=5)) == 5
    assert output_length(response(0.0, [1.0, 2.0], num_output=0)) == 0


def test_figures() -> None:
    selection = Selection(("ttft", "tpot", "itl", "e2el"), (50.0, 99.9), max_concurrency=2)
    found = figures(ANSWERS, 4.0, selection)
    assert found["duration"] == 4.0
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (14, 13)
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 13 / 4
    assert found["total_token_throughput"] == 27 / 4
    assert found["request_goodput"] is None
    assert found["input_lens"] == [7, 7, 7]
    assert found["output_lens"] == [4, 9, 0]
    assert found["ttfts"] == [0.5, 0.25, 0.0]
    assert found["itls"] == [[0.25, 0.25, 0.5], [1.0, 1.0], []]
    assert found["latencies"] == [1.5, 2.25, 0.0]
    assert found["start_times"] == [10.0, 10.25, 10.5]
    assert found["queue_times"] == [0.0, 0.25, 0.0]
    assert found["generated_texts"] == ["<0><1><2><3>", "<0><1><2>", ""]
    assert found["errors"] == ["", "", "HTTP 400: no"]
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == found["p50_ttft_ms"] == 375.0
    assert found["std_ttft_ms"] == 125.0
    assert found["mean_itl_ms"] == 600.0
    assert found["median_itl_ms"] == 500.0
    assert found["mean_tpot_ms"] == pytest.approx((1000 / 3 + 250) / 2)
    assert found["mean_e2el_ms"] == 1875.0
    assert found["p99.9_e2el_ms"] == pytest.approx(1500 + 0.999 * 750)
    # Seconds from 10.0: chunks at 0.5, 0.5, 0.75 | 1.0, 1.5, 1.5 | 2.5.
    assert found["max_output_tokens_per_s"] == 3.0
    assert found["max_concurrent_requests"] == 2


def test_queueing_in_the_client() -> None:
    names = ("client_queue_time", "e2el_including_client_queue")
    found = figures(ANSWERS, 4.0, Selection(names, (99.0,), max_concurrency=1))
    assert found["mean_client_queue_time_ms"] == 125.0
    assert found["mean_e2el_including_client_queue_ms"] == 2000.0
    with pytest.raises(BenchServeError, match="client_queue_time needs max-concurrency"):
        Selection(("client_queue_time",))


def test_requests_that_touch_do_not_overlap() -> None:
    found = figures([response(0.0, [1.0]), response(1.0, [2.0])], 2.0, Selection())
    assert found["max_concurrent_requests"] == 1


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"ttft": 500.0, "tpot": 300.0}, 1),
        ({"tpot": 340.0, "e2el": 1500.0}, 1),
        ({"e2el": 1499.0}, 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], num_good: int) -> None:
    found = figures(ANSWERS, 2.0, Selection(goodput=limits))
    assert found["request_goodput"] == num_good / 2


def test_a_single_token_keeps_to_every_limit_of_tpot() -> None:
    assert figures([response(0.0, [1.0], 1)], 1.0, Selection(goodput={"tpot": 0.0}))["request_goodput"] == 1.0


def test_nothing_but_failures() -> None:
    found = figures([BenchResponse(0.0, error="no")], 1.0, Selection())
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["p99_itl_ms"]) == (0, 1, 0.0, 0.0)
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (0, 0.0)


def test_the_banner_is_vllms() -> None:
    selection = Selection(
        ("ttft", "e2el"), (90.0, 99.0), {"ttft": 300.0}, max_concurrency=8, request_rate=2.5
    )  # fmt: skip
    assert banner_lines(figures(ANSWERS, 4.0, selection), selection) == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           2.50      ",
        "Benchmark duration (s):                  4.00      ",
        "Total input tokens:                      14        ",
        "Total generated tokens:                  13        ",
        "Request throughput (req/s):              0.50      ",
        "Request goodput (req/s):                 0.25      ",
        "Output token throughput (tok/s):         3.25      ",
        "Peak output token throughput (tok/s):    3.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          6.75      ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          375.00    ",
        "Median TTFT (ms):                        375.00    ",
        "P90 TTFT (ms):                           475.00    ",
        "P99 TTFT (ms):                           497.50    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          1875.00   ",
        "Median E2EL (ms):                        1875.00   ",
        "P90 E2EL (ms):                           2175.00   ",
        "P99 E2EL (ms):                           2242.50   ",
        "==================================================",
    ]


def test_the_banner_leaves_out_what_was_not_asked_for() -> None:
    text = "\n".join(banner_lines(figures(ANSWERS, 4.0, Selection()), Selection()))
    for absent in ("concurrency:", "configured", "goodput", "E2EL"):
        assert absent not in text
    assert "-----Time per Output Token (excl. 1st token)------" in text
    assert "---------------Inter-token Latency----------------" in text


def test_lists_of_flags() -> None:
    assert read_metrics("ttft, itl") == ("ttft", "itl")
    assert read_percentiles("25,99.9") == (25.0, 99.9)
    assert read_goodput(["ttft:500", "e2el:2e3"]) == {"ttft": 500.0, "e2el": 2000.0}
    with pytest.raises(BenchServeError, match="percentile-metrics: unknown metric 'tttf'; metrics: ttft,"):
        read_metrics("ttft,tttf")
    for text in ("a", "101", ""):
        with pytest.raises(BenchServeError, match="metric-percentiles: expected comma-separated numbers from 0 to 100"):
            read_percentiles(text)
    for pair in ("ttft", "ttft:fast"):
        with pytest.raises(BenchServeError, match="goodput: expected METRIC:MILLISECONDS"):
            read_goodput([pair])
    with pytest.raises(BenchServeError, match="goodput: ttft is repeated"):
        read_goodput(["ttft:1", "ttft:2"])
    for pair in ("itl:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(BenchServeError, match="goodput: expected ttft, tpot, e2el with milliseconds >= 0"):
            read_goodput([pair])
