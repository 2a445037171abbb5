"""What quantized weights cost: the demo model's answers, and divergences that a NumPy emulation explains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.quantized.on_load import METHODS
from jaxserve import LLM
from jaxserve.bench.accuracy import demo_accuracy
from jaxserve.cli import main
from jaxserve.demo import MODEL_DIRECTORY
from pallas_kernels.native_library import unavailable
from scripts.quantized_accuracy import STORED, Score, scores_of

pytestmark = pytest.mark.slow
ITEMS = 100
FORMS = [(method, None) for method in METHODS] + [("int4_group", "int8"), ("int8_per_channel_weight_only", "int8")]
TEXT = "Question: 12+30= Answer: 42. Repeat: apple pear plum. Sort: 5 3 9 1. " * 6


def accuracy(**settings: Any) -> float:
    with LLM("demo", **settings) as llm:
        found = demo_accuracy(llm, ITEMS)
    return float(np.mean([share for forms in found.values() for share in forms.values()]))


@pytest.fixture(scope="module")
def of_floats() -> Iterator[float]:
    yield accuracy()


@pytest.mark.parametrize(("method", "activations"), FORMS)
def test_the_demo_model_keeps_its_answers(method: str, activations: str | None, of_floats: float) -> None:
    settings = {} if activations is None else {"quantization_config": {"activations": activations}}
    assert accuracy(quantization=method, **settings) >= 0.995 * of_floats


@pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")
@pytest.mark.parametrize("method", ["int8_w8a8", "int4_group", "fp8_per_channel"])
def test_divergences_are_those_of_an_emulation(method: str, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    main(["convert", str(MODEL_DIRECTORY), str(target), "--format", "safetensors", "--quantization", method])
    scores = scores_of(target, TEXT, 400, STORED)
    assert scores.keys() == {"decoded", *STORED}
    for name, score in scores.items():
        assert score.is_near, (name, score)
    assert scores["int8"].divergence > 1e-7


def test_a_number_that_is_not_near_is_noticed() -> None:
    assert Score(6.0, 1.00e-4, (6.0, 1.04e-4)).is_near
    assert not Score(6.0, 1.00e-4, (6.0, 1.10e-4)).is_near
    assert not Score(6.4, 1.00e-4, (6.0, 1.00e-4)).is_near
    assert Score(6.0, 1e-9, (6.0, 0.0)).is_near
