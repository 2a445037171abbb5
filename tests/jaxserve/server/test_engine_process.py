"""The engine process on the demo model, through its client."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import ConfigError, EngineDeadError, JaxserveError, RequestError, RequestOutput, SamplingParams
from jaxserve.api.errors import DeadlineError, OverloadedError, RequestFailedError
from jaxserve.api.outputs import CompletionOutput
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.parsers import ParserNames
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.errors import UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.settings import ServerConfig
from tests.faults.steps import slow_steps
from tests.observed_engine import ANYBODY
from tests.server_process import PROGRAMS_CACHE

PATIENCE_S = 120.0
SMALL: dict[str, Any] = {
    "model": "demo",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 8 << 20,
    "compilation_cache_dir": str(PROGRAMS_CACHE),
}
GREEDY = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
LONG = GREEDY.clone(ignore_eos=True, max_tokens=None)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FAULTS = Path(__file__).resolve().parent.parent.parent / "faults" / "injected"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines, all on one event loop, each for a limited time."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, PATIENCE_S))
        gc.collect()


@contextlib.contextmanager
def running(run: Run, arguments: dict[str, Any] | None = None, **settings: Any) -> Iterator[EngineClient]:
    """A client whose process runs while the block does."""
    client = EngineClient({**SMALL, **(arguments or {})}, ServerConfig(**settings))
    run(client.start())
    try:
        yield client
    finally:
        run(client.stop(0.0))


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose files slow down the steps of the shared client; see ``tests/faults/injected``."""
    return tmp_path_factory.mktemp("switches")


@pytest.fixture(scope="module")
def client(run: Run, switches: Path) -> Iterator[EngineClient]:
    """The client of most tests; it takes templates of a second, and asks for the times of requests, which logs show."""
    settings = {"chat_template_timeout": 1.0, "enable_log_requests": True}
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, switches)
        with running(run, {"scheduling_policy": "priority", "tool_call_parser": "auto"}, **settings) as made:
            yield made


def inject(patch: pytest.MonkeyPatch, switches: Path) -> None:
    """Lets engine processes that start read their faults in a folder."""
    patch.syspath_prepend(FAULTS)
    patch.setenv("JAXSERVE_TEST_FAULTS", str(switches))


@pytest.fixture(autouse=True)
def idle(run: Run, request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses the shared client its engine is idle, and every page is free."""
    yield
    if "client" in request.fixturenames:
        run(until_idle(request.getfixturevalue("client")))


async def until_idle(client: EngineClient) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any([await number(client, name) for name in names]):
        await asyncio.sleep(0.01)


async def number(client: EngineClient, name: str) -> float:
    """A metric, summed over its labels."""
    found = [metric.value for metric in await client.metrics() if metric.name == f"jaxserve:{name}"]
    assert found, name
    return sum(found)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.01)


def asked(text: str | None = "12+30=", params: SamplingParams = GREEDY, **options: Any) -> Request:
    options.setdefault("is_strict_length", False)
    return Request(text=text, params=params, **options)


async def outputs_of(client: EngineClient, request: Request, name: str = "name") -> list[RequestOutput]:
    return [output async for output in client.generate(dataclasses.replace(request, request_id=name))]


async def answer(client: EngineClient, request: Request, name: str = "name") -> list[CompletionOutput]:
    """The texts of a request, its deltas joined."""
    texts: dict[int, CompletionOutput] = {}
    for output in await outputs_of(client, request, name):
        for one in output.outputs:
            if one.index in texts:
                before = texts[one.index]
                one.text, one.token_ids = before.text + one.text, before.token_ids + one.token_ids
                one.logprobs = None if one.logprobs is None else [*(before.logprobs or []), *one.logprobs]
            texts[one.index] = one
    return [texts[index] for index in sorted(texts)]


# ---------------------------------------------------------------- texts


def test_the_client_says_what_runs(client: EngineClient) -> None:
    info = client.info
    assert info.max_model_len == 256
    assert info.default_fields == {"temperature": 0.0}
    model = info.model
    assert (model.architecture, model.root, model.vocab_size) == ("LlamaForCausalLM", "demo", 360)
    assert (model.max_num_seqs, model.max_num_batched_tokens) == (4, 64)
    assert [(axis.name, axis.size) for axis in model.mesh] == [("data", 1), ("tensor", 1)]
    assert (model.device, model.layout, model.kv_cache.page_size) == ("cpu", "tensor_parallel", 64)
    assert model.attention_backend and model.dtype and model.kv_cache.num_pages * 64 >= 1024
    assert sum(line.size_bytes for line in model.memory) > model.kv_cache.size_bytes > 0
    assert "KV pages" in [line.name for line in model.memory]
    assert client.info.parsers == ParserNames(None, "llama3_json")


@pytest.mark.slow  # test_llm.py has it in this process, and the shared engine compiles nothing while it serves
def test_the_engine_has_run_its_programs_when_it_is_ready(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("jaxserve"), "level", logging.INFO)
    for arguments, is_warm in (({}, True), ({"warm_up": False}, False)):
        with running(run, arguments):
            (seconds,) = re.findall(r"init engine took .* warm-up: ([0-9.]+) s", capfd.readouterr().err)
        assert (float(seconds) > 0) == is_warm


def test_deltas_join_to_the_text_that_comes_at_once(run: Run, client: EngineClient) -> None:
    outputs: list[RequestOutput] = run(outputs_of(client, asked()))
    assert "".join(one.text for output in outputs for one in output.outputs) == "42"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[0].prompt == "12+30=" and outputs[0].prompt_token_ids[0] == 1
    times = outputs[-1].metrics
    assert times is not None and times.num_generation_tokens == sum(
        len(one.token_ids) for output in outputs for one in output.outputs
    )
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert outputs[-1].outputs[0].finish_reason == "stop"
    (final,) = run(outputs_of(client, asked(params=GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))))
    assert final.outputs[0].text == "42"
    assert final.outputs[0].token_ids == [token for output in outputs for token in output.outputs[0].token_ids]


def test_token_ids_conversations_and_salts(run: Run, client: EngineClient) -> None:
    found, strings = run(client.tokenize("12+30=", True, True))
    token_ids = list(found)
    assert strings == ["<s>", "1", "2", "+", "3", "0", "="]
    by_ids = asked(None, token_ids=tuple(token_ids), cache_salt="own")
    assert run(answer(client, by_ids))[0].text == "42"
    chat = {"messages": [{"role": "user", "content": "12+30="}]}
    assert run(answer(client, asked(None, chat=chat)))[0].text == "42"
    text, found = run(client.render_chat(chat))
    assert (text, list(found)) == ("<s><|user|>12+30=<|assistant|>", [1, 4, *token_ids[1:], 5])
    assert run(client.detokenize(token_ids)) == "<s>12+30="
    assert run(client.detokenize(token_ids, skip_special_tokens=True)) == "12+30="
    found, strings = run(client.tokenize("12", add_special_tokens=False))
    assert (list(found), strings) == (token_ids[1:3], [])


def test_several_samples_with_logprobs(run: Run, client: EngineClient) -> None:
    params = GREEDY.clone(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    joined = run(answer(client, asked(params=params)))
    final_only = asked(params=params.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    (final,) = run(outputs_of(client, final_only))
    assert [one.index for one in final.outputs] == [0, 1, 2]
    assert [(one.text, one.token_ids, one.logprobs) for one in joined] == [
        (one.text, one.token_ids, list(one.logprobs or ())) for one in final.outputs
    ]
    for one in final.outputs:
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids) == 6
        chosen = [position[token].logprob for position, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(chosen))
    assert final.prompt_logprobs is not None and not final.prompt_logprobs[0]
    assert len(final.prompt_logprobs) == len(final.prompt_token_ids)


def test_frames_longer_than_any_buffer(run: Run, client: EngineClient) -> None:
    token_ids = [*range(256)] * 4000
    texts = [run(client.detokenize(token_ids[:count])) for count in (256, len(token_ids))]
    assert len(texts[1]) > 1_000_000
    assert texts[1].startswith(texts[0][:100])
    with pytest.raises(RequestError, match="message of 681[0-9]* bytes is too long; the limit is 67108864 bytes"):
        run(outputs_of(client, asked("x" * (65 << 20))))


def test_structured_outputs(run: Run, client: EngineClient) -> None:
    params = GREEDY.clone(structured_outputs={"choice": ["yes", "no"]})
    assert run(answer(client, asked(params=params)))[0].text in ("yes", "no")


def test_embeddings(run: Run, client: EngineClient) -> None:
    last, mean = PoolingParams(), PoolingParams(pooling="mean", normalize=False)
    (one,), (other,) = (run(outputs_of(client, asked("12+30=", pooling=pooling))) for pooling in (last, mean))
    assert one.embedding is not None and other.embedding is not None
    assert len(one.prompt_token_ids) == 7
    assert np.linalg.norm(one.embedding) == pytest.approx(1.0)
    assert len(other.embedding) == len(one.embedding) == 128 and other.embedding != one.embedding
    with pytest.raises(RequestError, match="out of vocabulary"):
        run(outputs_of(client, asked(None, token_ids=(360,), pooling=PoolingParams())))


def test_a_slow_reader_gets_joined_deltas(run: Run, client: EngineClient) -> None:
    async def read() -> list[int]:
        counts: list[int] = []
        async for output in client.generate(asked(params=LONG, request_id="slow")):
            counts += [len(one.token_ids) for one in output.outputs]
            await asyncio.sleep(0.2)
        return counts

    counts = run(read())
    assert sum(counts) == 256 - 7
    assert max(counts) > 10


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("request_", "message", "parameter"),
    [
        (asked(None, token_ids=(1, 360)), "token id 360 is out of vocabulary", None),
        (asked(params=GREEDY.clone(logprobs=21)), "logprobs must be at most 20", "logprobs"),
        (asked(params=GREEDY.clone(stop_token_ids=[400])), "stop_token_ids must have token ids", "stop_token_ids"),
        (asked(params=GREEDY.clone(extra_args={"a": 1})), "unknown argument 'a' in extra_args", "extra_args"),
        (asked(params=GREEDY.clone(max_tokens=250), is_strict_length=True), "you requested 250 output", "max_tokens"),
        (asked("1" * 256, is_strict_length=True), "However, you requested 32 output tokens", "input_tokens"),
        (asked("1" * 256), "maximum context length is 256 tokens. However, you requested 1 output", "input_tokens"),
        (asked(params=GREEDY.clone(structured_outputs={"regex": "("})), "cannot be compiled", None),
        (asked(None, chat={"messages": [{"role": "x", "content": ""}]}), "expected role user or assistant", None),
    ],
    ids=range(9),
)
def test_wrong_requests_fail_alone(
    run: Run, client: EngineClient, request_: Request, message: str, parameter: str | None
) -> None:
    async def both() -> Any:
        return await asyncio.gather(
            outputs_of(client, request_, "wrong"), answer(client, asked(), "right"), return_exceptions=True
        )

    wrong, right = run(both())
    assert right[0].text == "42"
    assert isinstance(wrong, RequestError) and not isinstance(wrong, RequestFailedError)
    assert message in str(wrong)
    assert parameter is None or wrong.parameter == parameter


def test_cut_prompts_and_outputs(run: Run, client: EngineClient) -> None:
    special = asked("7" * 300, truncate_prompt_tokens=-1)
    output = run(outputs_of(client, special))[0]
    assert len(output.prompt_token_ids) == 256 - 32
    kept = run(outputs_of(client, asked("aa 12+30=", truncate_prompt_tokens=6)))[0]
    assert kept.prompt_token_ids == list(run(client.tokenize("12+30=", add_special_tokens=False))[0])
    bare = run(outputs_of(client, asked(add_special_tokens=False)))[0]
    assert bare.prompt_token_ids == kept.prompt_token_ids
    cut = run(answer(client, asked(params=LONG.clone(max_tokens=10_000))))[0]
    assert (len(cut.token_ids), cut.finish_reason) == (256 - 7, "length")


def test_a_looping_template_fails_alone_within_its_limit(run: Run, client: EngineClient) -> None:
    chat = {"messages": [{"role": "user", "content": "12+30="}]}

    async def all_of_them() -> tuple[list[Any], float]:
        began = time.monotonic()
        bombs = [
            outputs_of(client, asked(None, chat={**chat, "chat_template": LOOP}), f"bomb-{index}") for index in range(3)
        ]
        good = [answer(client, asked(None, chat=chat), "good"), answer(client, asked(), "plain")]
        return await asyncio.gather(*bombs, *good, return_exceptions=True), time.monotonic() - began

    found, seconds = run(all_of_them())
    for error in found[:3]:
        assert isinstance(error, RequestError)
        assert "the chat template failed: not done within 1 s" in str(error)
    assert [texts[0].text for texts in found[3:]] == ["42", "42"]
    assert seconds < 20


def test_a_name_in_use_is_refused(run: Run, client: EngineClient) -> None:
    async def twice() -> None:
        first = client.generate(asked(params=LONG, request_id="twin"))
        await anext(first)
        with pytest.raises(RequestError, match="request id 'twin' is in use"):
            await outputs_of(client, asked(), "twin")
        await first.aclose()

    run(twice())


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("nothing", {}, "unknown control method 'nothing'"),
        ("detokenize", {"token_ids": [400], "skip_special_tokens": False}, "token id 400 is out of vocabulary"),
        ("tokenize", {"wrong": 1}, "control method tokenize failed: TypeError"),
        ("stop_profile", {}, "no profile is being recorded"),
    ],
    ids=range(4),
)
def test_wrong_questions_are_answered(
    run: Run, client: EngineClient, method: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(JaxserveError, match=message):
        run(client._query(method, **arguments))


def test_frames_that_make_no_sense_are_dropped(run: Run, client: EngineClient) -> None:
    for body in (b"", b"\xff\xff\xff", b"\x0a\x02\x0a\x00"):
        client._writer.write(len(body).to_bytes(4, "big") + body)
    assert run(answer(client, asked()))[0].text == "42"


# ---------------------------------------------------------------- requests that end early


@pytest.mark.parametrize("phase", ["at once", "preparing", "queue", "prefill", "decode"])
def test_leaving_frees_everything_in_every_phase(run: Run, client: EngineClient, phase: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "chat_template": LOOP}

    async def read(request: Request, decoding: asyncio.Event) -> None:
        async for _ in client.generate(dataclasses.replace(request, request_id="left")):
            decoding.set()

    async def leave() -> None:
        others = [asyncio.ensure_future(outputs_of(client, asked(params=LONG), f"other-{i}")) for i in range(4)]
        if phase in ("queue", "decode"):
            await until(lambda: is_at(client, "num_requests_running", 4))
        if phase != "queue":
            others.pop().cancel()
        prompt = "7" if phase == "decode" else "7" * 200
        request = asked(None, chat=chat) if phase == "preparing" else asked(prompt, params=LONG)
        decoding = asyncio.Event()
        reading = asyncio.ensure_future(read(request, decoding))
        if phase == "queue":
            await until(lambda: is_at(client, "num_requests_waiting", 1))
        elif phase == "decode":
            await decoding.wait()
        elif phase != "at once":
            await asyncio.sleep(0.02)
        reading.cancel()
        for other in others:
            other.cancel()
        await asyncio.gather(reading, *others, return_exceptions=True)
        assert reading.cancelled()

    run(leave())


async def is_at(client: EngineClient, name: str, value: float) -> bool:
    return await number(client, name) == value


def test_aborted_requests_end_with_what_they_have(run: Run, client: EngineClient) -> None:
    async def abort() -> tuple[list[CompletionOutput], list[str]]:
        reading = asyncio.ensure_future(answer(client, asked(params=LONG), "aborted"))
        await until(lambda: is_at(client, "num_requests_running", 1))
        names = await client.abort(["aborted", "unknown", "abort"])
        return await reading, names

    texts, names = run(abort())
    assert names == ["aborted"]
    assert texts[0].finish_reason == "abort"
    assert run(client.abort(["aborted"])) == []


RENDERING = {"messages": [{"role": "user", "content": "x"}], "chat_template": LOOP}
"""A conversation whose template takes a second, until it is killed."""


def test_a_request_is_aborted_while_its_template_renders(run: Run, client: EngineClient) -> None:
    async def abort() -> tuple[list[CompletionOutput], list[str]]:
        reading = asyncio.ensure_future(answer(client, asked(None, chat=RENDERING), "rendering"))
        await asyncio.sleep(0.1)
        names = await client.abort(["rendering", "unknown", ""])
        return await reading, names

    texts, names = run(abort())
    assert names == ["rendering"]
    assert [(one.text, one.finish_reason) for one in texts] == [("", "abort")]


def test_a_deadline_while_a_template_renders(run: Run, client: EngineClient) -> None:
    begin_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"deadline exceeded: not finished within 0\.2 s"):
        run(outputs_of(client, asked(None, chat=RENDERING, timeout_s=0.2)))
    assert time.monotonic() - begin_s < 0.9  # not when the template is killed


def test_a_deadline_mid_decode(run: Run, client: EngineClient, switches: Path) -> None:
    async def read() -> int:
        count = 0
        with pytest.raises(DeadlineError, match="deadline exceeded"):
            async for output in client.generate(asked(params=LONG, timeout_s=1.0, request_id="late")):
                count += sum(len(one.token_ids) for one in output.outputs)
        return count

    with slow_steps(switches, 0.02):  # 249 tokens take at least 5 s
        assert 0 < run(read()) < 249


def test_a_deadline_in_the_queue_means_no_prefill(run: Run, client: EngineClient) -> None:
    async def wait() -> None:
        before = await number(client, "prompt_tokens")
        busy = [asyncio.ensure_future(outputs_of(client, asked(params=LONG), f"busy-{index}")) for index in range(4)]
        await until(lambda: is_at(client, "num_requests_running", 4))
        with pytest.raises(DeadlineError):
            await outputs_of(client, asked(timeout_s=0.05), "late")
        with pytest.raises(DeadlineError):
            await outputs_of(client, asked(timeout_s=1e-9), "never")
        await asyncio.gather(*busy)
        assert await number(client, "prompt_tokens") == before + 4 * 7

    run(wait())


def test_too_many_waiting_prompt_tokens_are_refused_at_once_and_the_rest_runs(run: Run, client: EngineClient) -> None:
    async def burst(text: str, count: int) -> list[Any]:
        request, config = asked(text, LONG.clone(max_tokens=40)), ServerConfig(max_num_queued_tokens=300)
        frontend = Frontend(config, client, "demo")
        frontend.open()

        async def ask(name: str) -> list[RequestOutput]:
            outputs = frontend.generate(frontend.entry(ANYBODY, dataclasses.replace(request, request_id=name)))
            return [output async for output in outputs]

        tasks = [ask(f"burst-{index}") for index in range(count)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(burst("7" * 140, 8))  # four run; of those that wait two have room
    refused = [one for one in found if not isinstance(one, list)]
    assert len(refused) == 2
    assert all(isinstance(one, OverloadedError) and "max_num_queued_tokens" in str(one) for one in refused)


# ---------------------------------------------------------------- operating


def test_the_prefix_cache_can_be_reset(run: Run, client: EngineClient) -> None:
    request = asked("7" * 130)
    run(outputs_of(client, request))
    assert run(outputs_of(client, request))[0].num_cached_tokens == 128
    run(client.reset_prefix_cache())
    assert run(outputs_of(client, request))[0].num_cached_tokens == 0


def test_a_running_engine_moves_to_another_mesh(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream goes on, ``info`` tells the new mesh, and what cannot be is the client's error."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with running(run, {"compile_sizes": {"decode": [4], "mixed": [64]}}) as client:

        async def main() -> None:
            alone = await answer(client, asked("reverse garden:", LONG.clone(max_tokens=150)))
            reading = asyncio.create_task(answer(client, asked("reverse garden:", LONG.clone(max_tokens=150))))
            for mesh, layout, message in [
                ("data=9", None, "the mesh needs 9 devices, but JAX has 2"),
                ("rows=2", None, "mesh: expected a size"),
                (None, "here.py:LAYOUT", r"expected one of .*expert_all_reduce.* \(parameter=layout"),
            ]:
                with pytest.raises(RequestError, match=message):
                    await client.reshard(mesh, layout)
            report = await client.reshard("data=2", None)
            assert report["to_mesh"] == {"data": 2, "tensor": 1} and report["num_pages"] > 0
            assert [(axis.name, axis.size) for axis in client.info.model.mesh] == [("data", 2), ("tensor", 1)]
            assert client.info.model.max_num_seqs == 8
            assert [one.token_ids for one in await reading] == [one.token_ids for one in alone]
            assert await number(client, "compiles_after_ready") == 0
            await until_idle(client)

        run(main())


@pytest.mark.slow
def test_an_engine_that_has_moved_starts_again_where_it_was(run: Run) -> None:
    """With as many devices as before, so that it can move back; if it cannot start there, then as it was given."""

    async def die_and_start(client: EngineClient) -> tuple[str, str]:
        await client.kill()
        await client.start()
        assert len(await answer(client, asked("reverse garden:"))) == 1
        model = client.info.model
        return ",".join(f"{axis.name}={axis.size}" for axis in model.mesh), model.layout

    arguments = {"tensor_parallel_size": 2, "compile_sizes": {"decode": [2, 4], "mixed": [64]}}
    with running(run, arguments) as client:

        async def main() -> None:
            given = ("data=1,tensor=2", "tensor_parallel")
            assert await die_and_start(client) == given
            for mesh, layout in (
                ("data=1,stage=2,tensor=1", "tensor_parallel"),
                ("data=1,tensor=1", "replicated"),
                ("data=1,tensor=2", "split_logits"),
            ):
                await client.reshard(mesh, layout)
                assert await die_and_start(client) == (mesh, layout)
            client.moved = {**client.moved, "mesh": "tensor=5", "tensor_parallel_size": 5}
            with pytest.raises(ConfigError, match="5"):
                await die_and_start(client)
            assert await die_and_start(client) == given

        run(main())


def test_a_profile_is_recorded(run: Run, client: EngineClient, tmp_path: Path) -> None:
    run(client.start_profile(str(tmp_path)))
    with pytest.raises(RequestError, match="a profile is being recorded already"):
        run(client.start_profile(str(tmp_path)))
    run(outputs_of(client, asked()))
    run(client.stop_profile())
    assert [*tmp_path.rglob("*.xplane.pb")]


@pytest.mark.parametrize("inside", [(), ("further",)])
def test_a_folder_that_takes_no_profile_is_named_at_once(
    run: Run, client: EngineClient, tmp_path: Path, inside: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path.joinpath("file", *inside)
    with pytest.raises(RequestFailedError, match=f"directory '{folder}' is not writable: "):
        run(client.start_profile(str(folder)))
    with pytest.raises(RequestError, match="no profile is being recorded"):
        run(client.stop_profile())


def test_a_profile_that_could_not_be_written_can_be_written_later(
    run: Run, client: EngineClient, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "by it"
    run(client.start_profile(str(folder)))
    folder.rmdir()
    folder.touch()
    with pytest.raises(RequestFailedError, match="the profile cannot be written"):
        run(client.stop_profile())
    with pytest.raises(RequestError, match="a profile is being recorded already"):
        run(client.start_profile(str(folder)))
    folder.unlink()
    run(client.stop_profile())
    assert [*folder.rglob("*.xplane.pb")]
    run(client.start_profile(str(folder)))
    run(client.stop_profile())


def test_nothing_has_compiled_while_it_served(run: Run, client: EngineClient) -> None:
    assert run(number(client, "compiles_after_ready")) == 0


def test_the_front_end_imports_no_jax() -> None:
    code = "import sys, jaxserve.server.engine_client; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert "jaxserve.server.engine_client" in modules
    assert not {"jax", "jaxlib", "transformers", "torch"} & set(modules)


# ---------------------------------------------------------------- the ends of processes


def test_a_client_without_a_process_says_so() -> None:
    client = EngineClient(SMALL, ServerConfig())
    with pytest.raises(UnavailableError, match="the engine is starting"):
        client.info  # noqa: B018
    with pytest.raises(UnavailableError, match="the engine is starting"):
        asyncio.run(client.metrics())
    assert not client.is_alive
    asyncio.run(client.stop(0.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "/nowhere/model"}, "/nowhere/model"),
        pytest.param(
            {"max_model_len": 100_000},
            "max_model_len=100000 exceeds the model's maximum of 512 positions",
            marks=pytest.mark.slow,  # a start each: test_config.py and test_models.py have these errors
        ),
        pytest.param(
            {"max_num_sequences": 3},
            "LLM has no argument 'max_num_sequences'; did you mean 'max_num_seqs'",
            marks=pytest.mark.slow,
        ),
        ({"hf_overrides": object()}, "the engine's arguments must be JSON values"),
    ],
    ids=range(4),
)
def test_a_bad_start_raises_what_the_process_raised(run: Run, arguments: dict[str, Any], message: str) -> None:
    client = EngineClient({**SMALL, **arguments}, ServerConfig())
    with pytest.raises(ConfigError, match=message):
        run(client.start())
    assert not client.is_alive


def test_a_process_that_ends_while_it_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match="the engine process ended while it started: it ended with status 1"):
        run(EngineClient(SMALL, ServerConfig()).start())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="the engine process cannot be started"):
        run(EngineClient(SMALL, ServerConfig()).start())


def test_a_start_that_is_given_up_leaves_no_process(run: Run) -> None:
    client = EngineClient(SMALL, ServerConfig())

    async def give_up() -> None:
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(1.0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()

    run(give_up())
    assert not client.is_alive


def process_id(client: EngineClient) -> int:
    assert isinstance(client._process, asyncio.subprocess.Process)
    return client._process.pid


def test_a_killed_process_fails_everything_at_once_and_can_be_started_again(run: Run) -> None:
    with running(run) as client:

        async def kill() -> list[Any]:
            waiting: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(outputs_of(client, asked(params=LONG), f"r{index}")) for index in range(8)
            ]
            await until(lambda: is_at(client, "num_requests_running", 4))
            os.kill(process_id(client), signal.SIGKILL)
            waiting.append(asyncio.ensure_future(client.metrics()))
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert "killed by SIGKILL" in await client.wait_ended()
            return found

        for error in run(kill()):
            assert isinstance(error, EngineDeadError)
            assert str(error) == "the engine process ended: it was killed by SIGKILL"
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            run(outputs_of(client, asked()))
        with pytest.raises(UnavailableError, match="the engine process has ended"):
            client.info  # noqa: B018
        run(client.start())
        assert run(answer(client, asked()))[0].text == "42"
        pid = process_id(client)
        run(leave_the_line(client))
        assert not Path(f"/proc/{pid}").exists()


async def leave_the_line(client: EngineClient) -> None:
    """The front end's end of the socket closes while a request runs: the process ends by itself."""
    assert client._process is not None
    reading = asyncio.ensure_future(outputs_of(client, asked(params=LONG), "left"))
    await until(lambda: is_at(client, "num_requests_running", 1))
    client._writer.close()
    assert await client._process.wait() == 0
    assert isinstance((await asyncio.gather(reading, return_exceptions=True))[0], EngineDeadError)


@pytest.mark.slow  # tests/faults/test_death.py has it with a whole server
def test_a_stopped_process_is_killed_and_one_that_rests_is_not(run: Run) -> None:
    with running(run, watchdog_timeout=2.0) as client:
        run(asyncio.sleep(4.0))
        assert run(answer(client, asked()))[0].text == "42"

        async def stop() -> None:
            os.kill(process_id(client), signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="it sent nothing for 2 s and was killed"):
                await outputs_of(client, asked())

        run(stop())


@pytest.mark.slow  # tests/faults/test_death.py has it with a whole server
def test_a_hung_step_is_written_down_and_ends_the_process(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, tmp_path)
    with running(run, watchdog_timeout=2.0) as client:
        assert run(answer(client, asked()))[0].text == "42"
        (tmp_path / "step-hangs").touch()
        with pytest.raises(EngineDeadError, match="it ended with status 70"):
            run(outputs_of(client, asked()))
    written = capfd.readouterr().err
    assert "no step was completed for 2 s; stacks of all threads:" in written and "in faulty" in written


@pytest.mark.slow  # tests/faults/test_death.py has it with a whole server
def test_a_failing_step_ends_the_process_with_its_reason_in_the_log_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, tmp_path)
    with running(run) as client:
        for request in (asked("tokenizer fault"), asked(params=GREEDY.clone(seed=666))):
            with pytest.raises(RequestFailedError, match="request bad failed: InjectedError, see the log"):
                run(outputs_of(client, request, "bad"))
        (tmp_path / "step-fails").touch()
        with pytest.raises(EngineDeadError) as caught:
            run(outputs_of(client, asked()))
        assert "secret" not in str(caught.value)
        assert "the engine failed; its log says why" in run(client.wait_ended())
        assert client._process is not None and client._process.returncode == 70
    assert "/secret/path" in capfd.readouterr().err


def test_stopping_lets_requests_end(run: Run) -> None:
    with running(run) as client:

        async def drain() -> list[CompletionOutput]:
            reading = asyncio.ensure_future(answer(client, asked(params=LONG)))
            await until(lambda: is_at(client, "num_requests_running", 1))
            await client.stop(60.0)
            return await reading

        assert run(drain())[0].finish_reason == "length"
        assert run(client.wait_ended()) == "it was stopped"


def test_requests_fail_together_and_stopping_at_once_ends_them_with_what_they_have(run: Run) -> None:
    with running(run, chat_template_timeout=60.0) as client:

        async def fail() -> list[Any]:
            requests = [asked(None, chat=RENDERING), asked(params=LONG)]
            reading = [asyncio.ensure_future(outputs_of(client, one, f"r{i}")) for i, one in enumerate(requests)]
            await until(lambda: is_at(client, "num_requests_running", 1))
            client.fail_requests(UnavailableError("the server shut down"))
            return await asyncio.gather(*reading, return_exceptions=True)

        async def cut() -> list[CompletionOutput]:
            await until_idle(client)
            reading = asyncio.ensure_future(answer(client, asked(params=LONG)))
            await until(lambda: is_at(client, "num_requests_running", 1))
            await client.stop(0.0)
            return await reading

        assert [str(error) for error in run(fail())] == ["the server shut down"] * 2
        assert run(cut())[0].finish_reason == "abort"
