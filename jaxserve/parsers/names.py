"""Which parsers a model's completions need: the named ones, or those of its family."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.api.errors import ConfigError
from jaxserve.parsers.parser import chosen_reasoning, reasoning_parser, tool_parser
from jaxserve.parsers.reasoning_formats import REASONING_FORMATS
from jaxserve.parsers.tool_formats import TOOL_FORMATS

AUTO = "auto"
"""Stands for the format of the model's family."""


@dataclass(frozen=True)
class ParserNames:
    """Names of the parsers for what a model writes besides content; None: no parser.

    Attributes:
        reasoning: Format of the reasoning.
        tools: Format of the tool calls.
    """

    reasoning: str | None = None
    tools: str | None = None


class FamilyParsers(NamedTuple):
    """Formats that the checkpoints of a family may have; the chat template says which.

    Attributes:
        tools: Formats of tool calls. A checkpoint has the first whose markers are in its chat template, otherwise the
            last.
        reasoning: Formats of reasoning. A checkpoint has the first whose tags are in its chat template, otherwise none:
            it does not reason.
    """

    tools: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()


def parser_names(given: ParserNames, family: FamilyParsers, architecture: str, template: str) -> ParserNames:
    """Return the parsers to use, with `AUTO` replaced and the reasoning that the tool calls need.

    Args:
        given: The settings.
        family: The formats of the model's family.
        architecture: Its name, for messages.
        template: The chat template; "" if there is none.

    Raises:
        ConfigError: A format is unknown, the two do not match, or nothing is known for the family.
    """
    tools, reasoning = given.tools, given.reasoning
    if tools == AUTO:
        _check("tool_call_parser", family.tools, architecture, TOOL_FORMATS)
        marked = [name for name in family.tools if _has_any(template, tool_parser(name).starts)]
        tools = (*marked, family.tools[-1])[0]
    if reasoning == AUTO:
        _check("reasoning_parser", family.reasoning, architecture, REASONING_FORMATS)
        marked = [name for name in family.reasoning if _has_any(template, _tags(name))]
        reasoning = marked[0] if marked else None
    return ParserNames(chosen_reasoning(reasoning, tools), tools)


def _tags(name: str) -> tuple[str, str]:
    form = reasoning_parser(name)
    return form.start_text, form.end_text


def _has_any(template: str, markers: Iterable[str]) -> bool:
    return any(marker in template for marker in markers)


def _check(setting: str, names: Collection[str], architecture: str, formats: Iterable[str]) -> None:
    if not names:
        expected = f"name one of {', '.join(sorted(formats))}, or leave {setting} out"
        raise ConfigError(f"{setting}='auto': the format of {architecture} is not known; {expected}")
