"""What the client makes of its callers' arguments: what it sends, and what it refuses before it sends anything."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import numpy as np
import pytest

from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.client import AdminClient, AsyncClient, Client
from jaxserve.client.channel import call_metadata
from jaxserve.client.requests import chat_request, conversation, generate_request, token_id_list
from tests.grpc_servers import run, serving

USER = {"role": "user", "content": "Hi"}
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def without_type_checks() -> Iterator[None]:
    """The type checks that tests run with would see wrong types before our own checks do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("given", [{}, {"min_tokens": 20}, {"temperature": 0, "min_tokens": 20, "stop": ["a"]}])
@pytest.mark.parametrize("prompt", ["Hi", [1], [USER]])
def test_the_limit_of_tokens_is_up_to_the_server_where_a_dict_has_none(prompt: Any, given: dict[str, Any]) -> None:
    sent = generate_request(prompt, given, {})
    assert sent.HasField("sampling_params")
    assert {field.name for field, _ in sent.sampling_params.ListFields()} == set(given)


def test_the_limit_of_tokens_that_a_dict_has() -> None:
    assert generate_request("Hi", {"max_tokens": 16}, {}).sampling_params.max_tokens == 16
    assert generate_request("Hi", {"max_tokens": None, "min_tokens": 20}, {}).sampling_params.max_tokens == -1
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens=8, got 20") as failure:
        generate_request("Hi", {"max_tokens": 8, "min_tokens": 20}, {})
    assert failure.value.parameter == "min_tokens"


def test_the_limit_of_tokens_is_the_servers() -> None:
    async def main() -> None:
        async with serving() as there, AsyncClient(there.target) as client:
            await client.chat([USER], {"temperature": 0, "min_tokens": 20})
            assert (there.engine.last.params.min_tokens, there.engine.last.params.max_tokens) == (20, None)
            with pytest.raises(RequestError, match="max_tokens=16"):
                await client.generate("Hi", {"min_tokens": 20})
            there.engine.default_fields = {"max_tokens": 40}
            await client.generate("Hi", {"min_tokens": 20})
            assert there.engine.last.params.max_tokens == 40

    run(main)


@pytest.mark.parametrize("found", [[1, 282], (1, 282), np.array([1, 282]), [np.int32(1), np.uint8(26) + np.int64(256)]])
def test_token_ids(found: Any) -> None:
    assert list(generate_request(found, None, {}).token_ids.ids) == [1, 282]


def test_no_token_ids() -> None:
    assert generate_request([], None, {}).WhichOneof("prompt") == "token_ids"


INTEGERS = "must have integers as token ids"
NO_TOKEN_IDS = [
    *((wrong, INTEGERS) for wrong in (1.9, 2.0, np.float32(1.0), True, False, "1", None, [1], {})),
    *((wrong, INTEGERS) for wrong in (np.True_, np.array([1, 2]))),
    *((wrong, "out of range") for wrong in (2**63, -(2**63) - 1)),
]


@pytest.mark.parametrize(("wrong", "expected"), NO_TOKEN_IDS)
def test_what_is_no_token_id(wrong: Any, expected: str) -> None:
    for make in (lambda: generate_request([1, wrong], None, {}), lambda: token_id_list("token_ids", [1, wrong])):
        with pytest.raises(RequestError, match=expected):
            make()


def test_what_is_no_token_id_is_named() -> None:
    with pytest.raises(RequestError, match="prompt must have integers as token ids, got float") as failure:
        generate_request([1, 282.5], None, {})  # pyright: ignore[reportArgumentType]
    assert (failure.value.parameter, failure.value.value) == ("prompt", 282.5)
    with (
        Client(NOWHERE) as client,
        pytest.raises(RequestError, match="token_ids must have integers as token ids, got bool"),
    ):
        client.detokenize([1, True])


NO_CONVERSATIONS = [
    ("Hi", "expected a list of messages, .* got str"),
    (b"Hi", "expected a list of messages, .* got bytes"),
    (USER, "expected a list of messages, .* got dict"),
    (None, "expected a list of messages, .* got NoneType"),
    ([1, 2], "expected a list of messages, .* got int at 0"),
    ([USER, "Hi"], "expected a list of messages, .* got str at 1"),
    ([[USER]], "expected a list of messages, .* got list at 0"),
    ([], "a conversation needs at least one message"),
]


@pytest.mark.parametrize(("messages", "expected"), NO_CONVERSATIONS)
def test_a_chat_insists_on_a_conversation(messages: Any, expected: str) -> None:
    for make in (lambda: chat_request(messages, None, {}), lambda: conversation(messages, {})):
        with pytest.raises(RequestError, match=expected) as failure:
            make()
        assert failure.value.parameter == "messages"


@pytest.mark.parametrize("messages", ["Hi", [1, 2], []])
def test_all_methods_with_conversations_insist(messages: Any) -> None:
    async def main() -> None:
        async with AsyncClient(NOWHERE) as client:
            with pytest.raises(RequestError, match="message"):
                await client.chat(messages)
            with pytest.raises(RequestError, match="message"):
                await anext(client.stream_chat(messages))
            with pytest.raises(RequestError, match="message"):
                await client.apply_chat_template(messages)

    asyncio.run(main())
    with Client(NOWHERE) as client:
        calls = (client.chat, lambda given: next(iter(client.stream_chat(given))), client.apply_chat_template)
        for call in calls:
            with pytest.raises(RequestError, match="message"):
                call(messages)


def test_a_conversation_is_the_same_by_both_ways() -> None:
    options = {"model": "m", "tools": [{"name": "look"}], "continue_final_message": True}
    sent = chat_request((USER,), {"seed": 1}, options)
    assert sent == generate_request([USER], {"seed": 1}, options)
    assert (sent.model, sent.return_prompt, len(sent.messages.tools)) == ("m", True, 1)


@pytest.mark.parametrize("key", ["secret-key", "secret-key\n", " secret-key \r\n"])
def test_keys_from_files(key: str) -> None:
    assert call_metadata(key) == (("authorization", "Bearer secret-key"),)

    async def main() -> None:
        async with serving(api_key=["secret-key"]) as there, AsyncClient(there.target, api_key=key) as client:
            assert (await client.generate("Hi")).finished

    run(main)


@pytest.mark.parametrize("key", ["my-se\ncret", "my-secret\0", "my-sécret", "my-secret\x7f", "my\tsecret"])
@pytest.mark.parametrize("make", [Client, AdminClient, AsyncClient])
def test_keys_that_cannot_be_sent(make: Callable[..., object], key: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="api_key must be one line of printable ASCII characters") as failure:
            make(NOWHERE, api_key=key)
        assert "cret" not in str(failure.value)

    asyncio.run(main())


def test_no_keys() -> None:
    assert call_metadata(None) == ()
