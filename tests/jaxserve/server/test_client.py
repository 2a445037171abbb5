"""The typed client of the gRPC server."""

import asyncio
import contextlib
import dataclasses
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from jaxserve.api.errors import (
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.client import AdminClient, AsyncClient, Client, Prompt
from jaxserve.client.failures import error_of
from jaxserve.client.requests import generate_request
from jaxserve.parsers import ParserNames
from jaxserve.parsers.message import MessageDelta, ParsedMessage
from jaxserve.server.errors import (
    NotImplementedRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
)
from jaxserve.server.proto_codec import given_fields
from tests.conftest import REPOSITORY
from tests.grpc_servers import Serving, run, serving

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WHOLE = "0:0 0:1 0:2 0:3 "


def with_client(check: Callable[[Client, Serving], Any], *parsers: ParserNames, **settings: Any) -> None:
    """Runs a check, which may block, beside a server."""

    async def main() -> None:
        async with serving(*parsers, **settings) as there:
            with Client(there.target, timeout_s=30.0) as client:
                await asyncio.to_thread(check, client, there)

    run(main)


def test_it_needs_no_jax() -> None:
    code = "import jaxserve.client, sys; assert not {'jax', 'numpy', 'transformers'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_texts_at_once() -> None:
    def check(client: Client, there: Serving) -> None:
        output = client.generate("Hello", SamplingParams(n=2, max_tokens=9), priority=4, cache_salt="s")
        assert [one.text for one in output.outputs] == [WHOLE, WHOLE.replace("0:", "1:")]
        assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("Hello", [1, 2, 3], 2)
        assert output.finished and output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == "."
        seen = there.engine.last
        assert (seen.text, seen.priority, seen.cache_salt, seen.params.n) == ("Hello", 4, "s", 2)
        assert output.request_id in there.engine.requests
        client.generate([7, 8], return_prompt=False)
        assert there.engine.last.token_ids == (7, 8)
        client.generate([USER], {"temperature": 1.0})
        assert there.engine.last.chat is not None

    with_client(check)


def test_texts_as_they_come() -> None:
    def check(client: Client, there: Serving) -> None:
        deltas = list(client.stream("Hello", SamplingParams(n=2)))
        assert [[one.text for one in delta.outputs] for delta in deltas] == [
            [f"0:{step} ", f"1:{step} "] for step in range(4)
        ]
        assert [delta.finished for delta in deltas] == [False, False, False, True]
        assert {(delta.prompt, *delta.prompt_token_ids) for delta in deltas} == {("Hello", 1, 2, 3)}
        list(client.stream("Hello", stream_interval=3))
        assert there.engine.last.stream_interval == 3

    with_client(check)


def test_a_stream_that_is_left_ends_its_request() -> None:
    def check(client: Client, there: Serving) -> None:
        there.engine.stops_at = 2
        for delta in client.stream("Hello"):
            assert delta.outputs[0].text == "0:0 "
            break
        while there.engine.running:
            pass

    with_client(check)


def test_conversations() -> None:
    def check(client: Client, there: Serving) -> None:
        call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
        there.engine.texts = ["<think>Hm", ".</think>", "Well. ", call]
        answer = client.chat([USER], {"max_tokens": 50}, tools=[TOOL], chat_template_kwargs={"a": 1})
        (message,) = answer.messages
        assert (message.reasoning, (message.content or "").strip()) == ("Hm.", "Well.")
        assert [(one.name, one.arguments) for one in message.tool_calls] == [("look", '{"a": 1}')]
        assert answer.output.outputs[0].text == "".join(there.engine.texts)
        deltas = list(client.stream_chat([USER], tools=[TOOL]))
        parts = [part for delta in deltas for part in delta.messages.values()]
        assert all(isinstance(part, MessageDelta) for part in parts)
        assert "".join(part.reasoning or "" for part in parts) == "Hm."
        calls = [one for part in parts for one in part.tool_calls]
        assert [one.name for one in calls if one.name] == ["look"]
        assert "".join(one.arguments for one in calls) == '{"a": 1}'
        there.engine.texts = None
        assert client.chat([USER], include_reasoning=False).messages == (ParsedMessage(WHOLE),)

    with_client(check, ParserNames("qwen3", "hermes"), enable_auto_tool_choice=True)


def test_a_conversation_goes_out_in_full() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]

    def check(client: Client, there: Serving) -> None:
        choice = {"type": "function", "function": {"name": "look"}}
        client.chat(messages, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, continue_final_message=True)
        chat = there.engine.last.chat
        assert chat is not None
        assert chat["messages"][0] == {"role": "system", "content": "a\nb"}
        assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
        assert chat["messages"][2] == messages[2]
        assert (chat["tools"], chat["add_generation_prompt"], chat["continue_final_message"]) == ([TOOL], False, True)

    with_client(check)


def test_what_the_protocol_has_no_place_for() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    with pytest.raises(RequestError, match="content parts must be"):
        generate_request([image], None, {})
    with pytest.raises(RequestError, match="messages have an unsupported field 'audio'"):
        generate_request([{**USER, "audio": {}}], None, {})
    with pytest.raises(RequestError, match="tools applies only to conversations"):
        generate_request("Hi", None, {"tools": [TOOL]})
    with pytest.raises(ValueError, match="nothing"):
        generate_request("Hi", None, {"nothing": 1})
    with pytest.raises(RequestError, match="temperature"):
        generate_request("Hi", {"temperature": -1.0}, {})


@pytest.mark.parametrize("prompt", ["Hi", [1], []])
def test_only_what_was_given_is_sent(prompt: Prompt) -> None:
    assert not generate_request(prompt, None, {}).HasField("sampling_params")
    sent = generate_request(prompt, {"temperature": 1.0, "stop": "a", "top_k": 0}, {}).sampling_params
    assert {field.name for field, _ in sent.ListFields()} == {"temperature", "stop", "top_k"}
    for unlimited in (SamplingParams(max_tokens=None), {"max_tokens": None}):
        assert generate_request(prompt, unlimited, {}).sampling_params.max_tokens == -1


def test_sampling_parameters_say_all() -> None:
    """A server's own defaults do not change what they mean elsewhere."""
    sent = generate_request("Hi", SamplingParams(temperature=1.0), {}).sampling_params
    assert (sent.temperature, sent.top_p, sent.top_k, sent.repetition_penalty, sent.max_tokens) == (1, 1, 0, 1, 16)
    assert SamplingParams(**given_fields(sent)) == SamplingParams()
    names = {field.name for field, _ in sent.ListFields()}
    assert "seed" not in names and "stop" not in names


def test_tokenizer_models_and_health() -> None:
    def check(client: Client, there: Serving) -> None:
        found = client.tokenize("ab", return_token_strings=True)
        assert (found.token_ids, found.token_strings, found.max_model_len) == ([1, 97, 98], ["a", "b"], 128)
        assert client.detokenize([1, 97], skip_special_tokens=True) == "a"
        prompt = client.apply_chat_template([USER], chat_template_kwargs={"a": 1})
        assert (prompt.text, prompt.token_ids) == ("Hi", [72, 105])
        assert [model.id for model in client.models()] == ["fake"]
        assert client.model().max_model_len == 128 and client.model("fake").layout == "fake"
        assert client.health() and client.health("")

    with_client(check)


ERRORS: list[tuple[JaxserveError, dict[str, Any]]] = [
    (RequestError("bad", parameter="temperature", value=1), {"parameter": "temperature"}),
    (RequestError("bad", parameter="structured_outputs.regex", value=1), {"parameter": "structured_outputs.regex"}),
    (RequestError("bad"), {"parameter": None}),
    (RequestFailedError("not finite"), {}),
    (OverloadedError("full", retry_after_s=2.5), {"retry_after_s": 2.5}),
    (UnavailableError("later", retry_after_s=0.25), {"retry_after_s": 0.25}),
    (EngineDeadError("ended"), {}),
    (DeadlineError("too late"), {}),
    (UnknownModelError("no such"), {}),
    (UnauthenticatedError("who"), {}),
    (PermissionDeniedError("not you"), {}),
    (NotImplementedRequestError("not here", parameter="n"), {"parameter": "n"}),
]


@pytest.mark.parametrize(("error", "attributes"), ERRORS)
def test_errors_come_out_as_they_went_in(error: JaxserveError, attributes: dict[str, Any]) -> None:
    def check(client: Client, there: Serving) -> None:
        there.engine.error, there.engine.fails_at = error, 1
        for call in (lambda: client.generate("Hi"), lambda: list(client.stream("Hi"))):
            with pytest.raises(type(error)) as failure:
                call()
            assert type(failure.value) is type(error) and str(failure.value) == str(error)
            for name, value in attributes.items():
                assert getattr(failure.value, name) == value

    with_client(check)


def test_what_nobody_foresaw_is_named_by_its_request() -> None:
    def check(client: Client, there: Serving) -> None:
        there.engine.error = RuntimeError("secret")
        with pytest.raises(JaxserveError, match=r"INTERNAL: internal server error \(request grpc-\w+\)"):
            client.generate("Hi")

    with_client(check)


def test_a_deadline_of_the_client() -> None:
    def check(client: Client, there: Serving) -> None:
        there.engine.stops_at = 1
        with Client(there.target, timeout_s=0.2) as hurried:
            with pytest.raises(DeadlineError):
                hurried.generate("Hi")
            with pytest.raises(DeadlineError):
                list(hurried.stream("Hi"))

    with_client(check)


def test_nobody_listens() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as bound:
        port = bound.getsockname()[1]
    with Client(f"127.0.0.1:{port}", timeout_s=20.0) as client:
        with pytest.raises(UnavailableError) as failure:
            client.generate("Hi")
        assert failure.value.retry_after_s > 0


@dataclasses.dataclass
class Failure:
    """A status that no server of ours made."""

    status: grpc.StatusCode
    metadata: tuple[tuple[str, bytes], ...] | None = None

    def code(self) -> grpc.StatusCode:
        """Its code."""
        return self.status

    def details(self) -> str:
        """Its text."""
        return "said a proxy"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...] | None:
        """Its details."""
        return self.metadata


@pytest.mark.parametrize("metadata", [None, (), (("grpc-status-details-bin", b"\xff\xff"),)])
def test_statuses_without_details(metadata: tuple[tuple[str, bytes], ...] | None) -> None:
    assert isinstance(error_of(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, metadata)), OverloadedError)
    assert isinstance(error_of(Failure(grpc.StatusCode.UNAVAILABLE, metadata)), UnavailableError)
    found = error_of(Failure(grpc.StatusCode.DATA_LOSS, metadata))
    assert type(found) is JaxserveError and str(found) == "DATA_LOSS: said a proxy"


def test_keys() -> None:
    async def main() -> None:
        async with serving(api_key=["secret-key"]) as there:
            async with AsyncClient(there.target, api_key="secret-key") as client:
                assert (await client.generate("Hi")).outputs[0].text == WHOLE
            async with AsyncClient(there.target, api_key="other") as client:
                with pytest.raises(UnauthenticatedError, match="unknown API key"):
                    await client.generate("Hi")
                assert await client.health()
            async with AsyncClient(there.admin_target, api_key="secret-key") as client:
                with pytest.raises(NotImplementedRequestError):
                    await client.models()

    run(main)


def test_with_asyncio() -> None:
    async def main() -> None:
        async with serving() as there, AsyncClient(there.target) as client:
            assert (await client.generate("Hi", SamplingParams(temperature=0.0))).outputs[0].text == WHOLE
            assert [delta.outputs[0].text async for delta in client.stream("Hi")] == WHOLE.replace(" ", " |").split(
                "|"
            )[:4]
            assert (await client.chat([USER])).messages == (ParsedMessage(WHOLE),)
            deltas = [delta async for delta in client.stream_chat([USER], stream_interval=2)]
            assert "".join(delta.messages[0].content or "" for delta in deltas) == WHOLE
            assert (await client.tokenize("a")).token_ids == [1, 97]
            assert await client.detokenize([97]) == "a"
            assert (await client.apply_chat_template([USER])).text == "Hi"
            assert [model.id for model in await client.models()] == [(await client.model()).id]
            assert await client.health()
            with pytest.raises(UnknownModelError, match="other"):
                await client.generate("Hi", model="other")
            there.engine.stops_at = 1
            async with contextlib.aclosing(client.stream("Hi")) as deltas:
                async for _ in deltas:
                    break
            await there.until_idle()

    run(main)


def test_watching_the_health_with_asyncio() -> None:
    async def main() -> None:
        async with serving() as there, AsyncClient(there.target) as client:
            watched = client.watch_health()
            assert await anext(watched)
            there.server.set_serving(False)
            assert not await anext(watched)

    run(main)


def test_operating() -> None:
    async def main() -> None:
        async with serving(profile_dir="/profiles") as there:
            await asyncio.to_thread(check, there)

    def check(there: Serving) -> None:
        with AdminClient(there.admin_target, timeout_s=30.0) as client:
            load = client.load()
            assert (load.num_running, load.num_waiting, load.is_draining) == (3, 5, False)
            client.reset_prefix_cache()
            assert client.reshard("tensor=2").to_layout == "replicated"
            with client.profile() as directory:
                assert directory == "/profiles"
            assert client.abort(["nothing"]) == []
            client.drain()
            client.drain(1.5)
            with pytest.raises(RequestError, match="timeout_s"):
                client.drain(-1.0)
        assert there.drains == [None, 1.5]
        assert [name for name, _ in there.engine.calls] == [
            "reset_prefix_cache",
            "reshard",
            "start_profile",
            "stop_profile",
            "abort",
        ]

    run(main)
