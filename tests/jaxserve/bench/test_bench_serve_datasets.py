"""``jaxserve bench serve``: the requests that its flags ask for."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.serve.arguments import add_arguments, complete, read_pairs
from jaxserve.bench.serve.datasets import make_requests
from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.ready import NotReadyError
from jaxserve.bench.serve.records import BenchRequest, BenchServeError
from jaxserve.bench.serve.tokens import (
    WORDS,
    PromptTokens,
    TokenSource,
    local_tokens,
    plain_range,
    server_tokens,
    word_tokens,
)
from jaxserve.bench.traces import TraceError
from tests.jaxserve.fake_openai import Seen, Wire, fake_server

IDS = TokenSource(range(1000, 2000))


def options(*flags: object) -> argparse.Namespace:
    """The flags of a command line, completed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return complete(parser.parse_args([str(flag) for flag in flags]))


def requests(*flags: object, tokens: TokenSource = IDS, needs_text: bool = False) -> list[BenchRequest]:
    """The requests of a command line."""
    return asyncio.run(make_requests(options(*flags), found(tokens), needs_text))


def found(tokens: TokenSource) -> PromptTokens:
    """Tokens that are known already."""
    return PromptTokens(nobody_looks, tokens)


async def nobody_looks() -> TokenSource:
    raise AssertionError("looked for tokens")


def counted() -> TokenSource:
    """Tokens whose texts are counted in words."""

    async def count(text: str) -> int:
        return len(text.split())

    return TokenSource(IDS.token_ids, None, count)


def test_random_prompts_have_the_lengths_asked_for() -> None:
    found = requests("--num-prompts", 5, "--random-input-len", 30, "--random-output-len", 7)
    assert [(len(one.prompt), one.num_prompt_tokens, one.max_tokens) for one in found] == [(30, 30, 7)] * 5
    assert len({tuple(one.prompt) for one in found}) == 5
    assert all(1000 <= token < 2000 for one in found for token in one.prompt)  # type: ignore[operator]


def test_random_lengths_spread_over_their_range() -> None:
    flags = ("--num-prompts", 400, "--input-len", 20, "--output-len", 10, "--random-range-ratio", 0.5)
    found = requests(*flags)
    lengths = {len(one.prompt) for one in found}
    assert (min(lengths), max(lengths)) == (10, 30)
    outputs = {one.max_tokens for one in found}
    assert (min(outputs), max(outputs)) == (5, 15)
    assert found == requests(*flags)
    assert found != requests(*flags, "--seed", 1)


def test_random_prompts_share_their_prefix() -> None:
    found = requests("--num-prompts", 3, "--random-prefix-len", 8, "--random-input-len", 4)
    prompts = [list(one.prompt) for one in found]
    assert {tuple(prompt[:8]) for prompt in prompts} == {tuple(prompts[0][:8])}
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 3
    assert [one.num_prompt_tokens for one in found] == [12] * 3


def test_words_take_the_place_of_tokens() -> None:
    (found,) = requests("--num-prompts", 1, "--random-input-len", 6, tokens=word_tokens())
    assert isinstance(found.prompt, str)
    assert len(found.prompt.split()) == 6
    assert set(found.prompt.split()) <= set(WORDS)


def test_chats_need_text() -> None:
    with pytest.raises(BenchServeError, match="no tokenizer can convert them to text; pass --tokenizer"):
        requests("--num-prompts", 1, needs_text=True)


def test_tokens_of_a_tokenizer_here() -> None:
    tokens = local_tokens("demo")
    (found,) = requests("--num-prompts", 1, "--random-input-len", 6, tokens=tokens, needs_text=True)
    assert isinstance(found.prompt, str)
    assert asyncio.run(tokens.count("hello"))  # type: ignore[misc]


def test_tokens_of_the_servers_tokenizer() -> None:
    async def main(url: str) -> tuple[TokenSource, list[BenchRequest], int]:
        client = HttpClient(url)
        tokens = await server_tokens(client, "fake")
        flags = options("--num-prompts", 2, "--random-input-len", 3)
        asked = await make_requests(flags, found(tokens), needs_text=True)
        count = await tokens.count("a b c")  # type: ignore[misc]
        await client.close()
        return tokens, asked, count

    with fake_server() as server:
        tokens, asked, count = asyncio.run(main(server.url))
    assert len(tokens.token_ids) == len(set(tokens.token_ids)) > 600
    assert all(word.startswith("t") for one in asked for word in one.prompt.split())  # type: ignore[union-attr]
    assert count == 3
    assert server.bodies("/tokenize")[0]["add_special_tokens"] is False


def tokens_of(status: int, body: Any) -> TokenSource:
    """What is found where each request gets the same response."""

    async def script(seen: Seen, wire: Wire) -> None:
        await wire.respond(status, body)

    async def main(url: str) -> TokenSource:
        client = HttpClient(url)
        try:
            return await server_tokens(client, "fake")
        finally:
            await client.close()

    with fake_server(script) as server:
        return asyncio.run(main(server.url))


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_a_tokenizer_gets_words(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens_of(status, {}).are_words
    assert f"has no /tokenize (status {status}): using plain words instead of tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "match"),
    [
        (503, {"error": "starting"}, r"/tokenize responds with status 503: .*starting"),
        (
            500,
            {"error": "it broke"},
            r"the server's tokenizer responded with status 500: .*it broke.*; pass --tokenizer",
        ),
        (401, {"error": "who?"}, r"status 401: .*who\?"),
        (429, {}, "status 429"),
        (200, {"tokens": []}, r"status 200: .*tokens"),
        (200, {"tokens": ["a"]}, r"status 200: .*tokens"),
        (200, [1], r"status 200: b'\[1\]'"),
    ],
)
def test_a_tokenizer_that_fails_is_an_error(status: int, body: Any, match: str) -> None:
    with pytest.raises(BenchServeError, match=match) as caught:
        tokens_of(status, body)
    assert isinstance(caught.value, NotReadyError) == (status == 503)


def test_special_tokens_are_not_drawn() -> None:
    assert plain_range(1000) == range(256, 1000)
    assert plain_range(100) == range(50, 100)


# ---------------------------------------------------------------- custom


def test_custom_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": [5, 6], "output_tokens": 4}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", "--num-prompts", 3)
    first, second = BenchRequest("one", 256), BenchRequest([5, 6], 256, 2)
    assert requests(*flags) == [first, second, first]
    assert [one.max_tokens for one in requests(*flags, "--custom-output-len", -1)] == [3, 4, 3]
    assert [one.max_tokens for one in requests(*flags, "--output-len", 9)] == [9, 9, 9]


def test_files_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(20)))
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 20)
    orders = [[one.prompt for one in requests(*flags, "--seed", seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(int, orders[0])) == list(range(20))  # type: ignore[arg-type]


def test_prompts_of_a_file_need_no_tokenizer_but_to_make_text_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", 2, "--disable-shuffle")
    for needs_text in (False, True):
        asked = asyncio.run(make_requests(options(*flags), PromptTokens(nobody_looks), needs_text))
        assert [one.prompt for one in asked] == ["one", "one"]
        with pytest.raises(BenchServeError, match="--tokenizer has no effect: prompts are sent as they are"):
            requests(*flags, "--tokenizer", "demo", needs_text=needs_text)
    path.write_text('{"prompt": "one"}\n{"prompt": [5, 6]}\n')
    assert [one.prompt for one in requests(*flags, tokens=word_tokens())] == ["one", [5, 6]]
    with pytest.raises(BenchServeError, match="no tokenizer can convert them to text"):  # words are not these ids' text
        requests(*flags, tokens=word_tokens(), needs_text=True)
    _, second = requests(*flags, "--tokenizer", "demo", tokens=local_tokens("demo"), needs_text=True)
    assert isinstance(second.prompt, str)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("no", "prompts.jsonl:1: expected a JSON object with prompt"),
        ('{"text": "a"}', "prompts.jsonl:1: expected a JSON object with prompt"),
        ('{"prompt": ""}', "expected text or token ids, and output tokens"),
        ('{"prompt": [1, "a"]}', "expected text or token ids, and output tokens"),
        ("", "has no usable request"),
    ],
)
def test_wrong_custom_files(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(BenchServeError, match=match):
        requests("--dataset-name", "custom", "--dataset-path", path)


# ---------------------------------------------------------------- ShareGPT


def _conversation(question: str, response: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": response}]}


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    kept = _conversation("a b c d e", "1 2 3 4 5 6")
    short, long = _conversation("hi", "1 2 3 4"), _conversation("w " * 1025, "1 2 3 4")
    path.write_text(json.dumps([short, kept, long, {"conversations": []}]))
    flags = ("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", 1)
    assert requests(*flags, tokens=counted()) == [BenchRequest("a b c d e", 6, 5)]
    assert requests(*flags, "--sharegpt-output-len", 50, tokens=counted()) == [BenchRequest("a b c d e", 50, 5)]
    # Without a tokenizer nothing is left out, and the server counts.
    found = requests(*flags, "--disable-shuffle", "--sharegpt-output-len", 50)
    assert found == [BenchRequest("hi", 50)]
    with pytest.raises(BenchServeError, match="no tokenizer to count tokens; pass --tokenizer or --sharegpt-output"):
        requests(*flags)


def test_recorded_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,2\n7,3\n")
    flags = ("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", 2, "--disable-shuffle")
    assert [(len(one.prompt), one.max_tokens) for one in requests(*flags)] == [(5, 2), (7, 3)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BenchServeError, match="expected columns num_prefill_tokens, num_decode_tokens"):
        requests(*flags)


def test_a_file_that_is_not_sharegpts(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text('{"a": 1}')
    with pytest.raises(BenchServeError, match="expected ShareGPT's JSON list of conversations"):
        requests("--dataset-name", "sharegpt", "--dataset-path", path, "--output-len", 4)


# ---------------------------------------------------------------- traces


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Three requests: the second begins as the first."""
    path = tmp_path / "trace.jsonl"
    rows = [(5000, 1024, 10, [1, 2]), (5500, 1000, 20, [1, 3]), (7000, 512, 30, [4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_traces_keep_their_times_and_what_they_share(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dataset-name", "trace", "--dataset-path", mooncake, "--num-prompts", 9)
    first, second, third = requests(*flags)
    assert capsys.readouterr().out == "The trace has only 3 requests: each is sent once\n"
    assert [one.arrival_s for one in (first, second, third)] == [0.0, 0.5, 2.0]
    assert [one.num_prompt_tokens for one in (first, second, third)] == [1024, 1000, 512]
    assert [one.max_tokens for one in (first, second, third)] == [10, 20, 30]
    assert first.prompt[:512] == second.prompt[:512] != third.prompt[:512]
    assert first.prompt[512:1000] != second.prompt[512:]
    assert set(first.prompt) <= set(IDS.token_ids)


def test_traces_are_scaled_cut_and_sped_up(mooncake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dataset-name", "trace", "--dataset-path", mooncake, "--trace-piece-tokens", 16)
    found = requests(*flags, "--num-prompts", 2, "--trace-speed", 4, "--trace-max-len", 33)
    assert [(len(one.prompt), one.max_tokens, one.arrival_s) for one in found] == [(32, 1, 0.0), (32, 1, 0.125)]
    assert "cut" not in capsys.readouterr().out
    found = requests(*flags, "--num-prompts", 2, "--trace-max-len", 20)
    assert [len(one.prompt) for one in found] == [19, 19]
    assert "Requests truncated to 20 tokens: 2 of 2" in capsys.readouterr().out


def test_a_rate_takes_the_place_of_a_traces_times(mooncake: Path) -> None:
    found = requests("--dataset-name", "trace", "--dataset-path", mooncake, "--request-rate", 5)
    assert [one.arrival_s for one in found] == [None] * 3


def test_azure_and_burstgpt(tmp_path: Path) -> None:
    azure, burst = tmp_path / "azure.csv", tmp_path / "burst.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,5,2\n2023-11-16 18:17:04.5,6,3\n")
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "3,ChatGPT,9,0,9,API log\n5,ChatGPT,5,2,7,API log\n6,GPT-4,6,3,9,API log\n"
    )
    for path in (azure, burst):
        found = requests("--dataset-name", "trace", "--dataset-path", path)
        assert [(len(one.prompt), one.max_tokens, one.arrival_s) for one in found] == [(5, 2, 0.0), (6, 3, 1.0)]
    burst.write_text("Timestamp,Request tokens,Response tokens\nsoon,1,2\n")
    with pytest.raises(TraceError, match="burst.csv:2: expected numbers in Timestamp, Request tokens"):
        requests("--dataset-name", "trace", "--dataset-path", burst)
    burst.write_text("Timestamp,Request tokens,Response tokens\n1,1,0\n")
    with pytest.raises(TraceError, match="at least one successful request"):
        requests("--dataset-name", "trace", "--dataset-path", burst)


@pytest.mark.parametrize(
    "name",
    [
        "mooncake/conversation_trace.jsonl",
        "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
        "lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    ],
)
def test_recorded_data(shared_data: Path, name: str) -> None:
    dataset = "sharegpt" if name.startswith("lengths") else "trace"
    found = requests("--dataset-name", dataset, "--dataset-path", shared_data / "traces" / name, "--num-prompts", 20)
    assert len(found) == 20
    assert all(len(one.prompt) == one.num_prompt_tokens > 0 < one.max_tokens for one in found)


# ---------------------------------------------------------------- flags


def test_defaults_depend_on_each_other() -> None:
    plain = options()
    assert (plain.base_url, plain.endpoint, plain.ignore_eos) == ("http://127.0.0.1:8000", "/v1/completions", True)
    assert (plain.random_input_len, plain.random_output_len, plain.num_prompts) == (1024, 128, 1000)
    assert options("--backend", "openai-chat").endpoint == "/v1/chat/completions"
    assert options("--backend", "grpc", "--host", "::1").base_url == "http://[::1]:8001"
    assert options("--base-url", "example.org:80").base_url == "http://example.org:80"
    assert not options("--no-ignore-eos").ignore_eos
    assert not options("--dataset-name", "custom", "--dataset-path", "a").ignore_eos
    assert (options().seed, options("--seed", 3).seed) == (0, 3)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--trace-speed", "2"], "--trace-speed applies to --dataset-name trace, not random"),
        (["--dataset-path", "a"], "--dataset-path: --dataset-name random goes without it"),
        (["--dataset-name", "trace"], "--dataset-path: --dataset-name trace goes with it"),
        (["--dataset-name", "trace", "--dataset-path", "a", "--input-len", "5"], "--input-len has no effect with"),
        (
            ["--input-len", "5", "--random-input-len", "6"],
            "--input-len and --random-input-len set the same value: pass only one",
        ),
        (["--num-prompts", "0"], "--num-prompts: expected at least 1, got 0"),
        (["--max-concurrency", "0"], "--max-concurrency: expected at least 1"),
        (["--random-range-ratio", "1"], "--random-range-ratio: expected 0 <= RATIO < 1"),
        (["--base-url", "a", "--port", "1"], "--base-url and --host, --port exclude each other"),
        (["--backend", "grpc", "--endpoint", "/v1"], "--endpoint and --insecure apply to HTTP"),
        (["--dataset-name", "trace", "--dataset-path", "a", "--trace-speed", "0"], "--trace-speed: expected a number"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], match: str) -> None:
    with pytest.raises(BenchServeError, match=match):
        options(*flags)


TRACE = ["--dataset-name", "trace", "--dataset-path", "a"]
CUSTOM = ["--dataset-name", "custom", "--dataset-path", "a"]
SHAREGPT = ["--dataset-name", "sharegpt", "--dataset-path", "a.json"]
SECURE = ["--base-url", "https://a"]


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ([*TRACE, "--ramp-up-strategy", "linear"], "--ramp-up-strategy has no effect: a trace is sent at its own"),
        ([*TRACE, "--ramp-up-start-rps", "1"], "--ramp-up-start-rps has no effect: a trace"),
        ([*TRACE, "--ramp-up-end-rps", "1", "--request-rate", "2"], "--ramp-up-end-rps has no effect: a trace"),
        ([*TRACE, "--burstiness", "2"], "--burstiness has no effect: a trace is sent at its own times without"),
        (
            [*TRACE, "--trace-speed", "2", "--request-rate", "5"],
            "--trace-speed has no effect: --request-rate replaces",
        ),
        ([*TRACE, "--disable-shuffle"], "--disable-shuffle has no effect: --dataset-name trace is never shuffled"),
        (["--disable-shuffle"], "--disable-shuffle has no effect: --dataset-name random is never shuffled"),
        (["--burstiness", "2"], "--burstiness has no effect: all requests are sent at once without --request-rate"),
        ([*CUSTOM, "--disable-shuffle", "--seed", "0"], "--seed has no effect: neither prompts nor their order"),
        ([*SHAREGPT, "--disable-shuffle", "--seed", "5"], "--seed has no effect"),
        (
            [*CUSTOM, "--disable-shuffle", "--seed", "1", "--request-rate", "2", "--burstiness", "inf"],
            "--seed has no",
        ),
        (["--insecure"], "--insecure has no effect: --base-url does not begin with https"),
        (["--ssl-ca-certs", "a"], "--ssl-ca-certs has no effect: --base-url does not begin"),
        (["--backend", "grpc", "--ssl-ca-certs", "a"], "--ssl-ca-certs has no effect: --base-url does not begin"),
        ([*SECURE, "--insecure", "--ssl-ca-certs", "a"], "--ssl-ca-certs has no effect: --insecure disables the check"),
        (
            ["--api-key", "a", "--header", "authorization=b"],
            "--api-key has no effect: --header sets Authorization",
        ),
        (["--save-detailed"], "--save-detailed has no effect: nothing is saved without --save-result"),
        (["--result-dir", "a"], "--result-dir has no effect: nothing is saved"),
        (["--result-filename", "a"], "--result-filename has no effect: nothing is saved"),
        (["--label", "a"], "--label has no effect: nothing is saved"),
        (["--metadata", "a=b"], "--metadata has no effect: nothing is saved"),
        (
            ["--save-result", "--result-dir", "a", "--result-filename", "/b"],
            "--result-dir has no effect: --result-filename is an absolute path",
        ),
        (["--base-url", "http://a/?b=c"], "--base-url: expected http://HOST:PORT/PATH without"),
        (["--base-url", "http://a/b", "--backend", "grpc"], "--base-url: expected http://HOST:PORT or https://"),
        (["--base-url", "grpc://a", "--backend", "grpc"], "--base-url: expected http://HOST:PORT or https://"),
        (["--endpoint", "/v1/chat/completions"], "/v1/chat/completions does not match --backend openai; chats need"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "does not match --backend openai-chat"),
    ],
)
def test_no_flag_is_accepted_and_ignored(flags: list[str], match: str) -> None:
    with pytest.raises(BenchServeError, match=match):
        options(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        [*TRACE, "--burstiness", "2", "--request-rate", "5"],
        [*TRACE, "--trace-speed", "2", "--seed", "3"],
        ["--burstiness", "2", "--request-rate", "5"],
        ["--burstiness", "2", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"],
        ["--burstiness", "1"],
        [*CUSTOM, "--disable-shuffle", "--seed", "3", "--request-rate", "2"],
        [*CUSTOM, "--seed", "3"],
        ["--dataset-name", "sharegpt", "--dataset-path", "a.csv", "--disable-shuffle", "--seed", "3"],
        [*SECURE, "--ssl-ca-certs", "a"],
        [*SECURE, "--insecure"],
        [*SECURE, "--ssl-ca-certs", "a", "--backend", "grpc"],
        ["--api-key", "a", "--header", "x-authorization=b"],
        ["--append-result", "--save-detailed", "--result-dir", "a", "--label", "b", "--metadata", "c=d"],
        ["--save-result", "--result-filename", "/b"],
        ["--base-url", "http://a/b", "--endpoint", "/v2/completions"],
    ],
)
def test_flags_that_go_together(flags: list[str]) -> None:
    options(*flags)


def test_lists_may_come_in_parts() -> None:
    found = options("--header", "a=b", "--header", "c=d", "--goodput", "ttft:1", "--goodput", "e2el:2")
    assert (found.header, found.goodput) == (["a=b", "c=d"], ["ttft:1", "e2el:2"])


def test_pairs() -> None:
    assert read_pairs("--header", ["a=b=c", " d = e"]) == {"a": "b=c", "d": "e"}
    with pytest.raises(BenchServeError, match="--header: expected NAME=VALUE, got 'ab'"):
        read_pairs("--header", ["ab"])
    with pytest.raises(BenchServeError, match="--header: a is repeated"):
        read_pairs("--header", ["a=1", "a=2"])
