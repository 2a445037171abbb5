"""Comparisons: the meshes and layouts that are enumerated, their ranking, and that all give the same tokens."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from checkpoints import open_checkpoint
from jaxserve.api.errors import ConfigError
from jaxserve.cli import main
from jaxserve.lab.compare import run as compare_run
from jaxserve.lab.compare.candidates import enumerate_candidates
from jaxserve.lab.compare.rank import Change, Workload, changes_text, step_seconds, tokens_per_s
from jaxserve.lab.compare.result import Comparison
from jaxserve.lab.hardware import get_device, get_link
from jaxserve.lab.random_weights import has_weights, write_random_checkpoint
from sharding import LayoutError, ShardingLayout
from tests.random_checkpoint import DEEPSEEK, LLAMA

H100 = get_device("h100")
SMALL = {**LLAMA, "num_key_value_heads": 4, "num_attention_heads": 8, "max_position_embeddings": 256}


def with_config(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A Llama on two devices."""
    model = with_config(tmp_path_factory.mktemp("model"), SMALL)
    return jaxserve.compare(
        model, 2, layouts=["tensor_parallel", "replicated_attention", "expert_parallel", "replicated"]
    )


def test_all_meshes_and_layouts_that_are_valid_and_differ(planned: Comparison) -> None:
    """For a dense model expert_parallel is tensor_parallel."""
    names = {row.candidate.name for row in planned.rows}
    assert names == {"data=2", "stage=2", "tensor=2 tensor_parallel", "tensor=2 replicated_attention"}
    excluded = {(each.mesh, each.layout): each.reason for each in planned.excluded}
    assert "needs a model with experts" in excluded["expert=2", "tensor_parallel"]
    assert "does not shard the model" in excluded["tensor=2", "replicated"]


def test_the_recommendation_is_the_fastest(planned: Comparison) -> None:
    rates = [tokens_per_s(row.candidate.plan, planned.workload) for row in planned.ranked]
    assert rates[0] >= 0.99 * max(rates) > 0
    assert planned.best is not None and planned.best is planned.ranked[0].candidate
    assert f"Recommended: {planned.best.name}. " in str(planned)
    assert planned.has_equal_tokens is None


def test_other_batch_sizes_contexts_and_links_are_ranked(planned: Comparison) -> None:
    assert {change.what for change in planned.changes} == {"batch", "context", "link"}
    assert [change.value for change in planned.changes if change.what == "batch"][:3] == [1, 2, 4]
    assert [change.value for change in planned.changes if change.what == "context"] == [128, 256]
    assert "pcie4" in [change.value for change in planned.changes if change.what == "link"]


def test_times_of_another_context_and_link(planned: Comparison) -> None:
    plans = {row.candidate.name: row.candidate.plan for row in planned.rows}
    plan = plans["tensor=2 tensor_parallel"]
    step, same = plan.decode_of(32), Workload(32, planned.workload.context)
    assert step_seconds(plan, step, same) == pytest.approx(step.step_s)
    assert step_seconds(plan, step, same._replace(context=1 << 20)) > 2 * step.step_s
    slow = same._replace(link=get_link("pcie3"))
    assert step_seconds(plan, step, slow) > 1.5 * step.step_s
    alone = plans["data=2"]
    assert step_seconds(alone, alone.decode_of(32), slow) == pytest.approx(alone.decode_of(32).step_s)


def test_a_model_that_does_not_fit_is_not_recommended(planned: Comparison) -> None:
    small = dataclasses.replace(H100, memory_bytes=1 << 30)
    found = jaxserve.compare(planned.model, 1, device=small)
    assert found.best is None
    assert "None fits on 1 x h100. the model does not fit" in str(found)
    assert found.as_dict()["recommended"] is None


def test_which_values_change_the_recommendation() -> None:
    found = [Change("batch", 1, "a"), Change("batch", 2, "a"), Change("batch", 4, "b"), Change("batch", 8, "a")]
    found += [Change("link", "pcie3", None), Change("link", "pcie4", "a"), Change("link", "pcie5", None)]
    found += [Change("context", 64, "a"), Change("context", 4096, "a")]
    assert changes_text(found, "a") == [
        "batch: a for 1, 2; b for 4; a for 8",
        "context: the same for 64, 4,096",
        "link: none fits for pcie3, pcie5; a for pcie4",
    ]


def test_all_that_run_give_equal_tokens(tmp_path: Path) -> None:
    model = with_config(tmp_path, SMALL)
    found = jaxserve.compare(
        model, 2, layouts=["split_logits"], meshes=["tensor=2"], batch_sizes=[2], run=True, context=20
    )
    (row,) = found.rows
    assert row.measured is not None and row.measured.error == ""
    assert found.has_equal_tokens
    assert row.measured.step_s[2] >= 0
    assert found.device.name == "cpu"
    assert "random weights" in found.summary
    assert not has_weights(tmp_path)


EIGHT = {**DEEPSEEK, "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 2}
DENSE_MESHES = [
    "data=8",
    "tensor=8",
    "data=2,tensor=4",
    "data=4,tensor=2",
    "stage=2,tensor=4",
    "data=2,stage=2,tensor=2",
]
EXPERT_MESHES = [
    "expert=8",
    "tensor=2,expert=4",
    "tensor=4,expert=2",
    "data=2,tensor=2,expert=2",
    "stage=2,tensor=2,expert=2",
]


@pytest.mark.slow  # dozens of engines
@pytest.mark.parametrize(
    ("config", "meshes", "num_candidates"),
    [
        pytest.param(SMALL, None, 27, id="llama"),
        pytest.param(EIGHT, DENSE_MESHES[:3], 13, id="deepseek"),
        pytest.param(EIGHT, DENSE_MESHES[3:], 18, id="deepseek stages"),
        pytest.param(EIGHT, EXPERT_MESHES, 15, id="deepseek experts"),
    ],
)
def test_every_mesh_and_layout_of_eight_devices_gives_equal_tokens(
    tmp_path: Path,
    config: dict[str, Any],
    meshes: list[str] | None,
    num_candidates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare_run, "_FEWEST_REPEATS", 1)
    monkeypatch.setattr(compare_run, "_LONG_ENOUGH_S", 0.0)
    model = with_config(tmp_path, config)
    found = jaxserve.compare(model, 8, meshes=meshes, batch_sizes=[4], run=True, context=20)
    failed = {row.candidate.name: row.measured for row in found.rows if not (row.measured and row.measured.is_equal)}
    assert not failed
    assert found.has_equal_tokens
    assert len(found.rows) == num_candidates


def test_other_tokens_are_reported(planned: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is that of one device."""
    tokens = iter([[[1], [2]], [[1], [2]], [[1], [3]]])
    monkeypatch.setattr(compare_run, "_run", lambda *_, **__: (next(tokens), {1: 0.001, 32: 0.002}))
    meshes = ["data=2", "stage=2"]
    found = jaxserve.compare(planned.model, 2, layouts=["tensor_parallel"], meshes=meshes, run=True)
    assert len(found.rows) == 2
    assert found.has_equal_tokens is False
    assert "1 of 2 differ" in str(found)
    assert "2.00 ms" in str(found)


def test_a_candidate_that_cannot_run_is_reported(planned: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConfigError("no such kernel")

    monkeypatch.setattr(compare_run, "_run", fail)
    found = jaxserve.compare(planned.model, 2, layouts=["tensor_parallel"], meshes=["data=2"], run=True)
    assert "data=2 did not run: no such kernel" in str(found)
    assert not found.has_equal_tokens


def test_a_layout_of_ones_own(planned: Comparison) -> None:
    rules: dict[str, str] = dict.fromkeys(("q_heads", "kv_heads", "ffn", "expert_ffn"), "tensor")
    own = ShardingLayout("whole_vocabulary", rules)
    found = jaxserve.compare(planned.model, 2, layouts=[own], meshes=["tensor=2"])
    assert [row.candidate.name for row in found.rows] == ["tensor=2 whole_vocabulary"]
    assert found.rows[0].candidate.given is own


def test_the_command_prints_json_and_draws(
    planned: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra research")
    picture = tmp_path / "comparison.svg"
    arguments = [
        "--devices",
        "2",
        "--layouts",
        "tensor_parallel",
        "--link",
        "pcie4",
        "--picture",
        str(picture),
        "--json",
    ]
    main(["compare", planned.model, *arguments, "--picture", str(picture)])
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] in [candidate["name"] for candidate in found["candidates"]]
    assert found["candidates"][0]["plan"]["stages"][0]["weights"] > 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_notebook_shows_table_and_picture(planned: Comparison) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra research")
    html = planned._repr_html_()
    assert "<table>" in html and "<svg" in html and "tensor=2 replicated_attention" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices: expected an integer from 1 to 4096, got 0"),
        ({"batch_sizes": [1, 3]}, r"batch_sizes: expected some of 1, 2, 4, .*256, got \[1, 3\]"),
        ({"batch_sizes": []}, r"batch_sizes: expected some of .* got \[\]"),
        ({"context": 257}, "context: expected an integer from 1 to 256, got 257"),
        ({"context": 250, "run": True}, "context: expected an integer from 1 to 238, got 250"),
        ({"meshes": ["tensor=4"]}, "mesh='tensor=4' has 4 devices, but 2 are compared; .*: data=2|stage=2"),
        ({"meshes": ["expert=2"]}, "no mesh and layout of 2 devices is valid for .*: .*needs a model with experts"),
        ({"device": "h1000"}, "unknown device 'h1000'.* known: h200, h100"),
        ({"link": "pcie"}, "unknown link 'pcie'.* known: pcie3, pcie4"),
    ],
)
def test_arguments_that_are_refused(planned: Comparison, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jaxserve.compare(planned.model, **{"devices": 2, "layouts": ["tensor_parallel"], **arguments})


def test_an_unknown_layout_is_refused(planned: Comparison) -> None:
    with pytest.raises(LayoutError, match="unknown layout 'mine'; supported layouts: "):
        enumerate_candidates(planned.model, 2, H100, layouts=["mine"])


@pytest.mark.parametrize("name", ["x.txt", "none/x.svg"])
def test_a_picture_that_cannot_be_written(planned: Comparison, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra research")
    with pytest.raises(ConfigError, match="picture: .*(cannot be written|ends in one of .*svg)"):
        planned.draw(tmp_path / name)


def test_random_weights_are_the_same_for_a_seed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with_config(source, DEEPSEEK)
    for name in ("a", "b"):
        write_random_checkpoint(source, tmp_path / name)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
    with open_checkpoint(tmp_path / "a") as reader:
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in reader.tensors


def test_random_weights_of_a_large_model_are_refused(tmp_path: Path) -> None:
    model = with_config(tmp_path, {**LLAMA, "vocab_size": 1 << 18, "hidden_size": 1 << 12})
    with pytest.raises(ConfigError, match="has no weights, and random ones would take 8.0 GiB in float32, over 1 GiB"):
        jaxserve.compare(model, 1, run=True)
