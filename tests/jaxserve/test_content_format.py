"""What chat templates see of contents: which format a template is found to be written for, and what it gets."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2 import nodes

from jaxserve.api.errors import RequestError
from jaxserve.text import chat
from jaxserve.text.chat import render_chat
from jaxserve.text.content_format import FORMATS, detect_format

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
DUMP = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
LOOP = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"


def shown(content: Any, content_format: str, role: str = "user", template: str = DUMP) -> str:
    """What a template makes of one message."""
    message = {"role": role, "content": content}
    return render_chat([message], template, content_format=content_format, variables={})


@pytest.mark.parametrize(
    ("content", "string", "openai"),
    [
        ("a", "a", [{"type": "text", "text": "a"}]),
        ("", "", [{"type": "text", "text": ""}]),
        (None, "", []),
        ([], "", []),
        (PARTS, "a\nb", PARTS),
        ([{"text": "a", "cache_control": {}}], "a", [{"type": "text", "text": "a"}]),
    ],
)
def test_contents_in_both_formats(content: Any, string: str, openai: list[Any]) -> None:
    assert json.loads(shown(content, "string")) == string
    assert json.loads(shown(content, "openai")) == openai
    assert json.loads(shown(content, "auto")) == string
    assert json.loads(shown(content, "openai", "tool")) == string


def test_another_format_is_refused() -> None:
    with pytest.raises(RequestError, match="chat_template_content_format must be one of auto, string, openai, got 'x'"):
        shown("a", "x")


def test_a_template_that_loops_gets_parts() -> None:
    assert shown("a", "auto", template=LOOP) == "<user>a|"
    assert shown(PARTS, "auto", template=LOOP) == "<user>a|b|"
    assert shown(PARTS, "string", template=LOOP) == "<user>|||"
    opened = render_chat(
        [{"role": "assistant", "content": PARTS}],
        LOOP.replace("|", ""),
        add_generation_prompt=False,
        continue_final_message=True,
        variables={},
    )
    assert opened == "<assistant>ab"


def test_a_template_that_takes_parts_for_some_messages_only() -> None:
    """As Cogito's: it adds the system message to a text, and looks at what the others are."""
    template = "{% if messages[0].role == 'system' %}{{ 'S: ' + messages[0].content }}{% endif %}" + LOOP
    assert shown(PARTS, "auto", template=template) == "<user>a|b|"
    system = {"role": "system", "content": "a"}
    plain = (
        "{{ 'S: ' + messages[0].content }}{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
    )
    assert render_chat([system], plain, variables={}) == "S: a"
    with pytest.raises(RequestError, match="the chat template failed: can only concatenate str"):
        render_chat([system], plain, content_format="openai", variables={})


def test_what_a_template_refuses_is_not_tried_again() -> None:
    template = "{{ raise_exception(messages[0].content | string) }}{% for p in messages[0].content %}{% endfor %}"
    with pytest.raises(RequestError, match=r"the chat template failed: \[{'type': 'text'"):
        shown("a", "auto", template=template)


def test_each_template_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[Any]()
    monkeypatch.setattr(chat, "detect_format", lambda root: looked_at.append(root) or detect_format(root))
    for _ in range(3):
        shown("a", "auto", template=LOOP + "{# seen once #}")
        shown("a", "auto", template=DUMP + "{# seen once #}")
    assert len(looked_at) == 2


def parsed(template: str) -> nodes.Template:
    """A template whose loops end with END."""
    return jinja2.Environment().parse(template.replace("END", "{% endfor %}"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for c in m.content %}ENDEND",
        "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}ENDEND",
        "{% for m in messages %}{% for c in m.get('content') %}ENDEND",
        "{% for m in messages[1:] %}{% for c in m.content[1:] %}ENDEND",
        "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}ENDEND",
        "{% set all = [{}] + messages %}{% for m in all | list %}{% for c in m.content or [] %}ENDEND",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}ENDEND",
        "{% for m in messages %}{% set c = m.content %}{% set d = c %}{% for p in d %}{{ p['type'] }}ENDEND",
        "{% set m = messages[0] %}{% for c in m.content %}END",
        "{% for c in messages[-1]['content'] %}END",
        "{% for m in messages %}{% for c in (m.content if m.content is not string else []) %}ENDEND",
    ],
)
def test_loops_over_contents_are_found(template: str) -> None:
    assert detect_format(parsed(template)) == "openai"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{% for t in tools %}{{ t.content }}ENDEND",
        "{% for m in messages %}{% for call in m.tool_calls %}ENDEND",
        "{% for m in messages %}{% for line in m.content.split('x') %}ENDEND",
        "{% for m in messages %}{% set calls = m.content %}{% for c in calls %}{{ c.function.name }}ENDEND",
        "{% for key, m in messages | groupby('role') %}{% for c in m.content %}ENDEND",
        "{% for d in documents %}{% for c in d.content %}ENDEND",
        "{% macro show(content) %}{% for c in content %}{{ c.text }}END{% endmacro %}{{ show(messages[0].content) }}",
    ],
)
def test_other_loops_are_not(template: str) -> None:
    assert detect_format(parsed(template)) == "string"


# Those that loop over contents; all others take texts alone.
WITH_PARTS = {
    *(f"vllm/tool_chat_template_{name}.jinja" for name in ("gemma3_pythonic", "llama3.1_json", "llama3.2_json")),
    *(f"vllm/tool_chat_template_{name}.jinja" for name in ("llama4_json", "mistral3")),
}


def test_published_templates(shared_data: Path) -> None:
    folder = shared_data / "configs/chat-templates"
    paths = sorted(folder.rglob("*.jinja"))
    assert len(paths) > 30
    found = {str(path.relative_to(folder)) for path in paths if chat._detect_format(path.read_text()) == "openai"}
    assert found == WITH_PARTS


def test_templates_of_models(shared_data: Path) -> None:
    found = dict[str, str]()
    for path in (shared_data / "configs").glob("*/tokenizer_config.json"):
        template = json.loads(path.read_text()).get("chat_template")
        if isinstance(template, str):
            found[path.parent.name] = chat._detect_format(template)
    assert len(found) > 4
    assert {name for name, one in found.items() if one == "openai"} == {"qwen2.5-14b-cogito"}


@pytest.mark.parametrize("name", sorted(WITH_PARTS))
def test_published_templates_make_the_same_of_both(shared_data: Path, name: str) -> None:
    """Those that loop over parts look for plain texts too."""
    template = (shared_data / "configs/chat-templates" / name).read_text()
    roles = ("system", "user", "assistant", "user")
    conversation = [{"role": role, "content": f"{role} {index}"} for index, role in enumerate(roles)]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
    found = {one: render_chat(conversation, template, content_format=one, variables=variables) for one in FORMATS}
    assert found["auto"] == found["openai"] == found["string"]
    assert "user 3" in found["auto"]
