"""The lists of architectures and formats in the documents, and those of ``jaxserve models``, are the registries'."""

import pytest

from checkpoints.quantized.gguf_architectures import ARCHITECTURES
from checkpoints.quantized.registry import DESCRIPTIONS, FORMATS
from jaxserve.cli import main
from jaxserve.lab.models import architectures
from jaxserve.models.registry import FAMILIES
from jaxserve.models.text_half import TEXT_HALVES
from scripts.make_model_docs import ROOT, SECTIONS, updated


def test_the_documents_are_current() -> None:
    for document in SECTIONS:
        text = (ROOT / document).read_text()
        assert text == updated(document), f"{document} is stale: run python scripts/make_model_docs.py"


def test_every_format_and_architecture_is_described() -> None:
    methods = [method for each in DESCRIPTIONS for method in each.methods]
    assert sorted(methods) == sorted([*FORMATS, "auto-round"])
    described = {each.name: each.gguf for each in architectures()}
    assert {*described} == {*FAMILIES, *TEXT_HALVES} and set(described.values()) - {"-"} == set(ARCHITECTURES)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(["models"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["Qwen3MoeForCausalLM", "qwen3moe", "qwen3", "qwen3"] for line in lines)
    assert any(line.startswith("  GPTQ: 2, 3, 4, 8 bits") for line in lines)
    assert lines[-1].startswith("Refused by name: codebooks of AQLM")
