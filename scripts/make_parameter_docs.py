"""Writes `jaxserve/PARAMETERS.md`: every parameter with its type, its default and one line, from the fields themselves.

python scripts/make_parameter_docs.py
"""

import ast
import dataclasses
import enum
import inspect
from pathlib import Path

from jaxserve.cli_arguments import field_docs
from jaxserve.config import EngineConfig
from jaxserve.pooling_params import PoolingParams
from jaxserve.sampling_params import BeamSearchParams, SamplingParams
from jaxserve.server.settings import ServerConfig
from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams

PAGE = Path(__file__).resolve().parent.parent / "jaxserve" / "PARAMETERS.md"
PIPE = r"\|"  # a bar within a cell

SECTIONS: tuple[tuple[type, str], ...] = (
    (SamplingParams, "How one request is sampled and when it ends; `jaxserve generate` has a flag for most."),
    (StructuredOutputsParams, "What a text must keep to: `SamplingParams(structured_outputs=...)`."),
    (RepetitionDetectionParams, "When a repeating text ends: `SamplingParams(repetition_detection=...)`."),
    (PoolingParams, "How `LLM.embed` makes a vector of a prompt."),
    (BeamSearchParams, "How `LLM.beam_search` searches."),
    (
        EngineConfig,
        "How an engine is built: the arguments of `LLM`, and flags of every `jaxserve` command that runs one.",
    ),
    (ServerConfig, "How a server listens, whom it lets in and what it refuses: flags of `jaxserve serve`."),
)

HEAD = """# Parameters

Made by `scripts/make_parameter_docs.py` from the fields of the classes; change the text there. Names and defaults are
vLLM's. An unknown name, a value of the wrong type or one out of range raises an error that says what was expected.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(cls, about) for cls, about in SECTIONS)])


def section(cls: type, about: str) -> str:
    """Return a heading and a table with a line for each field of a dataclass."""
    docs, types = field_docs(cls), annotations(cls)
    lines = [f"## {cls.__name__}", "", about, "", "| Name | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        cells = (f"`{field.name}`", f"`{types[field.name]}`", default(field), docs[field.name].replace("``", "`"))
        lines.append(f"| {' | '.join(cell.replace('|', PIPE) for cell in cells)} |")
    return "\n".join([*lines, ""])


def annotations(cls: type) -> dict[str, str]:
    """Return each field's type as the source has it."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): ast.unparse(node.annotation) for node in fields}


def default(field: dataclasses.Field) -> str:
    """Return a field's default as one writes it."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"
    return f"`{field.default if isinstance(field.default, enum.Enum) else repr(field.default)}`"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
