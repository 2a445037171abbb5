"""The page about sharding has the numbers that its script computes, and the script that tries a layout does so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxserve.lab.hardware import LINKS
from jaxserve.lab.links import ring_seconds
from tests.random_checkpoint import LLAMA

pytest.importorskip("matplotlib")

from scripts import draw_sharding, sharding_numbers, try_layout  # noqa: E402

PAGE = draw_sharding.PAGE.read_text()
COMMAND = "run: python scripts/draw_sharding.py"
BLOCK = re.compile(r"<!-- numbers: ([\w-]+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)


def test_the_page_has_an_example_of_each_section() -> None:
    blocks = BLOCK.findall(PAGE)
    assert [name for name, _ in blocks] == list(sharding_numbers.SECTIONS)
    assert all(text.strip() for _, text in blocks)


def test_quantities_of_the_text_are_those_of_the_examples() -> None:
    """Except the shares and sizes that are settings."""
    text, examples = BLOCK.sub("", PAGE), " ".join(text for _, text in BLOCK.findall(PAGE))
    named = set(re.findall(r"\d[\d.,]* ?(?:[KMG]iB|ms|µs|×|GB/s)", text))
    assert named <= set(re.findall(r"\d[\d.,]* ?(?:[KMG]iB|ms|µs|×|GB/s)", examples))


def test_the_example_of_all_reduces_is_what_the_script_computes(tmp_path: Path) -> None:
    computed = sharding_numbers.all_reduce(sharding_numbers.Plans(tmp_path))
    assert draw_sharding.with_numbers(PAGE, {"all-reduce": computed}) == PAGE, COMMAND
    assert "| decode, 1 sequence | 1 | 96 | 10 KiB | 960 KiB |" in computed


@pytest.mark.slow  # two dozen plans
def test_all_examples_are_what_the_script_computes(tmp_path: Path) -> None:
    plans = sharding_numbers.Plans(tmp_path)
    examples = {name: make(plans) for name, make in sharding_numbers.SECTIONS.items()}
    assert draw_sharding.with_numbers(PAGE, examples) == PAGE, COMMAND
    hand, planned = re.findall(r"[\d.]+ GiB", examples["weights"])[:2]
    assert hand == planned
    assert len(draw_sharding.draw_memory(plans).axes[0].texts) == 4
    assert [axes.get_xlabel() for axes in draw_sharding.draw_hosts(plans).axes] == ["latency of the step, ms"] * 2


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no <!-- numbers: kv --> followed by <!-- end -->; add both lines"):
        draw_sharding.with_numbers("# Page\n", {"kv": "1"})


def test_the_picture_of_all_reduces_has_the_times_of_the_model() -> None:
    (axes,) = draw_sharding.draw_all_reduce().axes
    lines = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert set(lines) == {"pcie4", "infiniband-ndr", "nvlink-a100", "nvlink-h200"}
    num_bytes, time_us = (float(np.asarray(values)[-1]) for values in lines["pcie4"].get_data())
    assert time_us == pytest.approx(1e6 * ring_seconds("all-reduce", int(num_bytes), 8, LINKS["pcie4"]))
    assert "µs" in axes.get_ylabel() and "bytes" in axes.get_xlabel()


def test_every_picture_is_in_the_page_and_committed() -> None:
    pictures = re.findall(r"\]\(\.\./scripts/charts/(sharding_\w+\.svg)\)", PAGE)
    assert sorted(pictures) == sorted(path.name for path in draw_sharding.CHARTS.glob("sharding_*.svg"))


def test_a_layout_is_planned_drawn_run_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layout has no collectives but those of the layers, and gives the tokens of one device."""
    config = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    compared = try_layout.try_layout(str(tmp_path), 2, tmp_path, batch_sizes=[2], context=20)
    printed = capsys.readouterr().out
    assert "layout whole_vocabulary" in printed and "Recommended: " in printed
    assert compared.has_equal_tokens
    found = {row.candidate.plan.layout: row.candidate.plan for row in compared.rows}
    parts = {name: {each.part for each in plan.decode_of(1).communication} for name, plan in found.items()}
    assert parts == {"whole_vocabulary": {"layers"}, "tensor_parallel": {"embedding", "layers", "head and sampling"}}
    assert "<svg" in (tmp_path / "layout.svg").read_text() and "<svg" in (tmp_path / "comparison.svg").read_text()
