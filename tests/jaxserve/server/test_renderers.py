"""Chat templates in processes of their own: right texts, and templates that go wrong alone."""

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from jaxserve import RequestError
from jaxserve.server.errors import UnavailableError
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.renderers import Renderers
from jaxserve.server.wire import EngineInfo
from jaxserve.text.chat import render_chat

PATIENCE_S = 60.0
LIMIT_S = 1.5
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ extra }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "é"}]
SPECIAL = {"bos_token": "<s>"}

Render = Callable[..., str | None]


def told(templates: dict[str, str], own: str | None = None, has_states: bool = False) -> EngineInfo:
    """What an engine with these templates tells."""
    return EngineInfo(model_pb2.Model(), {}, None, templates, own, SPECIAL, has_states=has_states)


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    made = Renderers(LIMIT_S)
    yield made
    made.end(UnavailableError("over"))
    made.close()


@pytest.fixture(scope="module")
def render(renderers: Renderers) -> Render:
    """Renders a conversation."""

    async def rendered(template: str, chat: dict[str, Any]) -> str | None:
        async with asyncio.timeout(PATIENCE_S):
            prompt = await renderers.render({"messages": MESSAGES, **chat}, told({"default": template}))
            return None if prompt is None else prompt.text

    return lambda template=TEMPLATE, **chat: asyncio.run(rendered(template, chat))


def test_texts_are_those_of_this_process(render: Render) -> None:
    text = render(chat_template_kwargs={"extra": 3})
    assert text == "<s><user>é3"
    assert text == render_chat(MESSAGES, TEMPLATE, variables={**SPECIAL, "extra": 3})


def test_contents_have_the_format_of_the_server() -> None:
    template = "{{ messages[0].content | length }}{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    found = {}
    for content_format in ("auto", "string", "openai"):
        made = Renderers(LIMIT_S, content_format)

        async def rendered(made: Renderers = made) -> str | None:
            prompt = await made.render(chat, told({"default": template}))
            return None if prompt is None else prompt.text

        found[content_format] = asyncio.run(rendered())
        made.end(UnavailableError("over"))
        made.close()
    assert found == {"auto": "1abc", "string": "3", "openai": "1abc"}


@pytest.mark.parametrize(("has_states", "expected"), [(True, "<bot>"), (False, None)])
def test_engines_with_states_are_told_what_begins_the_answer(
    renderers: Renderers, has_states: bool, expected: str | None
) -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}<bot>{% endif %}"
    info = told({"default": template}, has_states=has_states)
    prompt = asyncio.run(renderers.render({"messages": MESSAGES}, info))
    assert prompt is not None and prompt == ("<s><user>é<bot>", expected)


def test_what_nobody_wants_any_more_is_left_out(renderers: Renderers, render: Render) -> None:
    async def leave() -> None:
        info = told({"default": LOOP})
        running = [asyncio.create_task(renderers.render({"messages": MESSAGES}, info)) for _ in range(4)]
        waiting = asyncio.create_task(renderers.render({"messages": MESSAGES}, info, "waiting"))
        await asyncio.sleep(0)
        assert renderers.abort(["", "waiting"]) == ["waiting"]
        assert await waiting is None
        await asyncio.gather(*running, return_exceptions=True)

    begin_s = time.monotonic()
    asyncio.run(leave())
    assert render() == "<s><user>é"
    assert time.monotonic() - begin_s < PATIENCE_S


def test_a_template_may_refuse(render: Render) -> None:
    with pytest.raises(RequestError, match="the chat template failed: not for é"):
        render("{{ raise_exception('not for ' + messages[0].content) }}")
    with pytest.raises(RequestError, match="continue_final_message=True requires add_generation_prompt=False"):
        render(continue_final_message=True)


@pytest.mark.parametrize("value", ["\ud800", object(), float("nan")], ids=range(3))
def test_a_conversation_that_is_not_json_fails_alone(render: Render, value: Any) -> None:
    with pytest.raises(RequestError, match="the conversation is not JSON"):
        render(tools=[{"name": value}])
    assert render() == "<s><user>é"


@pytest.mark.parametrize(
    ("bomb", "message"), [(LOOP, r"not done within 1\.5 s"), (GREEDY, "memory")], ids=["time", "memory"]
)
def test_a_template_that_takes_too_much_fails_alone(
    renderers: Renderers, render: Render, bomb: str, message: str
) -> None:
    render()  # one is ready

    async def together() -> list[Any]:
        infos = [told({"default": template}) for template in (bomb, bomb, *[TEMPLATE] * 8)]
        waiting = [renderers.render({"messages": MESSAGES}, info) for info in infos]
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)

    found = asyncio.run(together())
    assert {prompt.text for prompt in found[2:]} == {"<s><user>é"}
    for error in found[:2]:
        with pytest.raises(RequestError, match=f"the chat template failed: .*{message}"):
            raise error
    assert render() == "<s><user>é"


def test_processes_end_with_their_owner() -> None:
    async def main() -> None:
        made = Renderers(1000.0)
        bomb = asyncio.create_task(made.render({"messages": MESSAGES}, told({"default": LOOP})))
        async for _ in pauses():
            if made._processes._all and not made._processes._idle:
                break
        await asyncio.sleep(0.5)
        processes = [one._process for one in made._processes._all]
        made.end(UnavailableError("the server is shutting down"))
        with pytest.raises(UnavailableError, match="shutting down"):
            await bomb
        with pytest.raises(UnavailableError, match="shutting down"):
            await made.render({"messages": MESSAGES}, told({"default": TEMPLATE}))
        made.close()
        assert processes and all(process.returncode is not None for process in processes)

    asyncio.run(main())


async def pauses() -> AsyncIterator[None]:
    """Short pauses, not for ever."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        yield
        await asyncio.sleep(0.01)
    raise concurrent.futures.TimeoutError


def test_templates_are_chosen_as_everywhere(renderers: Renderers) -> None:
    def rendered(own: str | None = None, templates: dict[str, str] | None = None, **chat: Any) -> str | None:
        async def run() -> str | None:
            named = {"default": "default {{ 1 }}", "tool_use": "tools {{ 1 }}"} if templates is None else templates
            prompt = await renderers.render({"messages": MESSAGES, **chat}, told(named, own))
            return None if prompt is None else prompt.text

        return asyncio.run(run())

    assert rendered() == "default 1"
    assert rendered(tools=[{}]) == "tools 1"
    assert rendered(chat_template="tool_use") == "tools 1"
    assert rendered("{{ 3 }}", chat_template="{{ 2 }}") == "2"
    assert rendered("{{ 3 }}") == "3"
    with pytest.raises(RequestError, match="the model has no chat template"):
        rendered(templates={})
