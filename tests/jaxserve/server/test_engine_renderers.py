"""Chat templates in processes of their own: right texts, and templates that go wrong alone."""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve import RequestError
from jaxserve.server.engine_process.renderers import Renderers, render_job
from jaxserve.text.chat import render_chat

PATIENCE_S = 60.0
LIMIT_S = 1.5
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ extra }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "é"}]
SPECIAL = {"bos_token": "<s>"}


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    made = Renderers(LIMIT_S)
    yield made
    made.close()


def job(template: str = TEMPLATE, **chat: Any) -> Callable[[], dict[str, Any]]:
    return lambda: render_job({"messages": MESSAGES, **chat}, {"default": template}, None, SPECIAL)


def test_texts_are_those_of_this_process(renderers: Renderers) -> None:
    text = renderers.submit(job(chat_template_kwargs={"extra": 3})).result(PATIENCE_S)
    assert text == "<s><user>é3"
    assert text == render_chat(MESSAGES, TEMPLATE, variables={**SPECIAL, "extra": 3})


def test_contents_have_the_format_of_the_job(renderers: Renderers) -> None:
    template = "{{ messages[0].content | length }}{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    found = {}
    for content_format in ("auto", "string", "openai"):
        make_job = functools.partial(render_job, chat, {"default": template}, None, SPECIAL, content_format)
        found[content_format] = renderers.submit(make_job).result(PATIENCE_S)
    assert found == {"auto": "1abc", "string": "3", "openai": "1abc"}
    assert renderers.submit(job(template)).result(PATIENCE_S) == "1é"


def test_what_nobody_wants_any_more_is_left_out(renderers: Renderers) -> None:
    left = renderers.submit(job(), lambda: False)
    with pytest.raises(concurrent.futures.CancelledError):
        left.result(PATIENCE_S)


def test_a_template_may_refuse(renderers: Renderers) -> None:
    with pytest.raises(RequestError, match="the chat template failed: not for é"):
        renderers.submit(job("{{ raise_exception('not for ' + messages[0].content) }}")).result(PATIENCE_S)
    with pytest.raises(RequestError, match="continue_final_message=True requires add_generation_prompt=False"):
        renderers.submit(job(continue_final_message=True)).result(PATIENCE_S)


@pytest.mark.parametrize("value", ["\ud800", object(), float("nan")], ids=range(3))
def test_a_conversation_that_is_not_json_fails_alone(renderers: Renderers, value: Any) -> None:
    with pytest.raises(RequestError, match="the conversation is not JSON"):
        renderers.submit(job(tools=[{"name": value}])).result(PATIENCE_S)
    assert renderers.submit(job()).result(PATIENCE_S) == "<s><user>é"


@pytest.mark.parametrize(
    ("bomb", "message"), [(LOOP, r"not done within 1\.5 s"), (GREEDY, "memory")], ids=["time", "memory"]
)
def test_a_template_that_takes_too_much_fails_alone(renderers: Renderers, bomb: str, message: str) -> None:
    renderers.submit(job()).result(PATIENCE_S)  # one is ready
    bombs = [renderers.submit(job(bomb)) for _ in range(2)]
    good = [renderers.submit(job()) for _ in range(8)]
    assert {future.result(PATIENCE_S) for future in good} == {"<s><user>é"}
    for future in bombs:
        with pytest.raises(RequestError, match=f"the chat template failed: .*{message}"):
            future.result(PATIENCE_S)
    assert renderers.submit(job()).result(PATIENCE_S) == "<s><user>é"


def test_processes_end_with_their_owner() -> None:
    made = Renderers(1000.0)
    bomb = made.submit(job(LOOP))
    while not made._processes._all or made._processes._idle:
        time.sleep(0.01)
    time.sleep(0.5)
    processes = [one._process for one in made._processes._all]
    made.close()
    assert processes and all(process.returncode is not None for process in processes)
    with pytest.raises((RequestError, RuntimeError, concurrent.futures.CancelledError)):
        bomb.result(PATIENCE_S)
    with pytest.raises(RuntimeError):
        made.submit(job())


# ---------------------------------------------------------------- what a conversation may ask for


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"colour": 1}, "unknown chat option 'colour'"),
        ({"chat_template": "/etc/passwd"}, "chat_template is not a Jinja template"),
        ({"chat_template": ["{{"]}, "chat_template is not a Jinja template"),
    ],
    ids=range(3),
)
def test_wrong_options_of_a_conversation_are_refused(chat: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        job(**chat)()


def test_templates_are_chosen_as_everywhere() -> None:
    templates = {"default": "default {{ 1 }}", "tool_use": "tools {{ 1 }}"}
    chat = {"messages": MESSAGES}
    assert render_job(chat, templates, None, {})["template"] == templates["default"]
    assert render_job({**chat, "tools": [{}]}, templates, None, {})["template"] == templates["tool_use"]
    assert render_job({**chat, "chat_template": "tool_use"}, templates, None, {})["template"] == templates["tool_use"]
    assert render_job({**chat, "chat_template": "{{ 2 }}"}, templates, "{{ 3 }}", {})["template"] == "{{ 2 }}"
    assert render_job(chat, templates, "{{ 3 }}", {})["template"] == "{{ 3 }}"
    with pytest.raises(RequestError, match="the model has no chat template"):
        render_job(chat, {}, None, {})
