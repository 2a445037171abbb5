"""Writes the lists of what runs into the documents: architectures and formats of weights, from the registries.

python scripts/make_model_docs.py
"""

import re
from pathlib import Path

from checkpoints.quantized.registry import DESCRIPTIONS, REFUSED
from jaxserve.lab import models
from jaxserve.text.gguf_splits import SPLITTINGS

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 140


def formats() -> str:
    """Return the table of quantized formats."""
    lines = ["| format | variants | exact | written by |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.variants} | {each.exact} | {each.writers} |" for each in DESCRIPTIONS]
    refused = ", ".join(REFUSED.values())
    return "\n".join([*lines, "", *wrapped(f"Refused by name: {refused}, and AWQ's versions `gemv` and `marlin`.")])


def architectures() -> str:
    """Return the table of architectures."""
    lines = ["| `architectures` in config.json | in GGUF files | tool calls | reasoning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(map(_code, each)) + " |" for each in models.architectures()]
    about = f"{len(SPLITTINGS)} names of `tokenizer.ggml.pre` are known. `jaxserve models` prints both tables."
    return "\n".join([*lines, "", *wrapped(f"{models.TEXT_HALVES_NOTE} {models.PARSERS_NOTE} {about}")])


def _code(names: str) -> str:
    return "-" if names == "-" else ", ".join(f"`{name}`" for name in names.split(", "))


def summary() -> str:
    """Return the lines of the front page."""
    names, num_classes = ", ".join(each.name for each in DESCRIPTIONS), len(models.architectures())
    text = (
        f"- **{num_classes} architectures** from safetensors, GGUF, `pytorch_model.bin` (read without torch or "
        f"pickle) and Orbax, quantized in {len(DESCRIPTIONS)} formats ({names}); remote code never runs."
    )
    return "\n".join(wrapped(text, "  "))


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph; those after the first are indented."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
        if len(longer) > WIDTH:
            lines.append(f"{indent}{word}")
        else:
            lines[-1] = longer
    return lines


SECTIONS = {
    "README.md": {"models": summary},
    "jaxserve/GUIDE.md": {"formats": formats, "architectures": architectures},
}
"""Parts of documents between comments that name them, and what belongs there."""


def updated(document: str) -> str:
    """Return a document with its parts as they should be."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for name, content in SECTIONS[document].items():
        begin, end = f"<!-- {name}: scripts/make_model_docs.py -->\n", f"\n<!-- end of {name} -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}{content()}{match[2]}", text)
        if count != 1:
            raise ValueError(f"{document}: expected one part {name!r} between its comments, found {count}")
    return text


def main() -> None:
    """Write the documents."""
    for document in SECTIONS:
        (ROOT / document).write_text(updated(document), encoding="utf-8")


if __name__ == "__main__":
    main()
