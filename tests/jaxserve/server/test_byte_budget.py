"""The bytes of host memory that requests take are counted before they are taken, in all and by key."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jaxserve import RequestError, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.api.request import Request
from jaxserve.frames import HEADER
from jaxserve.server import byte_budget
from jaxserve.server.auth import Authenticator, Caller
from jaxserve.server.byte_budget import MIN_BUDGET_BYTES, ByteBudget, rendering_bytes, request_bytes
from jaxserve.server.errors import OutOfMemoryError, status_of
from jaxserve.server.metrics import metrics_text
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import Submit, pack, unpack
from tests.jaxserve.server.http_fakes import FakeEngine, make_server
from tests.observed_engine import ANYBODY, make_frontend, read_all

MODEL = model_pb2.Model(max_model_len=1000, vocab_size=300)
ONE, OTHER = (Caller(name, frozenset(), max_memory_share=0.5) for name in ("one", "other"))


def test_a_caller_has_a_share_and_all_have_a_limit() -> None:
    budget = ByteBudget(100)
    budget.take(ONE, 40)
    with pytest.raises(OutOfMemoryError, match="of this API key: those in flight take 40 bytes, limit 50"):
        budget.take(ONE, 11)
    with pytest.raises(RequestError, match="takes about 51 bytes of the server's memory; limit 50"):
        budget.take(OTHER, 51)
    budget.take(OTHER, 50)
    with pytest.raises(OutOfMemoryError, match="those in flight take 90 bytes, limit 100 .*, and this one 11; retry"):
        budget.take(ANYBODY, 11)
    budget.give_back(ONE, 40)
    budget.take(ONE, 50)
    assert budget.num_bytes == 100


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": tuple(range(1000, 21_000))},
        {"text": "a" * 100_000},
        {"token_ids": (1,), "params": SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0))},
        {"token_ids": (1,), "params": SamplingParams(allowed_token_ids=range(1000, 9000))},
        {"token_ids": (1,), "params": SamplingParams(stop=["é" * 250 + str(i) for i in range(64)])},
        {"chat": {"messages": [{"role": "user", "content": "a" * 50_000}] * 2}},
    ],
)
def test_the_estimate_covers_what_the_engine_process_reads(fields: dict[str, Any]) -> None:
    request = Request(request_id="one", **fields)
    frame = pack(Submit(1, request, 0.0), 1 << 24)
    tracemalloc.start()
    read = unpack(frame[HEADER.size :])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read.request == request
    assert (
        taken + len(frame)
        < request_bytes(request, model_pb2.Model(max_model_len=1 << 17))
        < 200 * len(frame) + (1 << 15)
    )


def test_what_renders_a_chat_may_take_is_a_part_of_the_budget() -> None:
    sizes = [rendering_bytes(ServerConfig(max_admitted_bytes=budget << 20)) >> 20 for budget in (64, 512, 1 << 20)]
    assert sizes == [32, 64, 512]


def test_what_a_request_asks_for_is_in_the_estimate() -> None:
    def of(**options: Any) -> int:
        return request_bytes(Request(token_ids=(1,) * 100, params=SamplingParams(**options)), MODEL)

    assert of(n=11) - of(n=1) == 10 * 4096
    assert of(prompt_logprobs=20) - of() == 80 * 100 * 21
    assert of(logprobs=4, max_tokens=50, n=3) - of(n=3) == 250 * 50 * 5 * 3
    assert of(prompt_logprobs=-1) - of() == 80 * 100 * 301
    assert of(logprobs=4, max_tokens=None) - of() == 250 * 1000 * 5


BODY = {"prompt": "a" * 4000, "max_tokens": 1}


def test_a_full_server_answers_503() -> None:
    """With the time to retry after; and its numbers show how full it is."""
    server = make_server(max_admitted_bytes=1 << 20)
    memory = server.frontend.ledger.memory
    assert server.post("/v1/completions", BODY).status == 200
    assert memory.num_bytes == 0
    memory.note("somebody", (1 << 20) - 100)
    answer = server.post("/v1/completions", BODY)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "limit 1048576 (max_admitted_bytes)" in answer.error["message"]
    assert status_of(OutOfMemoryError("")).grpc.name == "RESOURCE_EXHAUSTED"
    text = asyncio.run(metrics_text(server.frontend))
    assert 'jaxserve:admitted_bytes{model_name="tiny",engine="0"} 1048476' in text
    assert 'jaxserve:max_admitted_bytes{model_name="tiny",engine="0"} 1048576' in text
    report = server.get("/status.json").json()["requests"]
    assert (report["bytes"], report["max_bytes"], report["refused"]) == (1048476, 1048576, 1)
    memory.note("somebody", 100 - (1 << 20))
    assert server.post("/v1/completions", BODY).status == 200
    assert memory.num_bytes == 0


def test_a_request_that_never_fits_is_not_told_to_retry() -> None:
    server = make_server(max_admitted_bytes=1 << 20, max_request_bytes=1 << 19)
    body = {"prompt": ["a"] * 300, "max_tokens": 1}
    assert server.post("/v1/completions", body).status == 400


def test_outputs_that_wait_to_be_written_count() -> None:
    frontend = make_frontend()

    async def run() -> list[int]:
        found = list[int]()
        request = Request(request_id="one", text="a", params=SamplingParams(max_tokens=8))
        async for output in frontend.generate(frontend.entry(ANYBODY, request)):
            tokens = len(output.prompt_token_ids) + sum(len(one.token_ids) for one in output.outputs)
            assert frontend.ledger.memory.num_bytes == 40 * tokens + sum(len(one.text) for one in output.outputs)
            found.append(frontend.ledger.memory.num_bytes)
        return found

    assert min(asyncio.run(run())) > 0
    assert frontend.ledger.memory.num_bytes == 0
    asyncio.run(read_all(frontend))


def test_the_default_is_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((1 << 40, 1 << 38), (1 << 20, MIN_BUDGET_BYTES)):
        monkeypatch.setattr(byte_budget, "available_memory_bytes", lambda available=available: available)
        assert make_frontend().ledger.memory.limit_bytes == expected
    assert make_frontend(max_request_bytes=64 << 20).ledger.memory.limit_bytes == 1 << 30
    with pytest.raises(ConfigError, match="max_admitted_bytes: expected a number from 1048576 to"):
        ServerConfig(max_admitted_bytes=1)


def shares(tmp_path: Path, text: str, **settings: Any) -> list[float]:
    """What an auth file gives its keys."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return [caller.max_memory_share for caller in Authenticator(ServerConfig(auth_file=str(path), **settings)).callers]


def test_one_key_of_several_has_half(tmp_path: Path) -> None:
    one, share = "- {key: a, name: a}\n", "- {key: b, name: b, max_memory_share: 0.25}\n"
    assert shares(tmp_path, one) == [1.0]
    assert shares(tmp_path, one + share) == [0.5, 0.25]
    assert shares(tmp_path, share, api_key=["c"]) == [0.5, 0.25]
    for wrong in ("0", "1.5", "true", "x"):
        with pytest.raises(ConfigError, match="max_memory_share: expected a number above 0 and at most 1"):
            shares(tmp_path, f"- {{key: a, name: a, max_memory_share: {wrong}}}\n")


def test_a_full_key_leaves_room_for_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: a, name: one}\n- {key: b, name: two}\n")
    server = make_server(FakeEngine(), max_admitted_bytes=1 << 21, auth_file=str(keys))
    server.frontend.ledger.memory.note("one", 1 << 20)
    codes = [server.post("/v1/completions", BODY, authorization=f"Bearer {key}").status for key in ("a", "b")]
    assert codes == [503, 200]
