"""``AsyncLLM`` with real models: streams equal offline outputs, requests come and go, nothing is left behind."""

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from jaxserve import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.hooks import (
    DeadlineError,
    Histogram,
    break_launches,
    hold_preparation,
    is_preparing,
    start_idle_engines,
    thread_state,
)

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "compilation_cache_dir": "",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
DELTA = RequestOutputKind.DELTA
STORY = "Once upon a time"
PROMPTS = [STORY, "Tim", "Lily and Tom went to the park", "The sun was", "A dog", "One day a bird"]
PATIENCE_S = 600.0

Main = Callable[[], Coroutine[Any, Any, None]]


def run(main: Main) -> None:
    """Runs a test's coroutine; one that hangs fails."""
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def read(engine: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **more: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **more)]


def value(engine: AsyncLLM, name: str, **labels: str) -> float:
    (found,) = [m.value for m in engine.get_metrics() if m.name == f"jaxserve:{name}" and m.labels == labels]
    return found


async def at_rest(engine: AsyncLLM) -> None:
    """Returns once the engine's thread has done all that was asked of it; then nothing runs and no page is held."""
    await engine.reset_prefix_cache()
    assert engine.get_num_unfinished_requests() == 0
    assert value(engine, "kv_cache_usage_perc") == 0
    assert value(engine, "num_requests_running") == value(engine, "num_requests_waiting") == 0


def added(outputs: list[RequestOutput], index: int = 0) -> CompletionOutput:
    """What deltas of a sample add up to."""
    parts = [one for output in outputs for one in output.outputs if one.index == index]
    assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=None if parts[0].logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


@pytest.fixture(scope="module")
def engine(stories_model: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(stories_model), **SETTINGS)
    yield made
    run(lambda: at_rest(made))
    assert value(made, "compiles_after_ready") == 0
    made.shutdown()


@pytest.fixture(scope="module")
def offline(stories_model: Path) -> Iterator[LLM]:
    with LLM(str(stories_model), **SETTINGS) as made:
        yield made


# ---------------------------------------------------------------- streams equal what is generated offline


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_equal_offline_outputs(kind: RequestOutputKind, engine: AsyncLLM, offline: LLM) -> None:
    params = [
        GREEDY,
        GREEDY.clone(stop="the", logprobs=2),
        SamplingParams(seed=5, n=3, max_tokens=12, ignore_eos=True),
        GREEDY.clone(prompt_logprobs=1),
        GREEDY.clone(stop="the", include_stop_str_in_output=True),
        SamplingParams(seed=1, max_tokens=30, logprobs=1, flat_logprobs=True, skip_special_tokens=False),
    ]
    params = [one.clone(output_kind=kind) for one in params]
    expected = offline.generate(PROMPTS, params, use_tqdm=False)

    async def main() -> None:
        streams = await asyncio.gather(*(read(engine, *pair) for pair in zip(PROMPTS, params, strict=True)))
        for outputs, whole in zip(streams, expected, strict=True):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[0].prompt_token_ids == whole.prompt_token_ids
            if kind is RequestOutputKind.FINAL_ONLY:
                assert len(outputs) == 1
            scored = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
            assert (len(scored) == 1) == (whole.prompt_logprobs is not None) or kind is not DELTA
            for one in whole.outputs:
                found = added(outputs, one.index) if kind is DELTA else outputs[-1].outputs[one.index]
                assert (found.text, found.token_ids) == (one.text, one.token_ids)
                assert (found.finish_reason, found.stop_reason) == (one.finish_reason, one.stop_reason)
                if one.logprobs is not None:
                    assert [set(entry) for entry in found.logprobs or ()] == [set(entry) for entry in one.logprobs]
                    assert found.cumulative_logprob == pytest.approx(one.cumulative_logprob, rel=1e-4)

    run(main)


def test_deltas_never_hold_half_a_character_or_part_of_a_stop_string(engine: AsyncLLM, offline: LLM) -> None:
    """Random tokens at a high temperature: this tokenizer spells what it lacks in bytes."""
    allowed = [*range(3, 259), *range(300, 330)]
    params = [
        SamplingParams(seed=seed, temperature=2.0, max_tokens=60, stop=["\n", "ab"], allowed_token_ids=allowed)
        for seed in range(6)
    ]
    expected = offline.generate(["é🙂"] * 6, params, use_tqdm=False)

    async def main() -> None:
        streams = await asyncio.gather(*(read(engine, "é🙂", one.clone(output_kind=DELTA)) for one in params))
        for outputs, whole in zip(streams, expected, strict=True):
            text = ""
            for output in outputs:
                text += output.outputs[0].text
                assert whole.outputs[0].text.startswith(text)
            assert text == whole.outputs[0].text
            assert "\n" not in text and "ab" not in text

    run(main)


def test_multi_byte_text_of_the_demo_model() -> None:
    """The demo model answers in ASCII; made to continue with any bytes, its deltas are still the whole text."""

    async def main() -> None:
        async with AsyncLLM("demo", **{**SETTINGS, "max_num_seqs": 2}, max_model_len=64) as engine:
            outputs = await read(engine, "12+30=", SamplingParams(temperature=0))
            assert outputs[-1].outputs[0].text == "42"
            conversation = [{"role": "user", "content": "Reverse abc"}]
            chat = [output async for output in engine.chat(conversation, SamplingParams(temperature=0))]
            assert chat[-1].outputs[0].text == "cba"
            tokenizer = engine.get_tokenizer()
            params = SamplingParams(seed=3, temperature=2.0, max_tokens=40, ignore_eos=True, output_kind=DELTA)
            wild = await read(engine, "é🙂", params)
            found = added(wild)
            assert found.text == tokenizer.decode(found.token_ids, skip_special_tokens=True)

    run(main)


def test_sixty_four_streams_each_get_their_own_tokens(engine: AsyncLLM, offline: LLM) -> None:
    lengths = [1 + (7 * number) % 23 for number in range(64)]
    prompts = [f"{PROMPTS[number % 6]} {number}" for number in range(64)]
    params = [GREEDY.clone(max_tokens=length, ignore_eos=True) for length in lengths]
    expected = {
        prompt: output.outputs[0]
        for prompt, output in zip(prompts, offline.generate(prompts, params, use_tqdm=False), strict=True)
    }

    async def main() -> None:
        streams = await asyncio.gather(
            *(
                read(engine, prompt, one.clone(output_kind=DELTA), request_id=f"request {number}")
                for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            )
        )
        for number, outputs in enumerate(streams):
            assert {output.request_id for output in outputs} == {f"request {number}"}
            assert {output.prompt for output in outputs} == {prompts[number]}
            found = added(outputs)
            assert found.token_ids == expected[prompts[number]].token_ids
            assert found.text == expected[prompts[number]].text
        await at_rest(engine)

    run(main)


def test_two_event_loops_at_a_time(engine: AsyncLLM) -> None:
    found: dict[int, list[int]] = {}

    async def main(number: int) -> None:
        found[number] = (await read(engine, STORY, GREEDY))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=lambda n=number: asyncio.run(main(n))) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 24


def test_metrics_of_requests_and_defaults(engine: AsyncLLM) -> None:
    async def main() -> None:
        output = (await read(engine, STORY))[-1]
        params = engine.get_default_sampling_params()
        assert len(output.outputs[0].token_ids) <= (params.max_tokens or 0)
        times = output.metrics
        assert times is not None
        stages = [times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts]
        assert 0.0 not in stages and stages == sorted(stages)
        assert (engine.is_running, engine.errored) == (True, False)

    run(main)


# ---------------------------------------------------------------- requests that end early


def test_leaving_a_stream_ends_its_request(engine: AsyncLLM) -> None:
    async def main() -> None:
        aborted = value(engine, "request_success", finished_reason="abort")
        stream = engine.generate(STORY, LONG)
        async for _ in stream:
            break
        assert value(engine, "kv_cache_usage_perc") > 0
        await stream.aclose()
        await at_rest(engine)
        assert value(engine, "request_success", finished_reason="abort") == aborted + 1

    run(main)


def test_a_deadline_ends_its_request_alone(engine: AsyncLLM) -> None:
    async def main() -> None:
        other = asyncio.ensure_future(read(engine, STORY))
        for timeout_s in (0.05, 1e-9):
            with pytest.raises(DeadlineError, match="deadline exceeded"):
                async for _ in engine.generate(STORY, LONG, timeout_s=timeout_s):
                    pass
        assert (await other)[-1].finished
        assert (await read(engine, STORY, timeout_s=1000.0))[-1].finished
        await at_rest(engine)

    run(main)


def test_a_forgotten_generator_ends_its_request(engine: AsyncLLM) -> None:
    async def main() -> None:
        async for _ in engine.generate(STORY, LONG):
            break
        gc.collect()
        await asyncio.sleep(0)  # the event loop closes a generator that is collected
        await asyncio.sleep(0)
        await at_rest(engine)

    run(main)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_cancelling_a_reader_ends_its_request(kind: RequestOutputKind, engine: AsyncLLM) -> None:
    async def main() -> None:
        steps = value(engine, "steps")
        reader = asyncio.ensure_future(read(engine, STORY, LONG.clone(output_kind=kind)))
        other = asyncio.ensure_future(read(engine, "Tim", GREEDY))
        while value(engine, "steps") < steps + 5:
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert len((await other)[-1].outputs[0].token_ids) == 24
        await at_rest(engine)

    run(main)


def test_abort_by_name(engine: AsyncLLM) -> None:
    async def main() -> None:
        reader = asyncio.ensure_future(read(engine, STORY, LONG.clone(n=1), request_id="mine"))
        while engine.get_num_unfinished_requests() == 0:
            await asyncio.sleep(0)
        await engine.abort("nobody's")
        await engine.abort(["mine", "nobody's"])
        assert value(engine, "kv_cache_usage_perc") == 0
        final = (await reader)[-1]
        assert final.finished
        assert final.outputs[0].finish_reason == "abort"
        await at_rest(engine)

    run(main)


def test_abort_of_a_request_that_is_still_being_prepared(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = hold_preparation(engine, monkeypatch)

    async def main() -> None:
        reader = asyncio.ensure_future(read(engine, STORY, LONG, request_id="mine"))
        while not is_preparing(engine):
            await asyncio.sleep(0)
        await engine.abort("mine")
        may_go_on.set()
        outputs = await reader
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        gone = asyncio.ensure_future(read(engine, STORY, LONG))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await at_rest(engine)

    run(main)


def test_aborts_at_random_moments_leave_nothing_behind(engine: AsyncLLM) -> None:
    """Requests wait, compute their prompts or generate when they go; those that stay get their own tokens."""
    generator = random.Random(11)

    async def main() -> None:
        expected = (await read(engine, STORY, GREEDY))[-1].outputs[0].token_ids

        async def leave(number: int) -> None:
            params = LONG.clone(output_kind=generator.choice(list(RequestOutputKind)), prompt_logprobs=None)
            params = params.clone(temperature=1.0, seed=number, n=2) if number % 3 == 0 else params
            task = asyncio.ensure_future(read(engine, STORY * (1 + number % 4), params, request_id=f"r{number}"))
            steps = value(engine, "steps") + generator.randrange(12)
            while value(engine, "steps") < steps and not task.done():
                await asyncio.sleep(0)
            if number % 2:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                await engine.abort(f"r{number}")
                assert (await task)[-1].outputs[0].finish_reason in ("abort", "length")

        async def stay() -> None:
            assert (await read(engine, STORY, GREEDY))[-1].outputs[0].token_ids == expected

        await asyncio.gather(*(leave(number) for number in range(24)), *(stay() for _ in range(4)))
        await at_rest(engine)

    run(main)


# ---------------------------------------------------------------- requests that fail


@pytest.fixture
def without_type_checks() -> Iterator[None]:
    """The type checks that tests run with would see wrong types before our own checks do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        (["a", "b"], {}, "generate takes one prompt, got 2"),
        ({"prompt_token_ids": [512]}, {}, "token id 512"),
        (7, {}, "prompts must be a string"),
        ("x" * 3000, {}, "maximum context length is 512"),
        ("x", {"priority": 3}, "priority"),
        ("x", {"timeout_s": 0.0}, "timeout_s must be None or a number above 0"),
    ],
)
def test_a_bad_request_raises_where_it_is_read(
    prompt: Any, more: dict[str, Any], message: str, engine: AsyncLLM, without_type_checks: None
) -> None:
    async def main() -> None:
        good = asyncio.ensure_future(read(engine, STORY, GREEDY))
        with pytest.raises(RequestError, match=message):
            await read(engine, prompt, GREEDY, **more)
        assert len((await good)[-1].outputs[0].token_ids) == 24
        await at_rest(engine)

    run(main)


def test_a_bad_grammar_fails_alone(engine: AsyncLLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a(b"))
    good = GREEDY.clone(structured_outputs=StructuredOutputsParams(regex="(ab){2}"), output_kind=DELTA)

    async def main() -> None:
        results = await asyncio.gather(
            *(read(engine, STORY, params) for params in (bad, good, GREEDY, good)), return_exceptions=True
        )
        assert isinstance(results[0], RequestError)
        whole = [result for result in results[1:] if isinstance(result, list)]
        assert len(whole) == 3
        assert [added(whole[index]).text for index in (0, 2)] == ["abab", "abab"]
        await at_rest(engine)

    run(main)


def test_a_conversation_that_cannot_be_rendered_fails_alone(engine: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="chat template"):
            async for _ in engine.chat([{"role": "user", "content": "hello"}]):
                pass
        with pytest.raises(RequestError, match="chat takes one conversation, got 2"):
            async for _ in engine.chat([[{"role": "user", "content": "hello"}]] * 2):
                pass
        template = "{{ messages[0].content }}"
        conversation = [{"role": "user", "content": STORY}]
        outputs = [output async for output in engine.chat(conversation, GREEDY, "named", chat_template=template)]
        assert (outputs[-1].prompt, outputs[-1].request_id) == (STORY, "named")
        options: dict[str, Any] = {"chat_template": "{{ messages[0].content[0].text }}"}
        options["chat_template_content_format"] = "openai"
        outputs = [output async for output in engine.chat(conversation, GREEDY, **options)]
        assert outputs[-1].prompt == STORY

    run(main)


def test_a_name_is_used_by_one_request_at_a_time(engine: AsyncLLM) -> None:
    async def main() -> None:
        first = engine.generate(STORY, GREEDY, "same")
        await anext(first)
        with pytest.raises(RequestError, match="'same' is in use"):
            await read(engine, STORY, GREEDY, request_id="same")
        assert len([output async for output in first][-1].outputs[0].token_ids) == 24
        assert len((await read(engine, "Tim", GREEDY, request_id="same"))[-1].outputs[0].token_ids) == 24

    run(main)


# ---------------------------------------------------------------- the end of an engine


def test_metrics_of_a_known_load_that_ends_while_the_engine_drains(stories_model: Path) -> None:
    params = [GREEDY.clone(max_tokens=length, ignore_eos=True) for length in (3, 5, 8)]
    params.append(SamplingParams(seed=1, n=2, max_tokens=4, ignore_eos=True))

    async def main() -> None:
        async with AsyncLLM(str(stories_model), **SETTINGS) as engine:
            streams = [asyncio.ensure_future(read(engine, *pair)) for pair in zip(PROMPTS, params, strict=False)]
            while value(engine, "prompt_tokens") == 0:
                await asyncio.sleep(0)
            while is_preparing(engine):
                await asyncio.sleep(0)
            await asyncio.to_thread(engine.shutdown, PATIENCE_S)
            outputs = await asyncio.gather(*streams)
            assert {one.finish_reason for output in outputs for one in output[-1].outputs} == {"length"}
            num_prompt = sum(len(one[-1].prompt_token_ids) for one in outputs)
            assert value(engine, "prompt_tokens") == num_prompt
            assert value(engine, "generation_tokens") == 3 + 5 + 8 + 2 * 4
            assert value(engine, "request_success", finished_reason="length") == 5
            found = {m.name.partition(":")[2]: m for m in engine.get_metrics() if isinstance(m, Histogram)}
            assert (found["request_prompt_tokens"].count, found["request_prompt_tokens"].sum) == (4, num_prompt)
            assert (found["request_generation_tokens"].count, found["request_generation_tokens"].sum) == (5, 24)
            assert found["request_generation_tokens"].buckets["5.0"] == 4
            assert (found["request_params_n"].count, found["request_params_n"].sum) == (4, 5)
            assert (found["request_params_max_tokens"].count, found["request_params_max_tokens"].sum) == (4, 20)
            assert found["inter_token_latency_seconds"].count == 24 - 5
            assert found["iteration_tokens_total"].sum == num_prompt + 24
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
                assert found[name].count == 4
                assert found[name].sum > 0
            whole = found["request_prefill_time_seconds"].sum + found["request_decode_time_seconds"].sum
            assert found["request_inference_time_seconds"].sum == pytest.approx(whole)

    run(main)


def test_shutting_down_while_streams_run(stories_model: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(stories_model), **SETTINGS)
        streams = [asyncio.ensure_future(read(engine, prompt, LONG)) for prompt in PROMPTS]
        while value(engine, "generation_tokens") < 20:
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.shutdown)
        for outputs in await asyncio.gather(*streams):
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert (engine.is_running, engine.errored) == (False, False)
        assert value(engine, "kv_cache_usage_perc") == 0
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await read(engine, STORY, GREEDY)
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await engine.reset_prefix_cache()
        await engine.abort("anything")
        engine.shutdown()

    run(main)


def test_a_device_that_fails_ends_every_stream(stories_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = AsyncLLM(str(stories_model), **SETTINGS)
        break_launches(engine, monkeypatch, after=6, error=OSError("the device is gone"))
        results = await asyncio.gather(*(read(engine, p, LONG) for p in PROMPTS), return_exceptions=True)
        assert len(results) == 6
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "the device is gone" in str(result)
            assert isinstance(result.__cause__, OSError)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await read(engine, STORY, GREEDY)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.reset_prefix_cache()
        assert (engine.is_running, engine.errored) == (False, True)
        await engine.abort("anything")
        assert engine.get_metrics()
        engine.shutdown()

    run(main)


def test_a_forgotten_engine_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = start_idle_engines(monkeypatch)
    engine = AsyncLLM("demo")
    is_thread_running = thread_state(engine)
    assert engine.is_running
    del engine
    gc.collect()
    assert not is_thread_running()
    assert closed == [True]


def test_a_wrong_argument_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_num_seq"):
        AsyncLLM("demo", max_num_seq=3)
