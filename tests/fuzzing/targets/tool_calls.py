"""Parsers of completions: any text gives a message, which is the same in whatever pieces it comes."""

from itertools import count

from jaxserve.api.errors import ConfigError
from jaxserve.parsers import MessageParser
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.tool_formats import TOOL_FORMATS
from tests.fuzzing.target import Target

_PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": _PROPERTIES}}}]
_FORMATS = tuple(sorted(TOOL_FORMATS))
_REASONING = (None, *sorted(REASONING_FORMATS))


def run(data: bytes) -> None:
    """Parse all but the first three bytes: they choose the formats and how long pieces are."""
    if len(data) < 3:
        return
    tools, reasoning = _FORMATS[data[0] % len(_FORMATS)], _REASONING[data[1] % len(_REASONING)]
    text, size = data[3:].decode("utf-8", "replace"), 1 + data[2] % 9
    try:
        parser, streamed = _parser(reasoning, tools), _parser(reasoning, tools)
    except ConfigError:  # formats that do not go together
        return
    whole = parser.parse(text)
    deltas = [streamed.feed(text[at : at + size]) for at in range(0, len(text), size)] + [streamed.finish()]
    assert streamed.message() == whole
    assert "".join(delta.content or "" for delta in deltas) == (whole.content or "")
    assert "".join(delta.reasoning or "" for delta in deltas) == (whole.reasoning or "")


def _parser(reasoning: str | None, tools: str) -> MessageParser:
    numbers = count()
    return MessageParser(reasoning, tools, schemas=_TOOLS, make_id=lambda: str(next(numbers)))


_ARGUMENTS = '{"a": "x", "n": 2}'
_CALL = f'{{"name": "f", "arguments": {_ARGUMENTS}}}'
_TEXTS = {
    "apertus": f'<|tools_prefix|>[{{"f": {_ARGUMENTS}}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gemma4": '<|tool_call>call:f{a:<|"|>x<|"|>,n:2}<tool_call|>',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "granite": f"<|tool_call|>[{_CALL}]",
    "hermes": f"Hm.\n<tool_call>\n{_CALL}\n</tool_call>",
    "hunyuan_a13b": f"<tool_calls>[{_CALL}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
    "llama3_json": f'<|python_tag|>{{"name": "f", "parameters": {_ARGUMENTS}}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n',
    "mistral": f"[TOOL_CALLS]f[ARGS]{_ARGUMENTS}",
    "olmo3": '<function_calls>\nf(a="x", n=2)\n</function_calls>',
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
    "phi4_mini_json": f"functools[{_CALL}]",
    "pythonic": '[f(a="x", n=2)]',
    "qwen3": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n</function>\n</seed:tool_call>",
}
"""Calls of formats that are not spelled like another one."""

TARGET = Target(
    run,
    seeds=tuple(
        bytes([_FORMATS.index(name), number % 4, number % 9]) + text.encode()
        for number, (name, text) in enumerate(_TEXTS.items())
    ),
    words=(
        *(b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"<function=f>", b"<parameter=a>", b"</parameter>"),
        *(b'"name":', b'"arguments":', b"\\u12", b"[TOOL_CALLS]", b"<|channel|>", b"<|message|>", b"{", b"}", b"f(a="),
    ),
    packages=("jaxserve.parsers",),
)
