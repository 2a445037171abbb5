"""``jaxserve models``: the architectures that run, the formats that their weights may have, and those of tool calls and
reasoning, from the registries."""

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from checkpoints.quantized.gguf_architectures import ARCHITECTURES, GRANITE_SHARED, MIXTRAL
from checkpoints.quantized.registry import DESCRIPTIONS, REFUSED
from jaxserve.models.registry import family_parsers, supported_architectures

_FILES = "safetensors, GGUF, pytorch_model.bin, Orbax"
_OTHER_CLASSES: Mapping[str, str] = {
    "BaichuanForCausalLM": "baichuan",
    "DeepseekV2ForCausalLM": "deepseek2",
    GRANITE_SHARED.hf_class: "granitemoe",
    "MistralForCausalLM": "llama",
    MIXTRAL.hf_class: "llama",
}
"""Architectures of GGUF files by further classes that they have."""

TEXT_HALVES_NOTE = "Of the classes ForConditionalGeneration the language model runs; images and audio are not read."


HEADINGS = ("in config.json", "in GGUF files", "tool calls", "reasoning")
PARSERS_NOTE = (
    "`--tool-call-parser auto` takes the first of the formats whose markers are in the chat template, otherwise the "
    "last; `--reasoning-parser auto` takes a format only if its tags are there."
)


class Architecture(NamedTuple):
    """What runs of an architecture; "-": nothing.

    Attributes:
        name: In ``architectures`` of config.json.
        gguf: In GGUF files.
        tools: Formats of tool calls.
        reasoning: Formats of reasoning.
    """

    name: str
    gguf: str
    tools: str
    reasoning: str


def architectures() -> list[Architecture]:
    """Return the architectures that run, in alphabetical order."""
    known = {each.hf_class: name for name, each in ARCHITECTURES.items()} | dict(_OTHER_CLASSES)
    made: list[Architecture] = []
    for name in supported_architectures():
        formats = (", ".join(names) or "-" for names in family_parsers(name))
        made.append(Architecture(name, known.get(name, "-"), *formats))
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: none."""


def run(options: argparse.Namespace) -> None:
    """Print the lists."""
    print(text())


def text() -> str:
    """Return the lists as text."""
    rows = [HEADINGS, *architectures()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["Architectures:"]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [TEXT_HALVES_NOTE, PARSERS_NOTE.replace("`", ""), "", f"Files: {_FILES}", "", "Quantized weights:"]
    for each in DESCRIPTIONS:
        lines += [
            f"  {each.name}: {each.variants.replace('`', '')}",
            f"    exact: {each.exact}; written by {each.writers}",
        ]
    lines += ["", f"Refused by name: {', '.join(REFUSED.values())}"]
    return "\n".join(lines)
