"""The heat map of expert load: its numbers, its labels, and the script from a model to a picture."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.demo import MODEL_DIRECTORY
from tests.random_checkpoint import write_checkpoint

pytest.importorskip("matplotlib")

from scripts import draw_expert_load  # noqa: E402

LOAD = np.array([[4, 0, 8], [5, 5, 5], [0, 0, 0]])


def test_shares_are_relative_to_the_layer_s_mean() -> None:
    np.testing.assert_allclose(draw_expert_load.relative(LOAD), [[1, 0, 2], [1, 1, 1], [0, 0, 0]])


def test_labels_and_numbers_of_a_small_model() -> None:
    figure = draw_expert_load.draw(LOAD, (1, 3, 5), "tiny, 2 prompts")
    axes, bar = figure.axes
    assert axes.get_title().startswith("Expert load: tiny, 2 prompts\n15 routed tokens per layer")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("expert", "layer")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "3", "5"]
    assert [text.get_text() for text in axes.texts][:4] == ["1.00", "0.00", "2.00", "1.00"]
    assert bar.get_ylabel() == "tokens, relative to an even share"


def test_a_large_model_has_few_ticks_and_no_numbers() -> None:
    axes = draw_expert_load.draw(np.ones((48, 128), np.int64), range(48), "large").axes[0]
    assert not axes.texts
    assert len(axes.get_xticks()) <= 16 and len(axes.get_yticks()) <= 16


def test_from_a_model_to_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tmp_path / "model", tmp_path / "load.svg"
    model.mkdir()
    demo: dict[str, Any] = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    config = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    config |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 128}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "dtype": "float32"}
    write_checkpoint(model, config | {name: demo[name] for name in ("vocab_size", "eos_token_id")}, seed=1)
    for path in MODEL_DIRECTORY.glob("tokenizer*"):
        shutil.copy(path, model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("12+30=\n\n8+9=\n")
    flags = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["draw_expert_load.py", *flags])
    draw_expert_load.main()
    assert "<svg" in out.read_text()


def test_a_file_without_prompts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.txt").write_text("\n")
    monkeypatch.setattr(sys, "argv", ["draw_expert_load.py", "--model", "x", "--prompts", str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit):
        draw_expert_load.main()
    assert "none.txt has no prompts; it needs one per line" in capsys.readouterr().err
