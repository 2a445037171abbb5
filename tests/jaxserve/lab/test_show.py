"""Drawings: where weights and pages are, the collectives of a layer, and the forms of a drawing."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.api.errors import ConfigError
from jaxserve.cli import main
from jaxserve.lab.show.drawing import ShownModel
from jaxserve.lab.show.rows import bytes_text, ranges_text
from jaxserve.lab.show.show import show
from sharding import LayoutError, get_layout
from sharding.plan import stated_collectives
from tests.random_checkpoint import DEEPSEEK, LLAMA, SHARING

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with a Llama's config.json alone."""
    return with_config(tmp_path, {**LLAMA, "num_hidden_layers": 4})


def with_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def weight_bytes(model: ShownModel) -> int:
    """Bytes of all weights that a drawing shows, on a device with all layers."""
    ends = [array for end in (model.where.before, model.where.after) for array in end.weights]
    layers = [array for kind in model.where.kinds for array in kind.weights for _ in kind.layers]
    return sum(array.part_bytes for array in [*ends, *layers])


def test_a_stage_and_its_devices(llama: Path) -> None:
    model = show(llama, mesh="data=2,stage=2,tensor=2").model
    assert model.num_devices == 8
    assert [stage.layers for stage in model.stages] == [(0, 1), (2, 3)]
    assert model.devices_of(0) == [0, 1, 4, 5]
    assert model.devices_of(1, data=1) == [6, 7]
    assert sum(stage.weight_bytes for stage in model.stages) == weight_bytes(model)


def test_how_weights_and_pages_are_split(llama: Path) -> None:
    (kind,) = show(llama, mesh="tensor=4").model.where.kinds
    assert kind.layers == (0, 1, 2, 3)
    arrays = {array.name: array for array in kind.weights}
    assert arrays["attention.out.weight"].splits == ((), ("tensor",))
    assert arrays["mlp.gate_up.weight"].part == (48 // 4, 16)
    assert arrays["attention_norm.weight"].splits == ((),)
    assert kind.pages.heads == ((0,), (0,), (1,), (1,))  # two key/value heads
    assert kind.pages.token_bytes == 2 * 8 * 4


def test_arrays_and_collectives_are_in_the_order_of_the_program(llama: Path) -> None:
    where = show(llama, mesh="tensor=2", num_seqs=3, num_tokens=64).model.where
    attention, mlp = where.kinds[0].decode
    assert attention.arrays == ("attention_norm.weight", "attention.qkv.weight", "KV pages", "attention.out.weight")
    assert mlp.arrays == ("mlp_norm.weight", "mlp.gate_up.weight", "mlp.down.weight")
    assert attention.collective == mlp.collective == ("all-reduce", ("tensor",), 3 * 16 * 4, 1)
    assert [step.collective for step in where.before.prefill] == [("all-reduce", ("tensor",), 64 * 16 * 4, 1)]
    assert [step.collective and step.collective.kind for step in where.after.decode] == ["all-gather"]


@pytest.mark.parametrize(
    ("config", "layout", "mesh"),
    [
        (LLAMA, "tensor_parallel", "tensor=2"),
        (LLAMA, "replicated_attention", "tensor=2"),
        (LLAMA, "context_parallel", "tensor=2"),
        (DEEPSEEK, "expert_parallel", "tensor=2"),
        (DEEPSEEK, "expert_all_to_all", "tensor=2,expert=2"),
    ],
)
def test_layers_show_the_collectives_that_a_layout_states(
    tmp_path: Path, config: dict[str, Any], layout: str, mesh: str
) -> None:
    model = show(with_config(tmp_path, config), mesh=mesh, layout=layout).model
    found = dict[str, int]()
    for kind in model.where.kinds:
        for step in kind.decode:
            if step.collective is not None:
                found[step.collective.kind] = found.get(step.collective.kind, 0) + len(kind.layers)
    with_layers, without = (
        stated_collectives(get_layout(layout), n, m) for n, m in ((2, len(model.where.kinds) - 1), (0, 0))
    )
    expected = {kind: count - without.get(kind, 0) for kind, count in with_layers.items()}
    assert found == {kind: count for kind, count in expected.items() if count}
    assert weight_bytes(model) == model.stages[0].weight_bytes


def test_experts_and_lanes(tmp_path: Path) -> None:
    drawing = show(with_config(tmp_path, DEEPSEEK), mesh="tensor=2,expert=2")
    dense, sparse = drawing.model.where.kinds
    assert (dense.layers, sparse.layers) == ((0,), (1,))
    assert (sparse.pages.content, sparse.pages.pages_axis) == ("latents", "expert")
    (down,) = [array for array in sparse.weights if array.name == "mlp.down"]
    assert (down.num_experts, down.splits) == (4, (("expert",), ("tensor",)))
    assert "4 × [16, 8]" in str(drawing)
    assert "2 × [16, 4]" in str(drawing)
    assert "experts over expert, columns over tensor" in str(drawing)
    assert "requests over expert" in str(drawing)


def test_decode_steps_that_exchange_otherwise_are_told_apart(llama: Path) -> None:
    text = str(show(llama, mesh="tensor=2", layout="sequence_parallel"))
    assert "⇄ reduce-scatter over tensor: 64 KiB at prefill" in text
    assert "⇄ all-reduce over tensor: 64 B at decode instead" in text


def test_devices_that_share_the_tokens_of_pages(llama: Path) -> None:
    drawing = show(llama, mesh="tensor=2", layout="context_parallel")
    (kind,) = drawing.model.where.kinds
    assert (kind.pages.heads, kind.pages.tokens_axis, kind.pages.token_bytes) == (((0, 1),), "tensor", 2 * 8 * 4)
    assert "tokens over tensor" in str(drawing)


def test_layers_that_read_the_pages_of_others(tmp_path: Path) -> None:
    drawn = show(with_config(tmp_path, SHARING))
    text, pages = str(drawn), [kind.pages for kind in drawn.model.where.kinds]
    assert [(each.reads, each.token_bytes) for each in pages] == [(None, 128.0), (None, 256.0), (0, 0.0), (1, 0.0)]
    assert "keys and values of 2 × 16  " in text and "those of layer 0, latest 5 tokens" in text
    assert "those of layer 1  " in text and "384 B" in text


def test_one_device_needs_no_collective(llama: Path) -> None:
    drawing = show(llama)
    assert "⇄" not in str(drawing)
    assert "⇄" not in drawing.svg


@pytest.mark.parametrize("mesh", ["tensor=2", "data=8,stage=4,tensor=2", "stage=2,tensor=4"])
def test_the_picture_is_inside_its_frame(llama: Path, mesh: str) -> None:
    drawing = show(llama, mesh=mesh)
    assert drawing._repr_html_() == drawing.svg
    root = ElementTree.fromstring(drawing.svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [
        {name: float(box.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        for box in root.iter(f"{SVG}rect")
    ]
    assert len(boxes) > 10
    assert all(box["x"] + box["width"] <= width and box["y"] + box["height"] <= height for box in boxes)
    texts = [(float(text.attrib["x"]), float(text.attrib["y"]), text.text or "") for text in root.iter(f"{SVG}text")]
    assert all(y < height and x + 6 * len(text) < width for x, y, text in texts)


def test_the_command_prints_json_and_writes_svg(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = llama / "drawing.svg"
    main(["show", str(llama), "--mesh", "stage=2,tensor=2", "--json", "--svg", str(picture)])
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 1, "stage": 2, "tensor": 2, "expert": 1}
    assert found["stages"][1]["devices"] == [2, 3]
    (layers,) = found["where"]["layers"]
    assert layers["decode"][0]["collective"]["kind"] == "all-reduce"
    assert picture.read_text().startswith("<svg")


def test_the_picture_in_the_readme(repository: Path) -> None:
    drawing = jaxserve.show("demo", mesh="stage=2,tensor=2")
    assert str(drawing).startswith("demo: LlamaForCausalLM, 4 layers")
    assert (repository / "scripts/charts/show.svg").read_text() == drawing.svg


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "tensor=3"}, "tensor_parallel_size=3 does not divide .* valid sizes: 1, 2, 4"),
        ({"mesh": "stage=5"}, "pipeline_parallel_size=5 exceeds the 4 layers"),
        ({"mesh": "rows=2"}, "mesh: expected a size >= 1 for any of data, stage, tensor, expert"),
        ({"mesh": "expert=2"}, "needs a model with experts"),
        ({"device": "h1000"}, "h100"),
        ({"num_seqs": 0}, "num_seqs: expected an integer >= 1, got 0"),
        ({"num_tokens": True}, "num_tokens: expected an integer >= 1, got True"),
        ({"mash": "tensor=2"}, "LLM has no argument 'mash'; did you mean 'mesh'"),
    ],
)
def test_settings_that_cannot_be_shown(llama: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        show(llama, **settings)


def test_quantized_weights_are_shown_as_plain_ones(tmp_path: Path) -> None:
    directory = with_config(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    assert show(directory).model.num_devices == 1


def test_an_unknown_layout(llama: Path) -> None:
    with pytest.raises(LayoutError, match="unknown layout 'mine'; supported layouts: .*tensor_parallel"):
        show(llama, layout="mine")


def test_a_picture_that_cannot_be_written(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", str(llama), "--svg", str(llama / "none" / "x.svg")])
    assert "--svg: " in capsys.readouterr().err


def test_numbers() -> None:
    assert ranges_text([0, 1, 2, 7]) == "0–2, 7"
    assert ranges_text([1, 3, 5, 7]) == "1, 3, …, 7"
    assert [bytes_text(number) for number in (0, 999, 1000, 1 << 20)] == ["0 B", "999 B", "0.977 KiB", "1 MiB"]
