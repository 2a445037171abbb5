"""``jaxserve models``: the architectures that run, and the formats that their weights may have, from the registries."""

import argparse
from collections.abc import Mapping

from checkpoints.quantized.gguf_architectures import ARCHITECTURES, GRANITE_SHARED, MIXTRAL
from checkpoints.quantized.registry import DESCRIPTIONS, REFUSED
from jaxserve.models.registry import supported_architectures

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


def gguf_names() -> dict[str, str]:
    """Return the architecture of GGUF files for each name of ``architectures`` in config.json; "-" if there is none."""
    known = {each.hf_class: name for name, each in ARCHITECTURES.items()} | dict(_OTHER_CLASSES)
    return {name: known.get(name, "-") for name in supported_architectures()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: none."""


def run(options: argparse.Namespace) -> None:
    """Print both lists."""
    print(text())


def text() -> str:
    """Return both lists as text."""
    names = gguf_names()
    width = max(map(len, names))
    lines = ["Architectures, as config.json names them, and their name in GGUF files:"]
    lines += [f"  {name:{width}}  {gguf}" for name, gguf in names.items()]
    lines += [f"  ({TEXT_HALVES_NOTE})", "", f"Files: {_FILES}", "", "Quantized weights:"]
    for each in DESCRIPTIONS:
        lines += [
            f"  {each.name}: {each.variants.replace('`', '')}",
            f"    exact: {each.exact}; written by {each.writers}",
        ]
    lines += ["", f"Refused by name: {', '.join(REFUSED.values())}"]
    return "\n".join(lines)
