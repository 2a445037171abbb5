"""``jaxserve bench serve`` as a command, against small servers whose responses are known."""

import asyncio
import collections
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxserve.bench.serve.load import run_load
from jaxserve.bench.serve.metrics import DETAILS
from jaxserve.bench.serve.records import BenchRequest, BenchResponse
from jaxserve.cli import main
from jaxserve.server.proto.jaxserve.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from tests.jaxserve.fake_openai import Script, Seen, Wire, echo_script, fake_server, free_port, late

SMALL = ("--random-input-len", "5", "--random-output-len", "3", "--disable-tqdm")


def bench(tmp_path: Path, *flags: object) -> dict[str, Any]:
    """Runs the command and returns what it wrote."""
    written = ("--save-result", "--result-dir", tmp_path, "--result-filename", "out.json")
    main([str(flag) for flag in ("bench", "serve", *flags, *written)])
    return json.loads((tmp_path / "out.json").read_text())


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        flags = ("--num-prompts", 6, "--num-warmups", 2, "--temperature", 0, "--seed", 5, "--metadata", "who=me")
        found = bench(tmp_path, "--base-url", server.url, *SMALL, *flags, "--save-detailed")
    bodies = server.bodies("/v1/completions")
    assert len(bodies) == 1 + 2 + 6
    assert bodies[0] == bodies[1] == bodies[2] == bodies[3]  # the test request and the warm-ups are the first prompt
    assert len({str(body["prompt"]) for body in bodies}) == 6
    assert {(len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(5, 3, True)}
    assert {(body["model"], body["temperature"]) for body in bodies} == {("fake", 0.0)}
    assert (found["completed"], found["failed"], found["model_id"], found["who"]) == (6, 0, "fake", "me")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 18)
    assert found["generated_texts"] == [" 0 1 2"] * 6
    assert found["output_lens"] == [3] * 6
    assert all(len(gaps) == 2 for gaps in found["itls"])
    assert found["output_throughput"] == pytest.approx(18 / found["duration"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Starting initial single prompt test run...", "Initial test run completed."]
    assert lines[lines.index("============ Serving Benchmark Result ============") + 1] == (
        "Successful requests:                     6         "
    )
    assert lines[-1] == "=" * 50


METRICS = """# TYPE {server}:spec_decode_num_drafts_total counter
{server}:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
{server}:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 1.0
{server}:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {tokens}
{server}:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} 9.0
{server}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
{server}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
"""


@pytest.mark.parametrize("server_name", ["vllm", "jaxserve"])
def test_drafts_of_the_run_are_reported(server_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM reports them: what the server counted meanwhile, not what it had counted before."""
    with fake_server() as server:
        before = METRICS.format(server=server_name, drafts=3, tokens=6, first=2, second=1)
        server.metrics = [before, METRICS.format(server=server_name, drafts=13, tokens=26.0, first=10, second=5)]
        found = bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 2)
        assert found["spec_decode_per_position_acceptance_rates"] == [0.8, 0.4]
        names = ("acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens", "accepted_tokens")
        assert [found[f"spec_decode_{name}"] for name in names] == [60.0, 2.2, 10, 20, 12]
        server.metrics = [before, before]
        assert set(bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 2)) == KEYS, "no drafts"
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("---------------Speculative Decoding---------------")
    assert lines[start + 1 : start + 10] == [
        "Acceptance rate (%):                     60.00     ",
        "Acceptance length:                       2.20      ",
        "Drafts:                                  10        ",
        "Draft tokens:                            20        ",
        "Accepted tokens:                         12        ",
        "Per-position acceptance (%):",
        "  Position 0:                            80.00     ",
        "  Position 1:                            40.00     ",
        "=" * 50,
    ]


KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
}


def test_keys_of_the_result_are_vllms(tmp_path: Path) -> None:
    with fake_server() as server:
        found = bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 2)
    assert set(found) == KEYS
    assert not set(DETAILS) & KEYS
    assert not [name for name, value in found.items() if isinstance(value, list)]  # none of each request
    assert (found["request_rate"], found["request_goodput"]) == ("inf", None)


def test_results_may_be_appended_and_named_by_themselves(tmp_path: Path) -> None:
    common = ("bench", "serve", *SMALL, "--num-prompts", "1", "--result-dir", str(tmp_path))
    with fake_server() as server:
        for _ in range(2):
            main([*common, "--base-url", server.url, "--append-result", "--result-filename", "all.jsonl"])
        main([*common, "--base-url", server.url, "--save-result", "--request-rate", "50", "--label", "mine"])
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]
    assert len(list(tmp_path.glob("mine-50.0qps-fake-*.json"))) == 1


def _failing(num_good: int) -> Script:
    """The first requests succeed."""
    asked = []

    async def script(seen: Seen, wire: Wire) -> None:
        if seen.path.startswith("/v1/c"):
            asked.append(seen)
            if len(asked) > num_good:
                await wire.respond(429, {"error": {"message": f"queue is full ({len(asked)})"}})
                return
        await echo_script(seen, wire)

    return script


def test_failures_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(_failing(3)) as server:
        flags = ("--num-prompts", 15, "--max-concurrency", 1, "--save-detailed")
        found = bench(tmp_path, "--base-url", server.url, *SMALL, *flags)
    assert (found["completed"], found["failed"]) == (2, 13)
    assert found["errors"][:3] == ["", "", "HTTP 429: queue is full (4)"]
    assert found["total_output_tokens"] == 6
    out = capsys.readouterr().out
    assert "Error 0: HTTP 429: queue is full (4)" in out
    assert "Error 9:" in out
    assert "Error 10:" not in out


def test_a_test_run_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(_failing(0)) as server, pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, *SMALL])
    assert len(server.bodies("/v1/completions")) == 1
    assert "the test request failed: HTTP 429: queue is full (1)" in capsys.readouterr().err


def test_the_test_run_is_repeated_until_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 0.01)
    num_asked = 0

    async def script(seen: Seen, wire: Wire) -> None:
        nonlocal num_asked
        num_asked += seen.path == "/v1/completions"
        if seen.path == "/v1/completions" and num_asked < 4:
            await wire.respond(503, {"error": {"message": "starting"}})
        else:
            await echo_script(seen, wire)

    with fake_server(script) as server:
        flags = ("--num-prompts", 1, "--ready-check-timeout-sec", 60)
        found = bench(tmp_path, "--base-url", server.url, *SMALL, *flags)
    assert (found["completed"], num_asked) == (1, 5)


@pytest.mark.parametrize("model", [(), ("--model", "fake")])
def test_a_server_that_does_not_listen_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[str, ...]
) -> None:
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 0.01)
    port = free_port()
    with late(fake_server(port=port)):
        flags = ("--base-url", f"http://127.0.0.1:{port}", "--num-prompts", 1, "--ready-check-timeout-sec", 60)
        assert bench(tmp_path, *flags, *model, *SMALL)["completed"] == 1


def _starting(num_refused: int) -> Script:
    """The first requests of each path are refused."""
    left = collections.defaultdict(lambda: num_refused)

    async def script(seen: Seen, wire: Wire) -> None:
        left[seen.path] -= 1
        if left[seen.path] >= 0:
            await wire.respond(503, {"error": {"message": "starting"}})
        else:
            await echo_script(seen, wire)

    return script


@pytest.mark.parametrize("model", [(), ("--model", "fake")])
def test_a_server_that_is_not_ready_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: tuple[str, ...]
) -> None:
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 0.01)
    with fake_server(_starting(3)) as server:
        flags = ("--base-url", server.url, "--num-prompts", 1, "--ready-check-timeout-sec", 60)
        assert bench(tmp_path, *flags, *model, *SMALL)["completed"] == 1
    asked = ([] if model else ["/v1/models"] * 4) + ["/tokenize"] * 4 + ["/v1/completions"] * 5
    assert [seen.path for seen in server.seen] == asked
    assert isinstance(server.bodies("/v1/completions")[0]["prompt"], list)  # tokens, no words
    out = capsys.readouterr().out
    assert out.startswith("Waiting up to 60 s for the server: ")
    assert out.count("Waiting up to") == 1


@pytest.mark.parametrize(("model", "path"), [((), "/v1/models"), (("--model", "fake"), "/tokenize")])
def test_a_server_that_is_not_ready_is_an_error_without_a_limit(
    capsys: pytest.CaptureFixture[str], model: tuple[str, ...], path: str
) -> None:
    with fake_server(_starting(3)) as server, pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, *model, *SMALL])
    assert [seen.path for seen in server.seen] == [path]
    assert f"{server.url}{path} responds with status 503: b'{{" in capsys.readouterr().err


def test_a_server_without_a_tokenizer_gets_words_and_the_result_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await (wire.respond(404, {}) if seen.path == "/tokenize" else echo_script(seen, wire))

    with fake_server(script) as server:
        found = bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 1)
    assert found["tokenizer_id"] == "words"
    assert len(server.bodies("/v1/completions")[0]["prompt"].split()) == 5
    assert f"{server.url} has no /tokenize (status 404): using plain words" in capsys.readouterr().err


def test_no_server_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        pass
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, *SMALL])
    assert f"cannot reach {server.url}" in capsys.readouterr().err


def test_a_server_that_does_not_say_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.respond(404, {})

    with fake_server(script) as server, pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, *SMALL])
    assert "the server does not list its models (status 404); pass --model" in capsys.readouterr().err


def test_keys_headers_and_further_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    extra = ("--extra-body", '{"min_tokens": 2, "top_p": 0.25}', "--top-p", 0.5, "--header", "X-A=b", "--logprobs", 3)
    with fake_server() as server:
        bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 1, *extra)
        bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 1, "--api-key", "given")
        bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 1, "--backend", "openai-chat", *extra)
    keys = [seen.headers["authorization"] for seen in server.seen]
    assert set(keys) == {"Bearer from-environment", "Bearer given"}
    first, chat = server.bodies("/v1/completions")[0], server.bodies("/v1/chat/completions")[0]
    assert (first["min_tokens"], first["top_p"], first["logprobs"]) == (2, 0.25, 3)
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)
    assert isinstance(chat["messages"][0]["content"], str)
    assert server.seen[0].headers["x-a"] == "b"
    assert "given" not in (tmp_path / "out.json").read_text()


def test_extra_bodies_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[1]"):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "serve", "--extra-body", text])
        assert "extra-body: expected a JSON object" in capsys.readouterr().err


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [(0, 3, 1, [1]), (200, 4, 2, [2]), (400, 5, 3, [3])]
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with fake_server() as server:
        flags = ("--dataset-name", "trace", "--dataset-path", path, "--disable-tqdm", "--save-detailed")
        found = bench(tmp_path, "--base-url", server.url, *flags)
    assert (found["input_lens"], found["output_lens"]) == ([3, 4, 5], [1, 2, 3])
    said = {name: found[name] for name in ("num_prompts", "request_rate", "burstiness", "trace_speed")}
    assert said == {"num_prompts": 3, "request_rate": None, "burstiness": None, "trace_speed": 1.0}
    starts = found["start_times"]
    assert starts[1] - starts[0] >= 0.1  # as recorded; a busy machine may send the first one late
    assert starts[2] - starts[0] >= 0.3
    assert all(body["ignore_eos"] for body in server.bodies("/v1/completions"))
    with fake_server() as server:
        found = bench(tmp_path, "--base-url", server.url, *flags, "--request-rate", 100, "--burstiness", 2)
    assert (found["request_rate"], found["burstiness"]) == (100.0, 2.0)
    assert "trace_speed" not in found


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with fake_server() as server:
        bench(tmp_path, "--base-url", server.url, *SMALL, "--num-prompts", 2, "--plot", tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_plot_without_its_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--plot", "a.png"])
    assert "plot needs matplotlib; run pip install 'jaxserve[research]'" in capsys.readouterr().err


# ---------------------------------------------------------------- the load itself


class FakeBackend:
    """Responses take as many turns of the loop as a request's tokens; the clock is its own."""

    def __init__(self):
        self.num_open = self.peak = 0
        self.sent: list[int] = []
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    async def send(self, request: BenchRequest) -> BenchResponse:
        self.num_open += 1
        self.peak = max(self.peak, self.num_open)
        self.sent.append(request.max_tokens)
        response = BenchResponse(self.now_s)
        for _ in range(request.max_tokens):
            await asyncio.sleep(0)
            self.now_s += 1.0
            response.chunk_s.append(self.now_s)
        self.num_open -= 1
        return response


def test_no_request_waits_for_an_response() -> None:
    backend = FakeBackend()
    asked = [BenchRequest("a", 5) for _ in range(20)]
    result = asyncio.run(run_load(backend, asked, [0.0] * 20, clock=backend.clock))
    assert backend.peak == 20
    assert [response.queue_s for response in result.responses] == [0.0] * 20
    assert result.duration_s == 100.0


@pytest.mark.parametrize("limit", [1, 3])
def test_at_most_so_many_at_a_time(limit: int) -> None:
    backend = FakeBackend()
    asked = [BenchRequest("a", i % 4 + 1) for i in range(20)]
    told: list[BenchResponse] = []
    result = asyncio.run(run_load(backend, asked, [0.0] * 20, limit, told.append, backend.clock))
    assert backend.peak == limit
    assert backend.sent == [one.max_tokens for one in asked]  # first come, first served
    assert [len(response.chunk_s) for response in result.responses] == backend.sent
    assert len(told) == 20
    waits = [response.queue_s for response in result.responses]
    assert waits == sorted(waits)
    assert waits[0] == 0.0 < waits[-1]


# ---------------------------------------------------------------- gRPC


class FakeModels(model_pb2_grpc.ModelServiceServicer):
    """One model, once it was asked for a few times."""

    def __init__(self, num_refused: int = 0):
        self.num_refused = num_refused
        self.num_asked = 0

    async def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:
        self.num_asked += 1
        if self.num_asked <= self.num_refused:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is starting")
        if request.model == "other":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        return model_pb2.GetModelResponse(model=model_pb2.Model(id="small", vocab_size=600, max_model_len=64))


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Two tokens a message, until there are as many as asked for; prompts of seven tokens are refused."""

    def __init__(self):
        self.seen: list[Any] = []
        self.metadata: list[dict[str, str]] = []

    async def StreamGenerate(self, request: Any, context: Any) -> Any:
        self.seen.append(request.request)
        self.metadata.append({str(name): str(value) for name, value in context.invocation_metadata()})
        num_prompt, left = len(request.request.token_ids.ids), request.request.sampling_params.max_tokens
        if num_prompt == 7:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "seven is too many")
        is_first = True
        while left > 0:
            message = generation_pb2.StreamGenerateResponse(completions=[generation_pb2.Completion(text="ab")])
            if is_first:
                message.prompt.num_tokens = num_prompt
            is_first = False
            left -= 2
            if left <= 0:
                total = request.request.sampling_params.max_tokens
                message.usage.prompt_tokens, message.usage.completion_tokens = num_prompt, total
            yield message


@contextlib.contextmanager
def grpc_server(generation: FakeGeneration, models: FakeModels | None = None, port: int = 0) -> Iterator[str]:
    """A gRPC server in a thread of its own while the block runs; gives its address."""
    loop = asyncio.new_event_loop()
    is_ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        nonlocal port
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(models or FakeModels(), server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        is_ready.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_ready.wait(10)
        yield f"127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_grpc(tmp_path: Path) -> None:
    generation = FakeGeneration()
    flags = ("--backend", "grpc", "--num-prompts", 4, "--temperature", 0.5, "--api-key", "secret", "--save-detailed")
    extra = ("--extra-body", '{"cache_salt": "s", "sampling_params": {"top_k": 3}}')
    with grpc_server(generation) as target:
        found = bench(tmp_path, "--base-url", target, *SMALL, *flags, *extra)
    assert (found["completed"], found["failed"], found["model_id"]) == (4, 0, "small")
    assert found["generated_texts"] == ["abab"] * 4
    assert (found["input_lens"], found["output_lens"]) == ([5] * 4, [3] * 4)
    assert [len(gaps) for gaps in found["itls"]] == [1] * 4  # two messages, three tokens
    request = generation.seen[-1]
    assert (request.model, request.cache_salt) == ("small", "s")
    params = request.sampling_params
    assert (params.temperature, params.ignore_eos, params.max_tokens, params.top_k) == (0.5, True, 3, 3)
    assert all(256 <= token < 600 for token in request.token_ids.ids)
    assert {metadata["authorization"] for metadata in generation.metadata} == {"Bearer secret"}


def test_a_grpc_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.bench.serve.ready.RETRY_S", 0.01)
    port, flags = free_port(), ("--backend", "grpc", *SMALL, "--num-prompts", 1, "--ready-check-timeout-sec", 60)
    with late(grpc_server(FakeGeneration(), port=port)):
        assert bench(tmp_path, *flags, "--port", port)["completed"] == 1
    generation, models = FakeGeneration(), FakeModels(num_refused=3)
    with grpc_server(generation, models) as target:
        assert bench(tmp_path, *flags, "--base-url", target)["completed"] == 1
    assert (models.num_asked, len(generation.seen)) == (4, 2)


def test_a_grpc_server_may_be_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--backend", "grpc", *SMALL)
    models = FakeModels(num_refused=1)
    with grpc_server(FakeGeneration(), models) as target:
        with pytest.raises(SystemExit, match="2"):
            bench(tmp_path, *flags, "--base-url", target)
        assert "the server does not report its model: UNAVAILABLE: the engine is starting" in capsys.readouterr().err
        limit = ("--ready-check-timeout-sec", 60)
        with pytest.raises(SystemExit, match="2"):  # at once: waiting would not help
            bench(tmp_path, *flags, "--base-url", target, "--model", "other", *limit)
    assert models.num_asked == 2
    assert "NOT_FOUND: no such model" in capsys.readouterr().err


def test_grpc_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with grpc_server(FakeGeneration()) as target:
        flags = ("--backend", "grpc", "--base-url", target, "--disable-tqdm", "--num-prompts", 2)
        with pytest.raises(SystemExit, match="2"):
            bench(tmp_path, *flags, "--random-input-len", 7)
        assert "gRPC INVALID_ARGUMENT: seven is too many" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            bench(tmp_path, *flags, "--extra-body", '{"sampling": 1}')
        assert "expected fields of a gRPC GenerateRequest" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            bench(tmp_path, *flags, "--random-input-len", 4, "--dataset-name", "custom", "--dataset-path", "a")
    with pytest.raises(SystemExit, match="2"):
        bench(tmp_path, *flags)
    assert "the server does not report its model: UNAVAILABLE" in capsys.readouterr().err


def test_rates_are_checked_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "serve", "--base-url", server.url, "--request-rate", "0"])
        assert not server.seen
    assert "request rate: expected requests per second above 0" in capsys.readouterr().err
