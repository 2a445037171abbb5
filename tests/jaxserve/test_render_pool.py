"""Conversations of ``LLM.chat`` and ``AsyncLLM.chat`` are rendered under limits, and children see no secrets."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from jaxserve import LLM, AsyncLLM
from jaxserve.api.errors import RequestError
from jaxserve.child_process import NICENESS, LineProcess, child_environment
from jaxserve.text.render_pool import RenderPool

HI = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"


@pytest.fixture(scope="module")
def pool() -> Iterator[RenderPool]:
    made = RenderPool(limit_s=1.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, "not done within 1 s, or out of memory"),
        (DOUBLING, "memory"),
        ("{{ 'a' * 10**10 }}", "it takes more memory than allowed"),
        ("{{ raise_exception('no') }}", "^the chat template failed: no$"),
    ],
)
def test_a_template_is_limited_and_the_next_conversation_is_rendered(
    pool: RenderPool, template: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pool.render(HI, template, variables={})
    assert pool.render(HI, "{{ messages[0].content }}{{ x }}", variables={"x": "!"}).text == "hi!"


def test_values_of_python_are_those_of_json(pool: RenderPool) -> None:
    def add(a: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a

    text, _ = pool.render(HI, "{{ tools[0].function.name }} {{ x }}", tools=[add], variables={"x": {"a": (1, 2)}})
    assert text == "add {'a': [1, 2]}"


def test_a_tool_that_has_no_schema_is_an_error_of_the_request(pool: RenderPool) -> None:
    with pytest.raises(RequestError, match="the chat template failed: "):
        pool.render(HI, "{{ tools }}", tools=[lambda a: a], variables={})


def test_a_closed_pool_renders_nothing() -> None:
    made = RenderPool()
    made.close()
    with pytest.raises(RequestError, match="the engine was shut down"):
        made.render(HI, "", variables={})


def test_both_engines_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    render = Mock(side_effect=RequestError("limited"))
    monkeypatch.setattr(RenderPool, "render", render)

    async def chat() -> None:
        async with AsyncLLM("demo", warm_up=False) as engine:
            async for _ in engine.chat(HI):
                pass

    with LLM("demo", warm_up=False) as llm, pytest.raises(RequestError, match="limited"):
        llm.chat(HI)
    with pytest.raises(RequestError, match="limited"):
        asyncio.run(chat())


def test_children_see_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("JAXSERVE_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS")
    names += ("GITHUB_TOKEN", "DATABASE_PASSWORD", "CLIENT_SECRET")
    for name in names:
        monkeypatch.setenv(name, "secret")
    script = tmp_path / "show.py"
    script.write_text("import json, os\nfor line in open(0):\n    print(json.dumps(dict(os.environ)), flush=True)\n")
    process = LineProcess([str(script)])
    try:
        seen = json.loads(process.ask(b"", 30.0) or b"")
    finally:
        process.close()
    assert "secret" not in seen.values()
    assert seen["PATH"] == os.environ["PATH"]
    assert sys.path[-1] in seen["PYTHONPATH"]
    assert set(names) & set(child_environment()) == {"HF_TOKEN"}  # an engine may download its model


def test_children_run_at_a_lower_priority(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os\nfor line in open(0):\n    print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)\n")
    process = LineProcess([str(script)])
    try:
        assert int(process.ask(b"", 30.0) or b"") == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    finally:
        process.close()
